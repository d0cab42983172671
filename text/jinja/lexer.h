// Splits a template into tokens, with trim_blocks and lstrip_blocks on, as transformers configures Jinja.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace dflash::jinja {

struct Token {
  enum class Kind : uint8_t {
    kData,           // text: what to print
    kBlockBegin,     // {%
    kBlockEnd,       // %}
    kVariableBegin,  // {{
    kVariableEnd,    // }}
    kName,           // text
    kString,         // text: the value, escapes resolved
    kInteger,        // integer
    kFloat,          // number
    kOperator,       // text, e.g. "**"
    kEnd,
  };
  Kind kind;
  int line;
  std::string text;
  int64_t integer = 0;
  double number = 0;
};

// Returns the tokens, the last of them kEnd. `source` must be valid UTF-8. Comments are dropped and white
// space around tags is trimmed here. Errors: InvalidArgument ("line N: ...") for what Jinja rejects,
// Unimplemented for raw blocks, names outside ASCII and integers beyond 64 bits.
absl::StatusOr<std::vector<Token>> Tokenize(std::string_view source);

}  // namespace dflash::jinja
