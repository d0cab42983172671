// Jinja's filters, as far as chat templates use them (the list is in filters.cc and sequence_filters.cc).
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/jinja/runtime.h"
#include "text/jinja/value.h"

namespace dflash::jinja {

using FilterFunction = absl::StatusOr<Value> (*)(Runtime& runtime, const Value& input,
                                                 const Arguments& arguments);

struct Filter {
  std::string_view name;
  FilterFunction apply;
};

// Errors: InvalidArgument when Jinja has no filter of that name, Unimplemented when it has but this
// interpreter not.
absl::StatusOr<const Filter*> FindFilter(std::string_view name);

// The filters that walk sequences and dicts.
const std::vector<Filter>& SequenceFilters();

}  // namespace dflash::jinja
