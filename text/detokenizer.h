// Turns token ids into text as they come.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "text/tokenizer.h"

namespace dflash {

// The detokenizer of one output. What Feed and Finish return, put together, is Tokenizer::Decode of all the
// ids, and each part is well-formed UTF-8 by itself: a character whose bytes are spread over several tokens
// comes with the last of them. Not thread-safe; `tokenizer` is not owned and must outlive it.
class Detokenizer {
 public:
  Detokenizer(const Tokenizer& tokenizer, SpecialTokens special_tokens)
      : tokenizer_(&tokenizer), special_tokens_(special_tokens) {}

  // Takes the next ids and returns all text that they complete (often none).
  // Error: InvalidArgument for an id without token; then none of `ids` is taken.
  absl::StatusOr<std::string> Feed(std::span<const int32_t> ids);

  // Ends the output: returns U+FFFD when a character is incomplete, else nothing. The next Feed starts a new
  // output.
  std::string Finish();

 private:
  const Tokenizer* tokenizer_;
  SpecialTokens special_tokens_;
  std::string incomplete_;  // 0..3 bytes
};

}  // namespace dflash
