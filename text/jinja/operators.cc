#include "text/jinja/operators.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "text/jinja/access.h"

namespace dflash::jinja {

namespace {

const char* Symbol(BinaryOperator op) {
  switch (op) {
    case BinaryOperator::kAdd:
      return "+";
    case BinaryOperator::kSubtract:
      return "-";
    case BinaryOperator::kMultiply:
      return "*";
    case BinaryOperator::kDivide:
      return "/";
    case BinaryOperator::kFloorDivide:
      return "//";
    case BinaryOperator::kModulo:
      return "%";
    case BinaryOperator::kPower:
      return "**";
  }
  return "?";
}

absl::Status TooBig() { return absl::UnimplementedError("integers beyond 64 bits are not supported"); }

absl::StatusOr<int64_t> IntegerPower(int64_t base, int64_t exponent) {
  int64_t result = 1;
  while (true) {
    if ((exponent & 1) != 0 && __builtin_mul_overflow(result, base, &result)) return TooBig();
    exponent >>= 1;
    if (exponent == 0) return result;
    if (__builtin_mul_overflow(base, base, &base)) return TooBig();
  }
}

// Both operands are integers and the result is one too.
absl::StatusOr<int64_t> IntegerArithmetic(BinaryOperator op, int64_t left, int64_t right) {
  int64_t result = 0;
  bool overflow = false;
  switch (op) {
    case BinaryOperator::kAdd:
      overflow = __builtin_add_overflow(left, right, &result);
      break;
    case BinaryOperator::kSubtract:
      overflow = __builtin_sub_overflow(left, right, &result);
      break;
    case BinaryOperator::kMultiply:
      overflow = __builtin_mul_overflow(left, right, &result);
      break;
    case BinaryOperator::kPower:
      return IntegerPower(left, right);
    case BinaryOperator::kDivide:
    case BinaryOperator::kFloorDivide:
    case BinaryOperator::kModulo: {
      if (right == 0) return RenderError("integer division or modulo by zero");
      if (right == -1) {  // the one quotient that does not fit
        if (op == BinaryOperator::kModulo) return 0;
        overflow = __builtin_sub_overflow(int64_t{0}, left, &result);
        break;
      }
      int64_t quotient = left / right;
      int64_t remainder = left % right;
      if (remainder != 0 && (remainder < 0) != (right < 0)) {  // Python rounds towards minus infinity
        --quotient;
        remainder += right;
      }
      result = op == BinaryOperator::kModulo ? remainder : quotient;
      break;
    }
  }
  if (overflow) return TooBig();
  return result;
}

absl::StatusOr<double> FloatArithmetic(BinaryOperator op, double left, double right) {
  switch (op) {
    case BinaryOperator::kAdd:
      return left + right;
    case BinaryOperator::kSubtract:
      return left - right;
    case BinaryOperator::kMultiply:
      return left * right;
    case BinaryOperator::kDivide:
      if (right == 0) return RenderError("division by zero");
      return left / right;
    case BinaryOperator::kFloorDivide:
    case BinaryOperator::kModulo: {
      if (right == 0) return RenderError("float floor division or modulo by zero");
      double remainder = std::fmod(left, right);
      if (remainder != 0 && (remainder < 0) != (right < 0)) remainder += right;
      if (op == BinaryOperator::kModulo) return remainder == 0 ? std::copysign(0.0, right) : remainder;
      const double quotient = (left - remainder) / right;
      if (quotient == 0) return std::copysign(0.0, left / right);
      const double floor = std::floor(quotient);
      return quotient - floor > 0.5 ? floor + 1 : floor;
    }
    case BinaryOperator::kPower: {
      if (left == 0 && right < 0) return RenderError("0.0 cannot be raised to a negative power");
      const double result = std::pow(left, right);
      if (std::isnan(result) && !std::isnan(left) && !std::isnan(right)) {
        return absl::UnimplementedError("complex numbers are not supported");
      }
      if (std::isinf(result) && std::isfinite(left) && std::isfinite(right)) {
        return RenderError("numerical result out of range");
      }
      return result;
    }
  }
  return 0.0;
}

absl::StatusOr<Value> AddText(Runtime& runtime, const MarkedText& left, const MarkedText& right) {
  MarkedText first = left, second = right;
  const bool markup = left.markup() || right.markup();
  if (markup) {  // Markup.__add__ escapes the operand that is not markup
    DFLASH_ASSIGN_OR_RETURN(first, EscapeHtml(runtime, left));
    DFLASH_ASSIGN_OR_RETURN(second, EscapeHtml(runtime, right));
  }
  DFLASH_RETURN_IF_ERROR(runtime.ChargeAppend(first.size(), second.size()));
  DFLASH_RETURN_IF_ERROR(runtime.ChargeText(first.size()));
  MarkedTextBuilder builder;
  builder.Append(first);
  builder.Append(second);
  return Value(builder.Build().WithMarkup(markup));
}

absl::StatusOr<Value> Repeat(Runtime& runtime, const Value& value, int64_t count) {
  const auto times = static_cast<size_t>(std::max<int64_t>(count, 0));
  if (const MarkedText* text = value.AsText()) {
    size_t bytes = 0;
    if (__builtin_mul_overflow(text->size(), times, &bytes)) bytes = SIZE_MAX;
    DFLASH_RETURN_IF_ERROR(runtime.ChargeText(bytes));
    MarkedTextBuilder builder;
    if (!text->empty()) {
      for (size_t i = 0; i < times; ++i) builder.Append(*text);
    }
    return Value(builder.Build().WithMarkup(text->markup()));
  }
  const Sequence& sequence = *value.AsSequence();
  size_t total = 0;
  if (__builtin_mul_overflow(sequence.items.size(), times, &total)) total = SIZE_MAX;
  DFLASH_RETURN_IF_ERROR(runtime.Charge(total));
  std::vector<Value> items;
  if (!sequence.items.empty()) {
    items.reserve(total);
    for (size_t i = 0; i < times; ++i)
      items.insert(items.end(), sequence.items.begin(), sequence.items.end());
  }
  return runtime.NewSequence(sequence.kind, std::move(items));
}

bool IsListOrTuple(const Value& value) {
  const Sequence* sequence = value.AsSequence();
  return sequence != nullptr &&
         (sequence->kind == Sequence::Kind::kList || sequence->kind == Sequence::Kind::kTuple);
}

absl::StatusOr<bool> Equal(Runtime& runtime, const Value& a, const Value& b);

absl::StatusOr<bool> EqualItems(Runtime& runtime, const Sequence& a, const Sequence& b) {
  if (a.items.size() != b.items.size()) return false;
  for (size_t i = 0; i < a.items.size(); ++i) {
    DFLASH_ASSIGN_OR_RETURN(const bool same, Equal(runtime, a.items[i], b.items[i]));
    if (!same) return false;
  }
  return true;
}

absl::StatusOr<bool> EqualDicts(Runtime& runtime, const Dict& a, const Dict& b) {
  if (a.items.size() != b.items.size()) return false;
  for (const auto& [key, value] : a.items) {
    DFLASH_RETURN_IF_ERROR(runtime.Charge(1 + b.items.size() / 8));
    const Value* other = b.Find(key);
    if (other == nullptr) return false;
    DFLASH_ASSIGN_OR_RETURN(const bool same, Equal(runtime, value, *other));
    if (!same) return false;
  }
  return true;
}

absl::StatusOr<bool> Equal(Runtime& runtime, const Value& a, const Value& b) {
  DFLASH_RETURN_IF_ERROR(runtime.Charge(1));
  if (a.AsText() != nullptr && b.AsText() != nullptr && a.AsText()->size() == b.AsText()->size()) {
    DFLASH_RETURN_IF_ERROR(runtime.ChargeText(a.AsText()->size()));
  }
  if (IsKey(a) || IsKey(b)) return SameKey(a, b);
  if (a.IsUndefined() || b.IsUndefined()) return a.IsUndefined() && b.IsUndefined();
  if (a.AsDict() != nullptr && b.AsDict() != nullptr) return EqualDicts(runtime, *a.AsDict(), *b.AsDict());
  const Sequence* sequence_a = a.AsSequence();
  const Sequence* sequence_b = b.AsSequence();
  if (sequence_a != nullptr && sequence_b != nullptr) {
    if (sequence_a == sequence_b) return true;
    if (sequence_a->kind != sequence_b->kind) return false;
    switch (sequence_a->kind) {
      case Sequence::Kind::kList:
      case Sequence::Kind::kTuple:
      case Sequence::Kind::kRange:
        return EqualItems(runtime, *sequence_a, *sequence_b);
      case Sequence::Kind::kDictKeys:
      case Sequence::Kind::kDictItems:
        return absl::UnimplementedError("comparing views of dicts is not supported");
      case Sequence::Kind::kDictValues:
      case Sequence::Kind::kIterator:
        return false;
    }
  }
  if (a.data.index() != b.data.index()) return false;
  if (const auto* x = a.As<Namespace*>()) return *x == *b.As<Namespace*>();
  if (const auto* x = a.As<const MacroStatement*>()) return *x == *b.As<const MacroStatement*>();
  if (const auto* x = a.As<Builtin>()) return *x == *b.As<Builtin>();
  if (const auto* x = a.As<std::shared_ptr<Loop>>()) return *x == *b.As<std::shared_ptr<Loop>>();
  return absl::UnimplementedError("comparing methods is not supported");
}

template <typename T>
bool Ordered(CompareOperator op, const T& left, const T& right) {
  switch (op) {
    case CompareOperator::kLess:
      return left < right;
    case CompareOperator::kLessEqual:
      return left <= right;
    case CompareOperator::kGreater:
      return left > right;
    case CompareOperator::kGreaterEqual:
      return left >= right;
    case CompareOperator::kEqual:
    case CompareOperator::kNotEqual:
    case CompareOperator::kIn:
    case CompareOperator::kNotIn:
      break;
  }
  return false;
}

absl::StatusOr<bool> Order(Runtime& runtime, CompareOperator op, const Value& left, const Value& right) {
  DFLASH_RETURN_IF_ERROR(runtime.Charge(1));
  if (const auto* undefined = left.As<Undefined>()) return RenderError(*undefined->message);
  if (const auto* undefined = right.As<Undefined>()) return RenderError(*undefined->message);
  const std::optional<int64_t> int_left = AsInteger(left), int_right = AsInteger(right);
  if (int_left.has_value() && int_right.has_value()) return Ordered(op, *int_left, *int_right);
  if (AsDouble(left).has_value() && AsDouble(right).has_value()) {
    // Exact for an integer against a float: long double holds both.
    const auto wide = [](const std::optional<int64_t>& integer, const Value& value) {
      return integer.has_value() ? static_cast<long double>(*integer)
                                 : static_cast<long double>(*AsDouble(value));
    };
    return Ordered(op, wide(int_left, left), wide(int_right, right));
  }
  const MarkedText* text_left = left.AsText();
  const MarkedText* text_right = right.AsText();
  if (text_left != nullptr && text_right != nullptr) {
    DFLASH_RETURN_IF_ERROR(runtime.ChargeText(std::min(text_left->size(), text_right->size())));
    // Bytes of UTF-8 order as code points do.
    return Ordered(op, text_left->bytes(), text_right->bytes());
  }
  if (IsListOrTuple(left) && IsListOrTuple(right) && left.AsSequence()->kind == right.AsSequence()->kind) {
    const std::vector<Value>& items_left = left.AsSequence()->items;
    const std::vector<Value>& items_right = right.AsSequence()->items;
    for (size_t i = 0; i < std::min(items_left.size(), items_right.size()); ++i) {
      DFLASH_ASSIGN_OR_RETURN(const bool same, Equal(runtime, items_left[i], items_right[i]));
      if (!same) return Order(runtime, op, items_left[i], items_right[i]);
    }
    return Ordered(op, items_left.size(), items_right.size());
  }
  return RenderError("values of types ", TypeName(left), " and ", TypeName(right), " cannot be ordered");
}

absl::StatusOr<bool> Contains(Runtime& runtime, const Value& container, const Value& item) {
  if (const MarkedText* text = container.AsText()) {
    const MarkedText* needle = item.AsText();
    if (needle == nullptr) return RenderError("'in <string>' requires a string, not ", TypeName(item));
    DFLASH_RETURN_IF_ERROR(runtime.ChargeText(text->size()));
    return text->bytes().find(needle->bytes()) != std::string_view::npos;
  }
  if (const Dict* dict = container.AsDict()) {
    DFLASH_RETURN_IF_ERROR(runtime.Charge(dict->items.size() / 8));
    if (item.AsSequence() != nullptr || item.AsDict() != nullptr) {
      return RenderError("a value of type ", TypeName(item), " cannot be a key");
    }
    return dict->Find(item) != nullptr;
  }
  if (const Sequence* sequence = container.AsSequence();
      sequence != nullptr && sequence->kind == Sequence::Kind::kIterator) {
    while (sequence->position < sequence->items.size()) {  // consumed up to the match, as Python does
      DFLASH_ASSIGN_OR_RETURN(const bool same, Equal(runtime, sequence->items[sequence->position++], item));
      if (same) return true;
    }
    return false;
  }
  if (!IsIterable(container)) return RenderError("a value of type ", TypeName(container), " is not iterable");
  DFLASH_ASSIGN_OR_RETURN(const std::shared_ptr<const Sequence> items, Iterate(runtime, container));
  for (const Value& candidate : items->items) {
    DFLASH_ASSIGN_OR_RETURN(const bool same, Equal(runtime, candidate, item));
    if (same) return true;
  }
  return false;
}

}  // namespace

std::optional<int64_t> AsInteger(const Value& value) {
  if (const bool* b = value.As<bool>()) return *b ? 1 : 0;
  if (const int64_t* i = value.As<int64_t>()) return *i;
  return std::nullopt;
}

std::optional<double> AsDouble(const Value& value) {
  if (const double* d = value.As<double>()) return *d;
  if (const std::optional<int64_t> i = AsInteger(value)) return static_cast<double>(*i);
  return std::nullopt;
}

absl::StatusOr<Value> ApplyBinary(Runtime& runtime, BinaryOperator op, const Value& left,
                                  const Value& right) {
  if (const auto* undefined = left.As<Undefined>()) return RenderError(*undefined->message);
  if (const auto* undefined = right.As<Undefined>()) return RenderError(*undefined->message);
  const bool is_content = left.is_content || right.is_content;
  const std::optional<int64_t> int_left = AsInteger(left), int_right = AsInteger(right);
  if (int_left.has_value() && int_right.has_value()) {
    if (op == BinaryOperator::kDivide) {
      if (*int_right == 0) return RenderError("division by zero");
      return Value(
          static_cast<double>(static_cast<long double>(*int_left) / static_cast<long double>(*int_right)),
          is_content);
    }
    if (op != BinaryOperator::kPower || *int_right >= 0) {
      DFLASH_ASSIGN_OR_RETURN(const int64_t result, IntegerArithmetic(op, *int_left, *int_right));
      return Value(result, is_content);
    }
  }
  const std::optional<double> float_left = AsDouble(left), float_right = AsDouble(right);
  if (float_left.has_value() && float_right.has_value()) {
    DFLASH_ASSIGN_OR_RETURN(const double result, FloatArithmetic(op, *float_left, *float_right));
    return Value(result, is_content);
  }
  const MarkedText* text_left = left.AsText();
  const MarkedText* text_right = right.AsText();
  if (op == BinaryOperator::kAdd) {
    if (text_left != nullptr && text_right != nullptr) return AddText(runtime, *text_left, *text_right);
    if (IsListOrTuple(left) && IsListOrTuple(right) && left.AsSequence()->kind == right.AsSequence()->kind) {
      const std::vector<Value>& tail = right.AsSequence()->items;
      DFLASH_RETURN_IF_ERROR(runtime.Charge(left.AsSequence()->items.size() + tail.size()));
      std::vector<Value> items = left.AsSequence()->items;
      items.insert(items.end(), tail.begin(), tail.end());
      return runtime.NewSequence(left.AsSequence()->kind, std::move(items));
    }
  }
  if (op == BinaryOperator::kMultiply) {
    if ((text_left != nullptr || IsListOrTuple(left)) && int_right.has_value())
      return Repeat(runtime, left, *int_right);
    if ((text_right != nullptr || IsListOrTuple(right)) && int_left.has_value())
      return Repeat(runtime, right, *int_left);
  }
  if (op == BinaryOperator::kModulo && text_left != nullptr) {
    return absl::UnimplementedError("formatting a string with % is not supported");
  }
  return RenderError("unsupported operand types for ", Symbol(op), ": ", TypeName(left), " and ",
                     TypeName(right));
}

absl::StatusOr<Value> ApplySign(const Value& operand, bool negative) {
  if (const auto* undefined = operand.As<Undefined>()) return RenderError(*undefined->message);
  if (const std::optional<int64_t> i = AsInteger(operand)) {
    int64_t result = *i;
    if (negative && __builtin_sub_overflow(int64_t{0}, *i, &result)) return TooBig();
    return Value(result, operand.is_content);
  }
  if (const double* d = operand.As<double>()) return Value(negative ? -*d : *d, operand.is_content);
  return RenderError("bad operand type for unary ", negative ? "-" : "+", ": ", TypeName(operand));
}

absl::StatusOr<bool> Compare(Runtime& runtime, CompareOperator op, const Value& left, const Value& right) {
  switch (op) {
    case CompareOperator::kEqual:
      return Equal(runtime, left, right);
    case CompareOperator::kNotEqual: {
      DFLASH_ASSIGN_OR_RETURN(const bool same, Equal(runtime, left, right));
      return !same;
    }
    case CompareOperator::kIn:
      return Contains(runtime, right, left);
    case CompareOperator::kNotIn: {
      DFLASH_ASSIGN_OR_RETURN(const bool contained, Contains(runtime, right, left));
      return !contained;
    }
    case CompareOperator::kLess:
    case CompareOperator::kLessEqual:
    case CompareOperator::kGreater:
    case CompareOperator::kGreaterEqual:
      break;
  }
  return Order(runtime, op, left, right);
}

absl::StatusOr<std::vector<size_t>> SortedOrder(Runtime& runtime, const std::vector<Value>& keys,
                                                bool reverse) {
  // A merge sort of our own: a comparison can fail, and a NaN must not break the sort's invariants.
  std::vector<size_t> order(keys.size()), merged(keys.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (size_t width = 1; width < order.size(); width *= 2) {
    for (size_t begin = 0; begin < order.size(); begin += 2 * width) {
      const size_t middle = std::min(begin + width, order.size());
      const size_t end = std::min(begin + 2 * width, order.size());
      size_t a = begin, b = middle;
      for (size_t out = begin; out < end; ++out) {
        bool take_second = a == middle;
        if (a < middle && b < end) {  // equal keys keep their order, in reverse too
          const Value& first = reverse ? keys[order[a]] : keys[order[b]];
          const Value& second = reverse ? keys[order[b]] : keys[order[a]];
          DFLASH_ASSIGN_OR_RETURN(take_second, Order(runtime, CompareOperator::kLess, first, second));
        }
        merged[out] = take_second ? order[b++] : order[a++];
      }
    }
    order.swap(merged);
  }
  return order;
}

absl::StatusOr<MarkedText> EscapeHtml(Runtime& runtime, const MarkedText& text) {
  if (text.markup()) return text;
  const auto escape = [](char32_t c, std::string* out) {
    switch (c) {
      case '&':
        out->append("&amp;");
        break;
      case '<':
        out->append("&lt;");
        break;
      case '>':
        out->append("&gt;");
        break;
      case '\'':
        out->append("&#39;");
        break;
      case '"':
        out->append("&#34;");
        break;
      default:
        AppendUtf8(c, out);
    }
  };
  DFLASH_ASSIGN_OR_RETURN(const MarkedText escaped, runtime.MapText(text, escape));
  DFLASH_RETURN_IF_ERROR(runtime.ChargeText(escaped.size()));
  return escaped.WithMarkup(true);
}

}  // namespace dflash::jinja
