#include "base/group_secret.h"

#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "base/regular_file.h"
#include "base/sha256.h"
#include "base/status.h"

namespace dflash {
namespace {

constexpr int64_t kMaxSecretBytes = 4096;

}  // namespace

absl::StatusOr<std::string> ReadGroupSecret(const std::string& path) {
  struct stat info = {};
  // A secret that the system's administrator gives to a service is root's and readable by the service's
  // group: so it is in a Kubernetes volume, where nobody can change the mode.
  const bool exists = stat(path.c_str(), &info) == 0;
  const mode_t forbidden = info.st_uid == 0 ? 037 : 077;
  if (exists && (info.st_mode & forbidden) != 0) {
    return absl::PermissionDeniedError(absl::StrCat(
        path,
        ": others may read the group secret; make it accessible to its owner only, or root's and "
        "readable by its group"));
  }
  DFLASH_ASSIGN_OR_RETURN(std::string text, ReadFile(path, kMaxSecretBytes));
  text = text.substr(0, text.find('\n'));
  if (text.size() < kShortestGroupSecret) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": the first line has ", text.size(),
                                                   " bytes, a group secret at least ", kShortestGroupSecret));
  }
  return text;
}

std::string CoordinatorProof(const std::string& secret) { return ToHex(HmacSha256(secret, "coordinator")); }

}  // namespace dflash
