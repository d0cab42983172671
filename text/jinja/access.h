// Attributes, items, slices and iteration of values, with Jinja's rules for missing things.
// Every function returns InvalidArgument where Python raises, Unimplemented for what is left out, and
// ResourceExhausted when the rendering's limits are reached.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "base/status.h"
#include "text/jinja/runtime.h"
#include "text/jinja/value.h"

namespace dflash::jinja {

// `object.name`: a method or attribute, else the item of that name, else undefined. Methods that would change
// a list or a dict, and private attributes, are undefined with a message that says so, as in Jinja's sandbox.
absl::StatusOr<Value> GetAttribute(Runtime& runtime, const Value& object, std::string_view name);

// `object[key]`: the item, else the attribute of that name, else undefined.
absl::StatusOr<Value> GetItem(Runtime& runtime, const Value& object, const Value& key);

// `object[start:stop:step]`; None stands for an absent bound.
absl::StatusOr<Value> GetSlice(Runtime& runtime, const Value& object, const Value& start, const Value& stop,
                               const Value& step);

// The items that a `for` walks: of a dict its keys, of a string its characters. Consumes an iterator.
absl::StatusOr<std::shared_ptr<const Sequence>> Iterate(Runtime& runtime, const Value& value);

// Whether Iterate would succeed.
bool IsIterable(const Value& value);

// len(value).
absl::StatusOr<int64_t> Length(const Value& value);

}  // namespace dflash::jinja
