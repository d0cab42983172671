// Python's operators and comparisons on values.
// Every function returns InvalidArgument where Python raises, Unimplemented for what is left out, and
// ResourceExhausted when the rendering's limits are reached.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/status.h"
#include "text/jinja/runtime.h"
#include "text/jinja/value.h"

namespace dflash::jinja {

enum class BinaryOperator : uint8_t { kAdd, kSubtract, kMultiply, kDivide, kFloorDivide, kModulo, kPower };
absl::StatusOr<Value> ApplyBinary(Runtime& runtime, BinaryOperator op, const Value& left, const Value& right);

// Unary minus (`negative`) or plus.
absl::StatusOr<Value> ApplySign(const Value& operand, bool negative);

enum class CompareOperator : uint8_t {
  kEqual,
  kNotEqual,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual,
  kIn,
  kNotIn
};
absl::StatusOr<bool> Compare(Runtime& runtime, CompareOperator op, const Value& left, const Value& right);

// sorted(): the order of `keys` by `<`, stable, as indices.
absl::StatusOr<std::vector<size_t>> SortedOrder(Runtime& runtime, const std::vector<Value>& keys,
                                                bool reverse);

// The value of a boolean or an integer.
std::optional<int64_t> AsInteger(const Value& value);
// The value of a boolean, an integer or a float.
std::optional<double> AsDouble(const Value& value);

// HTML escaping as in markupsafe; text that is markup already comes back unchanged. The result is markup.
absl::StatusOr<MarkedText> EscapeHtml(Runtime& runtime, const MarkedText& text);

}  // namespace dflash::jinja
