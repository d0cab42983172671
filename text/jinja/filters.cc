// The registry, and the filters on single values: text, numbers, JSON.
#include "text/jinja/filters.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "text/jinja/access.h"
#include "text/jinja/format.h"
#include "text/jinja/methods.h"
#include "text/jinja/operators.h"

namespace dflash::jinja {

namespace {

using Result = absl::StatusOr<Value>;
using Bound = std::vector<std::optional<Value>>;

absl::Status NoArguments(std::string_view filter, const Arguments& arguments) {
  return Bind(filter, {}, 0, arguments).status();
}

// soft_str(): text keeps its markup flag.
absl::StatusOr<MarkedText> SoftText(Runtime& runtime, const Value& input) {
  if (const MarkedText* text = input.AsText()) return *text;
  return ToText(runtime, input);
}

template <absl::StatusOr<MarkedText> (*kTransform)(Runtime&, const MarkedText&)>
Result OnText(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_RETURN_IF_ERROR(NoArguments("filter", arguments));
  DFLASH_ASSIGN_OR_RETURN(const MarkedText text, SoftText(runtime, input));
  DFLASH_ASSIGN_OR_RETURN(MarkedText result, kTransform(runtime, text));
  return Value(std::move(result));
}

absl::StatusOr<MarkedText> Upper(Runtime& runtime, const MarkedText& text) {
  return ToCase(runtime, text, [](char32_t) { return LetterCase::kUpper; });
}
absl::StatusOr<MarkedText> Lower(Runtime& runtime, const MarkedText& text) {
  return ToCase(runtime, text, [](char32_t) { return LetterCase::kLower; });
}
absl::StatusOr<MarkedText> Unchanged(Runtime&, const MarkedText& text) { return text; }
absl::StatusOr<MarkedText> Safe(Runtime&, const MarkedText& text) { return text.WithMarkup(true); }

// Words begin after space, '-' and opening brackets.
absl::StatusOr<MarkedText> Title(Runtime& runtime, const MarkedText& text) {
  bool inside_word = false;
  const auto result = ToCase(runtime, text, [&](char32_t c) {
    const bool begins_word = IsSpace(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
    return std::exchange(inside_word, !begins_word) ? LetterCase::kLower : LetterCase::kUpper;
  });
  if (!result.ok()) return result.status();
  return result->WithMarkup(false);
}

Result Trim(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind("trim", {"chars"}, 0, arguments));
  DFLASH_ASSIGN_OR_RETURN(const MarkedText text, SoftText(runtime, input));
  const MarkedText* chars = nullptr;
  if (bound[0].has_value() && !bound[0]->IsNone()) {
    chars = bound[0]->AsText();
    if (chars == nullptr) return RenderError("trim() needs a string, got ", TypeName(*bound[0]));
  }
  DFLASH_ASSIGN_OR_RETURN(MarkedText trimmed, Strip(runtime, text, chars, true, true));
  return Value(std::move(trimmed));
}

Result ReplaceFilter(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind("replace", {"old", "new", "count"}, 2, arguments));
  DFLASH_ASSIGN_OR_RETURN(const MarkedText text, ToText(runtime, input));
  DFLASH_ASSIGN_OR_RETURN(const MarkedText old, ToText(runtime, *bound[0]));
  DFLASH_ASSIGN_OR_RETURN(const MarkedText replacement, ToText(runtime, *bound[1]));
  int64_t count = -1;
  if (bound[2].has_value() && !bound[2]->IsNone()) {
    if (!AsInteger(*bound[2]).has_value()) return RenderError("replace() needs an integer count");
    count = *AsInteger(*bound[2]);
  }
  DFLASH_ASSIGN_OR_RETURN(MarkedText replaced, Replace(runtime, text, old, replacement, count));
  return Value(std::move(replaced));
}

Result Escape(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_RETURN_IF_ERROR(NoArguments("escape", arguments));
  DFLASH_ASSIGN_OR_RETURN(const MarkedText text, SoftText(runtime, input));
  DFLASH_ASSIGN_OR_RETURN(MarkedText escaped, EscapeHtml(runtime, text));
  return Value(std::move(escaped));
}

Result Indent(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind("indent", {"width", "first", "blank"}, 0, arguments));
  const MarkedText* text = input.AsText();
  if (text == nullptr) return RenderError("indent() needs a string, got ", TypeName(input));
  const Value width = bound[0].value_or(Value(int64_t{4}));
  MarkedText indentation;
  if (width.AsText() != nullptr) {
    indentation = width.AsText()->WithMarkup(false);
  } else if (const std::optional<int64_t> spaces = AsInteger(width)) {
    DFLASH_RETURN_IF_ERROR(runtime.ChargeText(static_cast<size_t>(std::max<int64_t>(*spaces, 0))));
    indentation =
        MarkedText::FromTemplate(std::string(static_cast<size_t>(std::max<int64_t>(*spaces, 0)), ' '));
  } else {
    return RenderError("indent() needs a width or a string, got ", TypeName(width));
  }
  const bool indents_first = bound[1].has_value() && IsTrue(*bound[1]);
  const bool indents_blank = bound[2].has_value() && IsTrue(*bound[2]);
  // As Jinja does it: a newline more, then split, so that a last empty line survives.
  MarkedTextBuilder with_newline;
  with_newline.Append(*text);
  with_newline.Append("\n", /*is_content=*/false);
  DFLASH_ASSIGN_OR_RETURN(const std::vector<MarkedText> lines, SplitLines(runtime, with_newline.Build()));
  MarkedTextBuilder builder;
  for (size_t i = 0; i < lines.size(); ++i) {
    DFLASH_RETURN_IF_ERROR(runtime.ChargeAppend(builder.size(), indentation.size() + lines[i].size() + 1));
    if (i > 0) builder.Append("\n", /*is_content=*/false);
    if (i == 0 ? indents_first : indents_blank || !lines[i].empty()) builder.Append(indentation);
    builder.Append(lines[i]);
  }
  return Value(builder.Build().WithMarkup(text->markup()));
}

Result ToJsonFilter(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(
      const Bound bound, Bind("tojson", {"ensure_ascii", "indent", "separators", "sort_keys"}, 0, arguments));
  JsonStyle style;
  style.ensure_ascii = bound[0].has_value() && IsTrue(*bound[0]);
  style.sort_keys = bound[3].has_value() && IsTrue(*bound[3]);
  if (bound[1].has_value() && !bound[1]->IsNone()) {
    if (const MarkedText* text = bound[1]->AsText()) {
      style.indent = std::string(text->bytes());
    } else if (const std::optional<int64_t> spaces = AsInteger(*bound[1])) {
      DFLASH_RETURN_IF_ERROR(runtime.ChargeText(static_cast<size_t>(std::max<int64_t>(*spaces, 0))));
      style.indent = std::string(static_cast<size_t>(std::max<int64_t>(*spaces, 0)), ' ');
    } else {
      return RenderError("tojson() needs an integer or a string as indent, got ", TypeName(*bound[1]));
    }
  }
  if (bound[2].has_value() && !bound[2]->IsNone()) {
    const Sequence* pair = bound[2]->AsSequence();
    if (pair == nullptr || pair->items.size() != 2 || pair->items[0].AsText() == nullptr ||
        pair->items[1].AsText() == nullptr) {
      return RenderError("tojson() needs a pair of strings as separators");
    }
    style.item_separator = std::string(pair->items[0].AsText()->bytes());
    style.key_separator = std::string(pair->items[1].AsText()->bytes());
  }
  DFLASH_ASSIGN_OR_RETURN(MarkedText json, ToJson(runtime, input, style));
  return Value(std::move(json));
}

Result Default(Runtime&, const Value& input, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind("default", {"default_value", "boolean"}, 0, arguments));
  const bool replaces_false = bound[1].has_value() && IsTrue(*bound[1]);
  if (input.IsUndefined() || (replaces_false && !IsTrue(input)))
    return bound[0].value_or(Value(MarkedText()));
  return input;
}

// The digits of a Python number: white space around, single underscores between digits removed. Empty if
// malformed.
std::string NumberText(const MarkedText& text, bool is_digit(char)) {
  std::string_view bytes = text.bytes();
  while (!bytes.empty() && IsSpace(static_cast<unsigned char>(bytes.front()))) bytes.remove_prefix(1);
  while (!bytes.empty() && IsSpace(static_cast<unsigned char>(bytes.back()))) bytes.remove_suffix(1);
  std::string out;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] != '_') {
      out.push_back(bytes[i]);
    } else if (i == 0 || i + 1 == bytes.size() || !is_digit(bytes[i - 1]) || !is_digit(bytes[i + 1])) {
      return {};
    }
  }
  return out;
}

std::optional<double> ParseFloat(const MarkedText& text) {
  const std::string number = NumberText(text, [](char c) { return c >= '0' && c <= '9'; });
  std::string lower = number.substr(number.starts_with('+') || number.starts_with('-') ? 1 : 0);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const bool named = lower == "inf" || lower == "infinity" || lower == "nan";
  if (lower.empty() || (!named && lower.find_first_not_of("0123456789.e+-") != std::string::npos))
    return std::nullopt;
  char* end = nullptr;
  const double value = std::strtod(number.c_str(), &end);
  return end == number.c_str() + number.size() ? std::optional<double>(value) : std::nullopt;
}

// int(text, base): nothing when Python raises ValueError.
absl::StatusOr<std::optional<int64_t>> ParseInteger(const MarkedText& text, int64_t base) {
  std::string number =
      NumberText(text, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; });
  const bool negative = number.starts_with('-');
  if (negative || number.starts_with('+')) number.erase(0, 1);
  const char prefix = number.size() > 1 && number[0] == '0' ? static_cast<char>(number[1] | 0x20) : ' ';
  const int64_t prefixed = prefix == 'x' ? 16 : prefix == 'o' ? 8 : prefix == 'b' ? 2 : 0;
  if (prefixed != 0 && (base == prefixed || base == 0)) {
    number.erase(0, 2);
    base = prefixed;
  } else if (base == 0) {
    if (number.size() > 1 && number[0] == '0' && number.find_first_not_of('0') != std::string::npos)
      return std::nullopt;
    base = 10;
  }
  if (number.empty() || !std::isalnum(static_cast<unsigned char>(number[0]))) return std::nullopt;
  uint64_t magnitude = 0;
  const auto [end, error] =
      std::from_chars(number.data(), number.data() + number.size(), magnitude, static_cast<int>(base));
  if (end != number.data() + number.size()) return std::nullopt;
  const uint64_t limit = static_cast<uint64_t>(INT64_MAX) + (negative ? 1 : 0);
  if (error != std::errc() || magnitude > limit) {
    return absl::UnimplementedError("integers beyond 64 bits are not supported");
  }
  return negative ? static_cast<int64_t>(~magnitude + 1) : static_cast<int64_t>(magnitude);
}

absl::StatusOr<int64_t> Truncate(double value) {
  if (std::isinf(value)) return RenderError("cannot convert float infinity to integer");
  if (!(value >= -0x1p63 && value < 0x1p63))
    return absl::UnimplementedError("integers beyond 64 bits are not supported");
  return static_cast<int64_t>(value);
}

Result Int(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind("int", {"default", "base"}, 0, arguments));
  const bool is_content =
      input.is_content || (input.AsText() != nullptr && !input.AsText()->content().empty());
  std::optional<double> number = AsDouble(input);
  if (const std::optional<int64_t> integer = AsInteger(input)) return Value(*integer, is_content);
  if (const auto* undefined = input.As<Undefined>()) return RenderError(*undefined->message);
  if (const MarkedText* text = input.AsText()) {
    const std::optional<int64_t> base = bound[1].has_value() ? AsInteger(*bound[1]) : 10;
    if (!base.has_value() || *base < 0 || *base == 1 || *base > 36)
      return RenderError("int() base must be 0 or 2 to 36");
    DFLASH_RETURN_IF_ERROR(runtime.Charge(text->size() / 4));
    DFLASH_ASSIGN_OR_RETURN(const std::optional<int64_t> integer, ParseInteger(*text, *base));
    if (integer.has_value()) return Value(*integer, is_content);
    number = ParseFloat(*text);
  }
  if (!number.has_value() || std::isnan(*number)) return bound[0].value_or(Value(int64_t{0}));
  DFLASH_ASSIGN_OR_RETURN(const int64_t truncated, Truncate(*number));
  return Value(truncated, is_content);
}

Result Float(Runtime& runtime, const Value& input, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind("float", {"default"}, 0, arguments));
  if (const std::optional<double> number = AsDouble(input)) return Value(*number, input.is_content);
  if (const auto* undefined = input.As<Undefined>()) return RenderError(*undefined->message);
  if (const MarkedText* text = input.AsText()) {
    DFLASH_RETURN_IF_ERROR(runtime.Charge(text->size() / 4));
    if (const std::optional<double> number = ParseFloat(*text))
      return Value(*number, !text->content().empty());
  }
  return bound[0].value_or(Value(0.0));
}

Result Abs(Runtime&, const Value& input, const Arguments& arguments) {
  DFLASH_RETURN_IF_ERROR(NoArguments("abs", arguments));
  if (const std::optional<int64_t> integer = AsInteger(input)) return ApplySign(input, *integer < 0);
  if (const double* number = input.As<double>()) return Value(std::fabs(*number), input.is_content);
  if (const auto* undefined = input.As<Undefined>()) return RenderError(*undefined->message);
  return RenderError("abs() needs a number, got ", TypeName(input));
}

Result Round(Runtime&, const Value& input, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind("round", {"precision", "method"}, 0, arguments));
  const std::optional<int64_t> precision = bound[0].has_value() ? AsInteger(*bound[0]) : 0;
  std::string_view method = "common";
  if (bound[1].has_value() && bound[1]->AsText() != nullptr) method = bound[1]->AsText()->bytes();
  if (method != "common" && method != "ceil" && method != "floor") {
    return RenderError("round() method must be common, ceil or floor");
  }
  if (const auto* undefined = input.As<Undefined>()) return RenderError(*undefined->message);
  const std::optional<double> number = AsDouble(input);
  if (!number.has_value() || !precision.has_value()) return RenderError("round() needs numbers");
  if (*precision < 0 || *precision > 15)
    return absl::UnimplementedError("round() supports a precision of 0 to 15");
  if (method == "common") {
    if (const std::optional<int64_t> integer = AsInteger(input)) return Value(*integer, input.is_content);
    if (!std::isfinite(*number)) return Value(*number, input.is_content);
    char buffer[400];  // rounds the exact binary value half to even, as Python does
    std::snprintf(buffer, sizeof buffer, "%.*f", static_cast<int>(*precision), *number);
    return Value(std::strtod(buffer, nullptr), input.is_content);
  }
  const double scale = std::pow(10.0, static_cast<double>(*precision));
  const double scaled = *number * scale;
  return Value((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale, input.is_content);
}

constexpr Filter kValueFilters[] = {
    {"abs", Abs},
    {"capitalize", OnText<Capitalize>},
    {"d", Default},
    {"default", Default},
    {"e", Escape},
    {"escape", Escape},
    {"float", Float},
    {"indent", Indent},
    {"int", Int},
    {"lower", OnText<Lower>},
    {"replace", ReplaceFilter},
    {"round", Round},
    {"safe", OnText<Safe>},
    {"string", OnText<Unchanged>},
    {"title", OnText<Title>},
    {"tojson", ToJsonFilter},
    {"trim", Trim},
    {"upper", OnText<Upper>},
};

constexpr std::array<std::string_view, 17> kUnsupported = {
    "attr",      "batch",  "center",    "filesizeformat", "forceescape", "format",
    "groupby",   "pprint", "random",    "slice",          "striptags",   "truncate",
    "urlencode", "urlize", "wordcount", "wordwrap",       "xmlattr"};

}  // namespace

absl::StatusOr<const Filter*> FindFilter(std::string_view name) {
  for (const Filter& filter : kValueFilters) {
    if (filter.name == name) return &filter;
  }
  for (const Filter& filter : SequenceFilters()) {
    if (filter.name == name) return &filter;
  }
  if (std::find(kUnsupported.begin(), kUnsupported.end(), name) != kUnsupported.end()) {
    return absl::UnimplementedError(absl::StrCat("the filter '", View(name), "' is not supported"));
  }
  return RenderError("there is no filter '", View(name), "'");
}

}  // namespace dflash::jinja
