#include "daemon/auth/token_store.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/regular_file.h"
#include "base/status.h"

namespace dflash {

absl::StatusOr<std::unique_ptr<TokenStore>> TokenStore::Open(const std::string& path) {
  std::unique_ptr<TokenStore> store(new TokenStore(path));
  DFLASH_RETURN_IF_ERROR(store->Refresh().status());
  return store;
}

absl::StatusOr<TokenStore::Version> TokenStore::Look() const {
  struct stat found {};
  if (stat(path_.c_str(), &found) != 0) {
    return absl::UnavailableError(absl::StrCat(path_, ": ", std::strerror(errno)));
  }
  return Version{found.st_dev, found.st_ino, found.st_size, found.st_mtim.tv_sec, found.st_mtim.tv_nsec};
}

absl::StatusOr<bool> TokenStore::Refresh() {
  // Looked at before it is read: a change in between is seen the next time.
  const absl::StatusOr<Version> version = Look();
  if (!version.ok()) {
    if (version_ == Version()) return version.status();
    return false;  // being replaced
  }
  if (*version == version_) return false;
  version_ = *version;
  DFLASH_ASSIGN_OR_RETURN(const std::string text, ReadFile(path_, Tokens::kMaxFileBytes));
  DFLASH_ASSIGN_OR_RETURN(Tokens tokens, Tokens::Parse(text, path_));
  auto shared = std::make_shared<const Tokens>(std::move(tokens));
  absl::MutexLock lock(&mutex_);
  tokens_ = std::move(shared);
  return true;
}

absl::StatusOr<std::string> TokenStore::Check(std::string_view authorization, Role role,
                                              absl::Time now) const {
  std::shared_ptr<const Tokens> tokens;
  {
    absl::MutexLock lock(&mutex_);
    tokens = tokens_;
  }
  return tokens->Check(authorization, role, now);
}

size_t TokenStore::size() const {
  absl::MutexLock lock(&mutex_);
  return tokens_->size();
}

}  // namespace dflash
