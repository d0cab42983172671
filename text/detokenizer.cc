#include "text/detokenizer.h"

#include <utility>

#include "base/status.h"
#include "text/utf8.h"

namespace dflash {

absl::StatusOr<std::string> Detokenizer::Feed(std::span<const int32_t> ids) {
  std::string bytes = incomplete_;
  for (const int32_t id : ids) {
    DFLASH_ASSIGN_OR_RETURN(const Tokenizer::Token token, tokenizer_->Find(id));
    if (token.special && special_tokens_ == SpecialTokens::kDrop) continue;
    bytes.append(token.bytes);
  }
  std::string text;
  const size_t left = AppendWellFormed(bytes, text);
  incomplete_ = bytes.substr(bytes.size() - left);
  return text;
}

std::string Detokenizer::Finish() { return ReplaceIllFormed(std::exchange(incomplete_, {})); }

}  // namespace dflash
