#include "worker/engine/text_stream.h"

#include <span>
#include <utility>

#include "base/status.h"

namespace dflash {

absl::StatusOr<TextStream> TextStream::Create(const Tokenizer* tokenizer, const GenerationRequest& request) {
  TextStream stream;
  stream.return_text_ = request.return_text;
  stream.stop_strings_ = request.stop_strings;
  stream.include_stop_ = request.include_stop_in_text;
  stream.unmatched_tokens_ = request.min_tokens;
  const bool stops = !request.stop_strings.empty();
  if (tokenizer == nullptr) {
    if (stops) return absl::InvalidArgumentError("stop strings need a tokenizer");
    return stream;
  }
  if (!request.return_text && !stops) return stream;
  stream.detokenizer_.emplace(*tokenizer,
                              request.keep_special_tokens ? SpecialTokens::kKeep : SpecialTokens::kDrop);
  if (stops) {
    DFLASH_ASSIGN_OR_RETURN(stream.matcher_, StopMatcher::Create(request.stop_strings));
  }
  return stream;
}

std::string TextStream::Append(int32_t token) {
  if (!detokenizer_ || matched_) return "";
  // An id without a token (a gap in the vocabulary) has no text; it is an output token all the same.
  absl::StatusOr<std::string> text = detokenizer_->Feed(std::span(&token, 1));
  const bool looks_for_stops = unmatched_tokens_ == 0;
  if (!looks_for_stops) --unmatched_tokens_;
  if (!text.ok()) return "";
  if (looks_for_stops) return Match(*std::move(text));
  return return_text_ ? *std::move(text) : "";
}

std::string TextStream::Finish() {
  if (!detokenizer_ || matched_) return "";
  std::string text = Match(detokenizer_->Finish());
  if (matcher_ && !matched_ && return_text_) text += matcher_->Finish();
  return text;
}

std::string TextStream::Match(std::string chunk) {
  if (!matcher_) return return_text_ ? std::move(chunk) : "";
  StopMatcher::Result result = matcher_->Feed(chunk);
  if (result.match) {
    matched_ = stop_strings_[result.match->string];
    if (include_stop_) result.text += *matched_;
  }
  return return_text_ ? std::move(result.text) : "";
}

}  // namespace dflash
