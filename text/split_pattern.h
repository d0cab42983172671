// Cuts text into the pieces that byte-pair encoding works on: tokenizer.json's Split pre-tokenizer with a
// regular expression and behavior Isolated (every match is a piece, and so is all that lies between two
// matches).
#pragma once

#include <memory>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace dflash {

// A compiled pattern. Immutable, usable from many threads at once. Character classes are Unicode's, with the
// tables of PCRE2 (Unicode 14 in 10.42): characters that Unicode assigned later count as neither letter, mark
// nor number.
class SplitPattern {
 public:
  // Errors: InvalidArgument when `pattern` is no valid expression or can match the empty string;
  // Unimplemented for an escape of a letter or digit other than \p \P \s \S \r \n \t.
  static absl::StatusOr<SplitPattern> Compile(std::string_view pattern);

  SplitPattern(SplitPattern&&) noexcept;
  SplitPattern& operator=(SplitPattern&&) noexcept;
  ~SplitPattern();

  // Calls `piece` with each piece of `text`, in order; none is empty and together they are the text, which
  // must be well-formed UTF-8. Errors: ResourceExhausted when one match needs more steps or memory than the
  // fixed limits (a pattern that backtracks without bound).
  absl::Status Split(std::string_view text, absl::FunctionRef<void(std::string_view)> piece) const;

 private:
  struct Code;
  explicit SplitPattern(std::unique_ptr<const Code> code);
  std::unique_ptr<const Code> code_;
};

}  // namespace dflash
