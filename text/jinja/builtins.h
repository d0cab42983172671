// The functions that every template can call.
#pragma once

#include <optional>
#include <string_view>

#include "base/status.h"
#include "text/jinja/runtime.h"
#include "text/jinja/value.h"

namespace dflash::jinja {

// range, dict, namespace, raise_exception, strftime_now; nothing for another name.
// Errors: Unimplemented for a function of Jinja that is left out (cycler, joiner, lipsum).
absl::StatusOr<std::optional<Value>> FindBuiltin(std::string_view name);

// raise_exception always gives InvalidArgument with its message.
absl::StatusOr<Value> CallBuiltin(Runtime& runtime, Builtin builtin, const Arguments& arguments);

}  // namespace dflash::jinja
