// The tokens of a file that may change while the server runs.
#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "daemon/auth/tokens.h"

namespace dflash {

class TokenStore {
 public:
  // Errors of ReadFile and Tokens::Parse.
  static absl::StatusOr<std::unique_ptr<TokenStore>> Open(const std::string& path);

  // Any thread; as Tokens::Check, with the tokens in force.
  absl::StatusOr<std::string> Check(std::string_view authorization, Role role, absl::Time now) const;

  // Reads the file again when it is another than before (replaced, or written to); true when it was. On an
  // error the tokens in force stay, and the same file is not tried again. Call it about once a second, from
  // one thread.
  absl::StatusOr<bool> Refresh();

  size_t size() const;

 private:
  // What tells one version of the file from another.
  struct Version {
    uint64_t device = 0, inode = 0;
    int64_t bytes = 0, seconds = 0, nanoseconds = 0;
    bool operator==(const Version&) const = default;
  };
  explicit TokenStore(std::string path) : path_(std::move(path)) {}
  absl::StatusOr<Version> Look() const;

  const std::string path_;
  Version version_;
  mutable absl::Mutex mutex_;
  std::shared_ptr<const Tokens> tokens_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dflash
