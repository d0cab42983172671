// Python's methods of str and dict.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/jinja/runtime.h"
#include "text/jinja/unicode.h"
#include "text/jinja/value.h"

namespace dflash::jinja {

// Calls `method`. Errors: Unimplemented naming a method of Python that is left out; InvalidArgument where
// Python raises.
absl::StatusOr<Value> CallMethod(Runtime& runtime, const Method& method, const Arguments& arguments);

// The parts of it that filters share.

// str.strip(chars) at the chosen ends; without `chars`, white space.
absl::StatusOr<MarkedText> Strip(Runtime& runtime, const MarkedText& text, const MarkedText* chars, bool left,
                                 bool right);
// str.replace(old, replacement, count); a negative count replaces all.
absl::StatusOr<MarkedText> Replace(Runtime& runtime, const MarkedText& text, const MarkedText& old,
                                   const MarkedText& replacement, int64_t count);
// Brings every character to the case that `choose`, called in order, wants for it: str.upper(), lower(),
// title().
absl::StatusOr<MarkedText> ToCase(Runtime& runtime, const MarkedText& text,
                                  const std::function<LetterCase(char32_t)>& choose);
// str.capitalize().
absl::StatusOr<MarkedText> Capitalize(Runtime& runtime, const MarkedText& text);
// str.splitlines() without the line ends.
absl::StatusOr<std::vector<MarkedText>> SplitLines(Runtime& runtime, const MarkedText& text);
// separator.join(texts).
absl::StatusOr<MarkedText> Join(Runtime& runtime, const MarkedText& separator,
                                const std::vector<MarkedText>& texts);

}  // namespace dflash::jinja
