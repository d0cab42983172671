// The text of one request's output: detokenized as it comes, cut at a stop string.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "text/detokenizer.h"
#include "text/stop_matcher.h"
#include "text/tokenizer.h"
#include "worker/engine/request.h"

namespace dflash {

class TextStream {
 public:
  // No tokenizer, or neither text nor stop strings wanted: yields no text.
  // InvalidArgument: illegal stop strings, or stop strings without a tokenizer.
  static absl::StatusOr<TextStream> Create(const Tokenizer* tokenizer, const GenerationRequest& request);

  // Takes the next token and returns text that may be sent. After a stop string matched: nothing. Stop
  // strings are looked for behind the text of the first min_tokens tokens.
  std::string Append(int32_t token);
  // The output ends without a stop string: returns what was held back.
  std::string Finish();
  // The stop string that matched, or null.
  const std::string* matched_stop() const { return matched_ ? &*matched_ : nullptr; }

 private:
  std::string Match(std::string chunk);

  std::optional<Detokenizer> detokenizer_;  // none: no text
  std::optional<StopMatcher> matcher_;      // none: no stop strings
  std::vector<std::string> stop_strings_;
  std::optional<std::string> matched_;
  bool return_text_ = false;
  bool include_stop_ = false;
  int64_t unmatched_tokens_ = 0;  // in which no stop string is looked for
};

}  // namespace dflash
