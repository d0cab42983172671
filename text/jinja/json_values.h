// JSON as values of a template.
#pragma once

#include <string_view>

#include <nlohmann/json.hpp>

#include "base/status.h"
#include "text/jinja/runtime.h"
#include "text/jinja/value.h"

namespace dflash::jinja {

// Converts `json`, keys in their order; everything that it prints as will be marked as content when
// `is_content`. Errors: InvalidArgument, starting with `name`, for text that is not valid UTF-8, binary
// values and integers above 2^63 - 1; ResourceExhausted when it nests deeper than max_value_depth or is too
// large for the rendering's steps.
absl::StatusOr<Value> FromJson(Runtime& runtime, std::string_view name, const nlohmann::ordered_json& json,
                               bool is_content);

}  // namespace dflash::jinja
