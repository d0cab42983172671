// Python's str(), repr() and json.dumps() of values.
#pragma once

#include <optional>
#include <string>

#include "base/status.h"
#include "text/jinja/runtime.h"
#include "text/jinja/value.h"

namespace dflash::jinja {

// float.__repr__: the shortest digits that read back as the same number; "1.0", "1e+16", "nan".
std::string FloatRepr(double value);

// str(value). A string comes back as it is, without its markup flag. Undefined is empty.
// Errors: Unimplemented for values that Python prints with a memory address (functions, iterators) and for
// namespaces and loops; ResourceExhausted.
absl::StatusOr<MarkedText> ToText(Runtime& runtime, const Value& value);

// repr(value); errors as above.
absl::StatusOr<MarkedText> ToRepr(Runtime& runtime, const Value& value);

// The keyword arguments of the tojson filter as transformers defines it (json.dumps, no HTML escaping).
struct JsonStyle {
  bool ensure_ascii = false;
  std::optional<std::string> indent;          // one level of it; without: everything on one line
  std::optional<std::string> item_separator;  // default ", ", with an indent ","
  std::optional<std::string> key_separator;   // default ": "
  bool sort_keys = false;
};

// Errors: InvalidArgument for what JSON cannot hold (undefined values, functions); ResourceExhausted.
absl::StatusOr<MarkedText> ToJson(Runtime& runtime, const Value& value, const JsonStyle& style);

}  // namespace dflash::jinja
