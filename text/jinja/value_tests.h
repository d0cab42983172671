// Jinja's tests: what may follow `is`.
#pragma once

#include <string_view>

#include "base/status.h"
#include "text/jinja/runtime.h"
#include "text/jinja/value.h"

namespace dflash::jinja {

struct ValueTest {
  std::string_view name;
  absl::StatusOr<bool> (*apply)(Runtime& runtime, const Value& value, const Arguments& arguments);
};

// Errors: InvalidArgument when Jinja has no test of that name, Unimplemented when it has but this interpreter
// not.
absl::StatusOr<const ValueTest*> FindValueTest(std::string_view name);

}  // namespace dflash::jinja
