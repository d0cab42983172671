// Parses a template into its syntax tree by Jinja's grammar.
#pragma once

#include <string_view>

#include "base/status.h"
#include "text/jinja/ast.h"
#include "text/jinja/runtime.h"

namespace dflash::jinja {

// `source` must be valid UTF-8. Errors, each with "line N: ": InvalidArgument for what Jinja rejects (syntax,
// unknown tags, filters and tests), Unimplemented naming a feature of Jinja that is left out,
// ResourceExhausted when it nests deeper than limits.max_nesting.
absl::StatusOr<Body> Parse(std::string_view source, const Limits& limits);

}  // namespace dflash::jinja
