#include "text/jinja/format.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>
#include <vector>

#include "text/jinja/operators.h"
#include "text/jinja/unicode.h"

namespace dflash::jinja {

namespace {

constexpr char kHex[] = "0123456789abcdef";

void AppendHex(uint32_t value, int digits, std::string* out) {
  for (int shift = 4 * (digits - 1); shift >= 0; shift -= 4) out->push_back(kHex[(value >> shift) & 0xf]);
}

// Walks a value into a builder. The depth of recursion is bounded by the depth of values, the work by the
// steps.
class Writer {
 public:
  explicit Writer(Runtime& runtime) : runtime_(runtime) {}

  MarkedText Build() { return builder_.Build(); }

  absl::Status Repr(const Value& value, bool inside_content) {
    DFLASH_RETURN_IF_ERROR(runtime_.Charge(1));
    const bool is_content = inside_content || value.is_content;
    if (const MarkedText* text = value.AsText()) return ReprText(*text, inside_content);
    if (const Sequence* sequence = value.AsSequence())
      return ReprSequence(*sequence, is_content || sequence->is_content);
    if (const Dict* dict = value.AsDict()) return ReprDict(*dict, is_content || dict->is_content);
    if (value.IsUndefined()) return Put("Undefined", is_content);
    if (value.IsNone()) return Put("None", is_content);
    if (const bool* b = value.As<bool>()) return Put(*b ? "True" : "False", is_content);
    if (const int64_t* i = value.As<int64_t>()) return Put(std::to_string(*i), is_content);
    if (const double* d = value.As<double>()) return Put(FloatRepr(*d), is_content);
    return absl::UnimplementedError(
        absl::StrCat("printing a value of type ", TypeName(value), " is not supported"));
  }

  absl::Status Json(const Value& value, const JsonStyle& style, int level, bool inside_content) {
    DFLASH_RETURN_IF_ERROR(runtime_.Charge(1));
    const bool is_content = inside_content || value.is_content;
    if (const MarkedText* text = value.AsText()) return JsonText(*text, style, inside_content);
    if (const Dict* dict = value.AsDict())
      return JsonDict(*dict, style, level, is_content || dict->is_content);
    if (const Sequence* sequence = value.AsSequence();
        sequence != nullptr &&
        (sequence->kind == Sequence::Kind::kList || sequence->kind == Sequence::Kind::kTuple)) {
      return JsonList(*sequence, style, level, is_content || sequence->is_content);
    }
    if (const auto scalar = JsonScalar(value)) return Put(*scalar, is_content);
    return RenderError("Object of type ", TypeName(value), " is not JSON serializable");
  }

 private:
  absl::Status Put(std::string_view bytes, bool is_content) {
    DFLASH_RETURN_IF_ERROR(ChargeFor(bytes.size()));
    builder_.Append(bytes, is_content);
    return absl::OkStatus();
  }

  absl::Status ChargeFor(size_t bytes) { return runtime_.ChargeAppend(builder_.size(), bytes); }

  template <typename Escape>
  absl::Status PutEscaped(const MarkedText& text, bool inside_content, const Escape& escape) {
    DFLASH_ASSIGN_OR_RETURN(const MarkedText escaped, runtime_.MapText(text, escape));
    if (inside_content) return Put(escaped.bytes(), true);
    DFLASH_RETURN_IF_ERROR(ChargeFor(escaped.size()));
    builder_.Append(escaped);
    return absl::OkStatus();
  }

  absl::Status ReprText(const MarkedText& text, bool inside_content) {
    const std::string_view bytes = text.bytes();
    const bool double_quoted =
        bytes.find('\'') != std::string_view::npos && bytes.find('"') == std::string_view::npos;
    const char quote = double_quoted ? '"' : '\'';
    const std::string_view quotes(&quote, 1);
    const auto escape = [quote](char32_t c, std::string* out) {
      if (c == static_cast<char32_t>(quote) || c == '\\') {
        out->push_back('\\');
        out->push_back(static_cast<char>(c));
      } else if (c == '\n' || c == '\r' || c == '\t') {
        out->append(c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t");
      } else if (IsPrintable(c)) {
        AppendUtf8(c, out);
      } else {
        const int digits = c < 0x100 ? 2 : c < 0x10000 ? 4 : 8;
        out->append(digits == 2 ? "\\x" : digits == 4 ? "\\u" : "\\U");
        AppendHex(c, digits, out);
      }
    };
    if (text.markup()) DFLASH_RETURN_IF_ERROR(Put("Markup(", inside_content));
    DFLASH_RETURN_IF_ERROR(Put(quotes, inside_content));
    DFLASH_RETURN_IF_ERROR(PutEscaped(text, inside_content, escape));
    DFLASH_RETURN_IF_ERROR(Put(quotes, inside_content));
    return text.markup() ? Put(")", inside_content) : absl::OkStatus();
  }

  absl::Status ReprSequence(const Sequence& sequence, bool is_content) {
    std::string_view open = "[", close = "]";
    switch (sequence.kind) {
      case Sequence::Kind::kList:
        break;
      case Sequence::Kind::kTuple:
        open = "(";
        close = sequence.items.size() == 1 ? ",)" : ")";
        break;
      case Sequence::Kind::kRange:
        return Put(sequence.range_repr, is_content);
      case Sequence::Kind::kDictKeys:
        open = "dict_keys([";
        break;
      case Sequence::Kind::kDictValues:
        open = "dict_values([";
        break;
      case Sequence::Kind::kDictItems:
        open = "dict_items([";
        break;
      case Sequence::Kind::kIterator:
        return absl::UnimplementedError("printing a generator is not supported (write it as a list first)");
    }
    if (open.size() > 1) close = "])";
    DFLASH_RETURN_IF_ERROR(Put(open, is_content));
    for (size_t i = 0; i < sequence.items.size(); ++i) {
      if (i > 0) DFLASH_RETURN_IF_ERROR(Put(", ", is_content));
      DFLASH_RETURN_IF_ERROR(Repr(sequence.items[i], is_content));
    }
    return Put(close, is_content);
  }

  absl::Status ReprDict(const Dict& dict, bool is_content) {
    DFLASH_RETURN_IF_ERROR(Put("{", is_content));
    for (size_t i = 0; i < dict.items.size(); ++i) {
      if (i > 0) DFLASH_RETURN_IF_ERROR(Put(", ", is_content));
      DFLASH_RETURN_IF_ERROR(Repr(dict.items[i].first, is_content));
      DFLASH_RETURN_IF_ERROR(Put(": ", is_content));
      DFLASH_RETURN_IF_ERROR(Repr(dict.items[i].second, is_content));
    }
    return Put("}", is_content);
  }

  static std::optional<std::string> JsonScalar(const Value& value) {
    if (value.IsNone()) return "null";
    if (const bool* b = value.As<bool>()) return *b ? "true" : "false";
    if (const int64_t* i = value.As<int64_t>()) return std::to_string(*i);
    if (const double* d = value.As<double>()) {
      if (std::isnan(*d)) return "NaN";
      if (std::isinf(*d)) return *d > 0 ? "Infinity" : "-Infinity";
      return FloatRepr(*d);
    }
    return std::nullopt;
  }

  absl::Status JsonText(const MarkedText& text, const JsonStyle& style, bool inside_content) {
    const auto escape = [&style](char32_t c, std::string* out) {
      const auto unit = [out](uint32_t value) {
        out->append("\\u");
        AppendHex(value, 4, out);
      };
      switch (c) {
        case '"':
          out->append("\\\"");
          return;
        case '\\':
          out->append("\\\\");
          return;
        case '\n':
          out->append("\\n");
          return;
        case '\r':
          out->append("\\r");
          return;
        case '\t':
          out->append("\\t");
          return;
        case '\b':
          out->append("\\b");
          return;
        case '\f':
          out->append("\\f");
          return;
        default:
          break;
      }
      if (c < 0x20 || (style.ensure_ascii && c > 0x7e && c < 0x10000)) {
        unit(c);
      } else if (style.ensure_ascii && c >= 0x10000) {
        unit(0xd800 + ((c - 0x10000) >> 10));
        unit(0xdc00 + ((c - 0x10000) & 0x3ff));
      } else {
        AppendUtf8(c, out);
      }
    };
    DFLASH_RETURN_IF_ERROR(Put("\"", inside_content));
    DFLASH_RETURN_IF_ERROR(PutEscaped(text, inside_content, escape));
    return Put("\"", inside_content);
  }

  absl::Status NewLine(const JsonStyle& style, int level, bool is_content) {
    if (!style.indent.has_value()) return absl::OkStatus();
    DFLASH_RETURN_IF_ERROR(Put("\n", is_content));
    for (int i = 0; i < level; ++i) DFLASH_RETURN_IF_ERROR(Put(*style.indent, is_content));
    return absl::OkStatus();
  }

  absl::Status JsonList(const Sequence& list, const JsonStyle& style, int level, bool is_content) {
    if (list.items.empty()) return Put("[]", is_content);
    DFLASH_RETURN_IF_ERROR(Put("[", is_content));
    for (size_t i = 0; i < list.items.size(); ++i) {
      if (i > 0) DFLASH_RETURN_IF_ERROR(Put(*style.item_separator, is_content));
      DFLASH_RETURN_IF_ERROR(NewLine(style, level + 1, is_content));
      DFLASH_RETURN_IF_ERROR(Json(list.items[i], style, level + 1, is_content));
    }
    DFLASH_RETURN_IF_ERROR(NewLine(style, level, is_content));
    return Put("]", is_content);
  }

  absl::Status JsonDict(const Dict& dict, const JsonStyle& style, int level, bool is_content) {
    if (dict.items.empty()) return Put("{}", is_content);
    std::vector<size_t> order(dict.items.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    if (style.sort_keys) {
      std::vector<Value> keys;
      for (const auto& item : dict.items) keys.push_back(item.first);
      DFLASH_ASSIGN_OR_RETURN(order, SortedOrder(runtime_, keys, /*reverse=*/false));
    }
    DFLASH_RETURN_IF_ERROR(Put("{", is_content));
    for (size_t i = 0; i < order.size(); ++i) {
      const auto& [key, value] = dict.items[order[i]];
      if (i > 0) DFLASH_RETURN_IF_ERROR(Put(*style.item_separator, is_content));
      DFLASH_RETURN_IF_ERROR(NewLine(style, level + 1, is_content));
      const std::optional<std::string> scalar = JsonScalar(key);
      DFLASH_RETURN_IF_ERROR(JsonText(scalar.has_value() ? MarkedText::FromTemplate(*scalar) : *key.AsText(),
                                      style, is_content || key.is_content));
      DFLASH_RETURN_IF_ERROR(Put(*style.key_separator, is_content));
      DFLASH_RETURN_IF_ERROR(Json(value, style, level + 1, is_content));
    }
    DFLASH_RETURN_IF_ERROR(NewLine(style, level, is_content));
    return Put("}", is_content);
  }

  Runtime& runtime_;
  MarkedTextBuilder builder_;
};

}  // namespace

std::string FloatRepr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr;
  std::string_view text(buffer, static_cast<size_t>(end - buffer));
  std::string out;
  if (text.front() == '-') {
    out.push_back('-');
    text.remove_prefix(1);
  }
  const size_t e = text.find('e');
  int exponent = 0;
  const char* exponent_digits = text.data() + e + (text[e + 1] == '+' ? 2 : 1);
  std::from_chars(exponent_digits, text.data() + text.size(), exponent);
  std::string digits(text.substr(0, 1));
  if (e > 2) digits.append(text.substr(2, e - 2));
  const int count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    out.append(digits, 0, 1);
    if (count > 1) out.append(".").append(digits, 1);
    const int magnitude = std::abs(exponent);
    out.append(exponent < 0 ? "e-" : "e+")
        .append(magnitude < 10 ? "0" : "")
        .append(std::to_string(magnitude));
  } else if (exponent < 0) {
    out.append("0.").append(static_cast<size_t>(-exponent - 1), '0').append(digits);
  } else if (count <= exponent + 1) {
    out.append(digits).append(static_cast<size_t>(exponent + 1 - count), '0').append(".0");
  } else {
    out.append(digits, 0, static_cast<size_t>(exponent) + 1)
        .append(".")
        .append(digits, static_cast<size_t>(exponent) + 1);
  }
  return out;
}

absl::StatusOr<MarkedText> ToText(Runtime& runtime, const Value& value) {
  if (const MarkedText* text = value.AsText()) return text->WithMarkup(false);
  if (value.IsUndefined()) return MarkedText();
  return ToRepr(runtime, value);
}

absl::StatusOr<MarkedText> ToRepr(Runtime& runtime, const Value& value) {
  Writer writer(runtime);
  DFLASH_RETURN_IF_ERROR(writer.Repr(value, /*inside_content=*/false));
  return writer.Build();
}

absl::StatusOr<MarkedText> ToJson(Runtime& runtime, const Value& value, const JsonStyle& style) {
  JsonStyle full = style;
  if (!full.item_separator.has_value()) full.item_separator = full.indent.has_value() ? "," : ", ";
  if (!full.key_separator.has_value()) full.key_separator = ": ";
  Writer writer(runtime);
  DFLASH_RETURN_IF_ERROR(writer.Json(value, full, 0, /*inside_content=*/false));
  return writer.Build();
}

}  // namespace dflash::jinja
