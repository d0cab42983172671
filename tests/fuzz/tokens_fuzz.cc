// Token files. Whatever the bytes: an answer; errors with place, and nobody gets in with an empty header.
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "daemon/auth/tokens.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<dflash::Tokens> tokens = dflash::Tokens::Parse(text, "input");
  if (!tokens.ok()) {
    DFLASH_CHECK(tokens.status().code() == absl::StatusCode::kInvalidArgument &&
                     tokens.status().message().substr(0, 6) == "input:",
                 tokens.status().ToString().c_str());
    return 0;
  }
  DFLASH_CHECK(!tokens->Check("", dflash::Role::kInference, absl::UnixEpoch()).ok());
  (void)tokens->Check(text, dflash::Role::kAdmin, absl::UnixEpoch());
  return 0;
}
