#include "daemon/frontend/model_files.h"

#include "base/regular_file.h"
#include "base/sha256.h"
#include "base/status.h"
#include "text/tokenizer_file.h"

namespace dflash {
namespace {

constexpr int64_t kMaxConfigBytes = 16 << 20;  // more than the worker takes

absl::StatusOr<std::string> DigestOfConfig(const std::string& folder) {
  if (folder.empty()) return std::string();
  const absl::StatusOr<std::string> text = ReadFile(folder + "/config.json", kMaxConfigBytes);
  if (absl::IsNotFound(text.status())) return std::string();
  if (!text.ok()) return text.status();
  return Sha256().Add(*text).HexDigest();
}

}  // namespace

absl::StatusOr<ModelIdentity> IdentityOfFiles(const std::string& model, const std::string& draft_model) {
  ModelIdentity identity;
  DFLASH_ASSIGN_OR_RETURN(identity.tokenizer, TokenizerDigest(model));
  DFLASH_ASSIGN_OR_RETURN(identity.target_config, DigestOfConfig(model));
  DFLASH_ASSIGN_OR_RETURN(identity.drafter_config, DigestOfConfig(draft_model));
  return identity;
}

}  // namespace dflash
