#include "text/jinja/value_tests.h"

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "text/jinja/access.h"
#include "text/jinja/operators.h"

namespace dflash::jinja {

namespace {

using Result = absl::StatusOr<bool>;

// A test without arguments.
template <bool (*kTest)(const Value&)>
Result Plain(Runtime&, const Value& value, const Arguments& arguments) {
  if (!arguments.positional.empty() || !arguments.keyword.empty())
    return RenderError("this test takes no argument");
  return kTest(value);
}

bool IsNumber(const Value& value) { return AsDouble(value).has_value(); }
bool IsInteger(const Value& value) { return value.As<int64_t>() != nullptr; }
bool IsFloat(const Value& value) { return value.As<double>() != nullptr; }
bool IsBoolean(const Value& value) { return value.As<bool>() != nullptr; }
bool IsTheTrue(const Value& value) { return value.As<bool>() != nullptr && *value.As<bool>(); }
bool IsTheFalse(const Value& value) { return value.As<bool>() != nullptr && !*value.As<bool>(); }
bool IsDefined(const Value& value) { return !value.IsUndefined(); }
bool IsNotDefined(const Value& value) { return value.IsUndefined(); }
bool IsNone(const Value& value) { return value.IsNone(); }
bool IsString(const Value& value) { return value.AsText() != nullptr; }
bool IsMapping(const Value& value) { return value.AsDict() != nullptr; }
bool IsWalkable(const Value& value) {
  return IsIterable(value) || value.As<std::shared_ptr<Loop>>() != nullptr;
}
bool IsCallable(const Value& value) {
  // An undefined value and a loop have a __call__ too.
  return value.IsUndefined() || value.As<const MacroStatement*>() != nullptr ||
         value.As<Builtin>() != nullptr || value.As<std::shared_ptr<const Method>>() != nullptr ||
         value.As<std::shared_ptr<Loop>>() != nullptr;
}
// What has a length and subscripts: strings and dicts too, views of dicts not.
bool IsSequence(const Value& value) {
  if (const Sequence* sequence = value.AsSequence()) {
    return sequence->kind == Sequence::Kind::kList || sequence->kind == Sequence::Kind::kTuple ||
           sequence->kind == Sequence::Kind::kRange;
  }
  return value.IsUndefined() || value.AsText() != nullptr || value.AsDict() != nullptr;
}
bool IsEscaped(const Value& value) { return value.AsText() != nullptr && value.AsText()->markup(); }

template <CompareOperator kOperator>
Result Compared(Runtime& runtime, const Value& value, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const std::vector<std::optional<Value>> bound,
                          Bind("comparison test", {"other"}, 1, arguments));
  return Compare(runtime, kOperator, value, *bound[0]);
}

Result Remainder(Runtime& runtime, const Value& value, const Value& divisor, int64_t expected) {
  DFLASH_ASSIGN_OR_RETURN(const Value remainder,
                          ApplyBinary(runtime, BinaryOperator::kModulo, value, divisor));
  return Compare(runtime, CompareOperator::kEqual, remainder, Value(expected));
}

template <int64_t kExpected>
Result Parity(Runtime& runtime, const Value& value, const Arguments& arguments) {
  DFLASH_RETURN_IF_ERROR(Bind("parity test", {}, 0, arguments).status());
  return Remainder(runtime, value, Value(int64_t{2}), kExpected);
}

Result DivisibleBy(Runtime& runtime, const Value& value, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const std::vector<std::optional<Value>> bound,
                          Bind("divisibleby", {"num"}, 1, arguments));
  return Remainder(runtime, value, *bound[0], 0);
}

Result SameAs(Runtime&, const Value& value, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const std::vector<std::optional<Value>> bound,
                          Bind("sameas", {"other"}, 1, arguments));
  const Value& other = *bound[0];
  if (value.data.index() != other.data.index()) return false;
  if (value.IsNone()) return true;
  if (const bool* b = value.As<bool>()) return *b == *other.As<bool>();
  if (const auto* n = value.As<Namespace*>()) return *n == *other.As<Namespace*>();
  return absl::UnimplementedError(
      absl::StrCat("the test 'sameas' on a ", TypeName(value), " is not supported"));
}

constexpr ValueTest kTests[] = {
    {"!=", Compared<CompareOperator::kNotEqual>},
    {"<", Compared<CompareOperator::kLess>},
    {"<=", Compared<CompareOperator::kLessEqual>},
    {"==", Compared<CompareOperator::kEqual>},
    {">", Compared<CompareOperator::kGreater>},
    {">=", Compared<CompareOperator::kGreaterEqual>},
    {"boolean", Plain<IsBoolean>},
    {"callable", Plain<IsCallable>},
    {"defined", Plain<IsDefined>},
    {"divisibleby", DivisibleBy},
    {"eq", Compared<CompareOperator::kEqual>},
    {"equalto", Compared<CompareOperator::kEqual>},
    {"escaped", Plain<IsEscaped>},
    {"even", Parity<0>},
    {"false", Plain<IsTheFalse>},
    {"float", Plain<IsFloat>},
    {"ge", Compared<CompareOperator::kGreaterEqual>},
    {"greaterthan", Compared<CompareOperator::kGreater>},
    {"gt", Compared<CompareOperator::kGreater>},
    {"in", Compared<CompareOperator::kIn>},
    {"integer", Plain<IsInteger>},
    {"iterable", Plain<IsWalkable>},
    {"le", Compared<CompareOperator::kLessEqual>},
    {"lessthan", Compared<CompareOperator::kLess>},
    {"lt", Compared<CompareOperator::kLess>},
    {"mapping", Plain<IsMapping>},
    {"ne", Compared<CompareOperator::kNotEqual>},
    {"none", Plain<IsNone>},
    {"number", Plain<IsNumber>},
    {"odd", Parity<1>},
    {"sameas", SameAs},
    {"sequence", Plain<IsSequence>},
    {"string", Plain<IsString>},
    {"true", Plain<IsTheTrue>},
    {"undefined", Plain<IsNotDefined>},
};

constexpr std::array<std::string_view, 4> kUnsupported = {"filter", "lower", "test", "upper"};

}  // namespace

absl::StatusOr<const ValueTest*> FindValueTest(std::string_view name) {
  for (const ValueTest& test : kTests) {
    if (test.name == name) return &test;
  }
  if (std::find(kUnsupported.begin(), kUnsupported.end(), name) != kUnsupported.end()) {
    return absl::UnimplementedError(absl::StrCat("the test '", View(name), "' is not supported"));
  }
  return RenderError("there is no test '", View(name), "'");
}

}  // namespace dflash::jinja
