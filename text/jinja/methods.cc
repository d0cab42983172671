#include "text/jinja/methods.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "text/jinja/access.h"
#include "text/jinja/operators.h"

namespace dflash::jinja {

namespace {

using Bound = std::vector<std::optional<Value>>;
constexpr size_t kNotFound = std::string_view::npos;

absl::StatusOr<const MarkedText*> RequiredText(std::string_view function, const Value& argument) {
  if (const MarkedText* text = argument.AsText()) return text;
  return RenderError(View(function), "() needs a string, got ", TypeName(argument));
}

// The bound argument as text; null when absent or None.
absl::StatusOr<const MarkedText*> OptionalText(std::string_view function,
                                               const std::optional<Value>& argument) {
  if (!argument.has_value() || argument->IsNone()) return nullptr;
  return RequiredText(function, *argument);
}

absl::StatusOr<int64_t> OptionalInteger(std::string_view function, const std::optional<Value>& argument,
                                        int64_t absent) {
  if (!argument.has_value()) return absent;
  if (const std::optional<int64_t> integer = AsInteger(*argument)) return *integer;
  return RenderError(View(function), "() needs an integer, got ", TypeName(*argument));
}

size_t SkipSpace(std::string_view bytes, size_t offset, bool space) {
  while (offset < bytes.size()) {
    const CodePoint code_point = DecodeUtf8(bytes, offset);
    if (IsSpace(code_point.value) != space) break;
    offset += code_point.size;
  }
  return offset;
}

size_t SkipSpaceBack(std::string_view bytes, size_t offset, bool space) {
  while (offset > 0) {
    const size_t previous = PreviousBoundary(bytes, offset);
    if (IsSpace(DecodeUtf8(bytes, previous).value) != space) break;
    offset = previous;
  }
  return offset;
}

// The parts of str.split or, from the right, str.rsplit, as byte ranges in ascending order.
std::vector<ByteRange> SplitRanges(std::string_view bytes, const MarkedText* separator, int64_t limit,
                                   bool from_right) {
  std::vector<ByteRange> parts;
  const auto full = [&] { return limit >= 0 && static_cast<int64_t>(parts.size()) >= limit; };
  if (separator != nullptr) {
    const std::string_view needle = separator->bytes();
    size_t begin = 0, end = bytes.size();
    while (!full()) {
      const size_t found = from_right ? bytes.substr(0, end).rfind(needle) : bytes.find(needle, begin);
      if (found == kNotFound) break;
      if (from_right) {
        parts.push_back({found + needle.size(), end});
        end = found;
      } else {
        parts.push_back({begin, found});
        begin = found + needle.size();
      }
    }
    parts.push_back({begin, end});
  } else if (from_right) {
    size_t end = SkipSpaceBack(bytes, bytes.size(), true);
    while (end > 0) {
      const size_t begin = full() ? 0 : SkipSpaceBack(bytes, end, false);
      parts.push_back({begin, end});
      end = SkipSpaceBack(bytes, begin, true);
    }
  } else {
    size_t begin = SkipSpace(bytes, 0, true);
    while (begin < bytes.size()) {
      const size_t end = full() ? bytes.size() : SkipSpace(bytes, begin, false);
      parts.push_back({begin, end});
      begin = SkipSpace(bytes, end, true);
    }
  }
  if (from_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

absl::StatusOr<Value> Split(Runtime& runtime, const MarkedText& text, const Arguments& arguments,
                            bool from_right) {
  const std::string_view name = from_right ? "rsplit" : "split";
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind(name, {"sep", "maxsplit"}, 0, arguments));
  DFLASH_ASSIGN_OR_RETURN(const MarkedText* separator, OptionalText(name, bound[0]));
  DFLASH_ASSIGN_OR_RETURN(const int64_t limit, OptionalInteger(name, bound[1], -1));
  if (separator != nullptr && separator->empty()) return RenderError("empty separator");
  DFLASH_RETURN_IF_ERROR(runtime.ChargeText(text.size()));
  const std::vector<ByteRange> parts = SplitRanges(text.bytes(), separator, limit, from_right);
  DFLASH_RETURN_IF_ERROR(runtime.Charge(16 * parts.size()));  // as for the characters of a string
  std::vector<Value> items;
  items.reserve(parts.size());
  for (const ByteRange& part : parts) items.emplace_back(text.Substring(part.begin, part.end));
  return runtime.NewSequence(Sequence::Kind::kList, std::move(items));
}

absl::StatusOr<Value> StripMethod(Runtime& runtime, std::string_view name, const MarkedText& text,
                                  const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind(name, {"chars"}, 0, arguments));
  DFLASH_ASSIGN_OR_RETURN(const MarkedText* chars, OptionalText(name, bound[0]));
  DFLASH_ASSIGN_OR_RETURN(MarkedText stripped,
                          Strip(runtime, text, chars, name != "rstrip", name != "lstrip"));
  return Value(std::move(stripped));
}

// startswith and endswith: one affix or a tuple of them.
absl::StatusOr<Value> HasAffix(Runtime& runtime, std::string_view name, const MarkedText& text,
                               const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind(name, {"affix"}, 1, arguments));
  std::vector<Value> affixes = {*bound[0]};
  if (const Sequence* tuple = bound[0]->AsSequence();
      tuple != nullptr && tuple->kind == Sequence::Kind::kTuple) {
    affixes = tuple->items;
  }
  bool found = false;
  for (const Value& affix : affixes) {
    DFLASH_ASSIGN_OR_RETURN(const MarkedText* bytes, RequiredText(name, affix));
    DFLASH_RETURN_IF_ERROR(runtime.ChargeText(std::min(bytes->size(), text.size())));
    found = found || (name == "startswith" ? text.bytes().starts_with(bytes->bytes())
                                           : text.bytes().ends_with(bytes->bytes()));
  }
  return Value(found);
}

// find, rfind, index, rindex: positions count characters.
absl::StatusOr<Value> FindText(Runtime& runtime, std::string_view name, const MarkedText& text,
                               const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind(name, {"sub"}, 1, arguments));
  DFLASH_ASSIGN_OR_RETURN(const MarkedText* needle, RequiredText(name, *bound[0]));
  DFLASH_RETURN_IF_ERROR(runtime.ChargeText(text.size()));
  const size_t found =
      name.starts_with('r') ? text.bytes().rfind(needle->bytes()) : text.bytes().find(needle->bytes());
  if (found != kNotFound) return Value(static_cast<int64_t>(text.Substring(0, found).code_points()));
  if (name.ends_with("index")) return RenderError("substring not found");
  return Value(int64_t{-1});
}

absl::StatusOr<Value> CountText(Runtime& runtime, const MarkedText& text, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind("count", {"sub"}, 1, arguments));
  DFLASH_ASSIGN_OR_RETURN(const MarkedText* needle, RequiredText("count", *bound[0]));
  DFLASH_RETURN_IF_ERROR(runtime.ChargeText(text.size()));
  if (needle->empty()) return Value(static_cast<int64_t>(text.code_points()) + 1);
  return Value(static_cast<int64_t>(SplitRanges(text.bytes(), needle, -1, false).size()) - 1);
}

absl::StatusOr<Value> ReplaceMethod(Runtime& runtime, const MarkedText& text, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind("replace", {"old", "new", "count"}, 2, arguments));
  DFLASH_ASSIGN_OR_RETURN(const MarkedText* old, RequiredText("replace", *bound[0]));
  DFLASH_ASSIGN_OR_RETURN(const MarkedText* replacement, RequiredText("replace", *bound[1]));
  DFLASH_ASSIGN_OR_RETURN(const int64_t count, OptionalInteger("replace", bound[2], -1));
  DFLASH_ASSIGN_OR_RETURN(MarkedText replaced, Replace(runtime, text, *old, *replacement, count));
  return Value(std::move(replaced));
}

absl::StatusOr<Value> RemoveAffix(std::string_view name, const MarkedText& text, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind(name, {"affix"}, 1, arguments));
  DFLASH_ASSIGN_OR_RETURN(const MarkedText* affix, RequiredText(name, *bound[0]));
  if (name == "removeprefix" && text.bytes().starts_with(affix->bytes())) {
    return Value(text.Substring(affix->size(), text.size()));
  }
  if (name == "removesuffix" && text.bytes().ends_with(affix->bytes())) {
    return Value(text.Substring(0, text.size() - affix->size()));
  }
  return Value(text);
}

absl::StatusOr<Value> JoinMethod(Runtime& runtime, const MarkedText& separator, const Arguments& arguments) {
  DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind("join", {"iterable"}, 1, arguments));
  DFLASH_ASSIGN_OR_RETURN(const std::shared_ptr<const Sequence> items, Iterate(runtime, *bound[0]));
  std::vector<MarkedText> texts;
  for (const Value& item : items->items) {
    const MarkedText* text = item.AsText();
    if (text == nullptr) return RenderError("join() needs strings, got ", TypeName(item));
    texts.push_back(*text);
  }
  DFLASH_ASSIGN_OR_RETURN(MarkedText joined, Join(runtime, separator, texts));
  return Value(std::move(joined));
}

absl::StatusOr<Value> SplitLinesMethod(Runtime& runtime, const MarkedText& text, const Arguments& arguments) {
  DFLASH_RETURN_IF_ERROR(Bind("splitlines", {}, 0, arguments).status());
  DFLASH_ASSIGN_OR_RETURN(std::vector<MarkedText> lines, SplitLines(runtime, text));
  return runtime.NewSequence(Sequence::Kind::kList, std::vector<Value>(lines.begin(), lines.end()));
}

// upper, lower, title, capitalize.
absl::StatusOr<Value> CaseMethod(Runtime& runtime, std::string_view name, const MarkedText& text,
                                 const Arguments& arguments) {
  DFLASH_RETURN_IF_ERROR(Bind(name, {}, 0, arguments).status());
  bool inside_word = false;
  const auto title = [&](char32_t c) {
    return std::exchange(inside_word, IsCased(c)) ? LetterCase::kLower : LetterCase::kTitle;
  };
  const auto fixed = [&](char32_t) { return name == "upper" ? LetterCase::kUpper : LetterCase::kLower; };
  const absl::StatusOr<MarkedText> result = name == "capitalize" ? Capitalize(runtime, text)
                                            : name == "title"    ? ToCase(runtime, text, title)
                                                                 : ToCase(runtime, text, fixed);
  if (!result.ok()) return result.status();
  return Value(*result);
}

absl::StatusOr<Value> CallTextMethod(Runtime& runtime, std::string_view name, const MarkedText& text,
                                     const Arguments& arguments) {
  if (name == "split" || name == "rsplit") return Split(runtime, text, arguments, name == "rsplit");
  if (name == "strip" || name == "lstrip" || name == "rstrip")
    return StripMethod(runtime, name, text, arguments);
  if (name == "startswith" || name == "endswith") return HasAffix(runtime, name, text, arguments);
  if (name == "find" || name == "rfind" || name == "index" || name == "rindex") {
    return FindText(runtime, name, text, arguments);
  }
  if (name == "upper" || name == "lower" || name == "title" || name == "capitalize") {
    return CaseMethod(runtime, name, text, arguments);
  }
  if (name == "replace") return ReplaceMethod(runtime, text, arguments);
  if (name == "removeprefix" || name == "removesuffix") return RemoveAffix(name, text, arguments);
  if (name == "join") return JoinMethod(runtime, text, arguments);
  if (name == "count") return CountText(runtime, text, arguments);
  if (name == "splitlines") return SplitLinesMethod(runtime, text, arguments);
  return absl::UnimplementedError(absl::StrCat("the method str.", View(name), " is not supported"));
}

absl::StatusOr<Value> CallDictMethod(Runtime& runtime, std::string_view name, const Value& self,
                                     const Dict& dict, const Arguments& arguments) {
  if (name == "get") {
    DFLASH_ASSIGN_OR_RETURN(const Bound bound, Bind("get", {"key", "default"}, 1, arguments));
    DFLASH_ASSIGN_OR_RETURN(const bool has_key, Compare(runtime, CompareOperator::kIn, *bound[0], self));
    if (has_key) return *dict.Find(*bound[0]);
    return bound[1].value_or(Value());
  }
  std::vector<Value> items;
  if (name == "items") {
    DFLASH_RETURN_IF_ERROR(Bind(name, {}, 0, arguments).status());
    for (const auto& [key, value] : dict.items) {
      DFLASH_ASSIGN_OR_RETURN(Value pair,
                              runtime.NewSequence(Sequence::Kind::kTuple, {key, value}, dict.is_content));
      items.push_back(std::move(pair));
    }
    return runtime.NewSequence(Sequence::Kind::kDictItems, std::move(items), dict.is_content);
  }
  if (name == "keys" || name == "values") {
    DFLASH_RETURN_IF_ERROR(Bind(name, {}, 0, arguments).status());
    for (const auto& [key, value] : dict.items) items.push_back(name == "keys" ? key : value);
    return runtime.NewSequence(name == "keys" ? Sequence::Kind::kDictKeys : Sequence::Kind::kDictValues,
                               std::move(items), dict.is_content);
  }
  if (name == "copy") {
    DFLASH_RETURN_IF_ERROR(Bind(name, {}, 0, arguments).status());
    return self;  // nothing can change it
  }
  return absl::UnimplementedError(absl::StrCat("the method dict.", View(name), " is not supported"));
}

}  // namespace

absl::StatusOr<Value> CallMethod(Runtime& runtime, const Method& method, const Arguments& arguments) {
  if (const MarkedText* text = method.self.AsText()) {
    if (!text->markup()) return CallTextMethod(runtime, method.name, *text, arguments);
    Arguments escaped = arguments;  // methods of markup escape their arguments
    for (Value& argument : escaped.positional) {
      if (argument.AsText() == nullptr) continue;
      DFLASH_ASSIGN_OR_RETURN(MarkedText text_argument, EscapeHtml(runtime, *argument.AsText()));
      argument = Value(std::move(text_argument));
    }
    return CallTextMethod(runtime, method.name, *text, escaped);
  }
  if (const Dict* dict = method.self.AsDict())
    return CallDictMethod(runtime, method.name, method.self, *dict, arguments);
  return absl::UnimplementedError(
      absl::StrCat("the method ", TypeName(method.self), ".", method.name, " is not supported"));
}

absl::StatusOr<MarkedText> Strip(Runtime& runtime, const MarkedText& text, const MarkedText* chars, bool left,
                                 bool right) {
  DFLASH_RETURN_IF_ERROR(runtime.ChargeText(text.size()));
  std::u32string set;
  for (size_t offset = 0; chars != nullptr && offset < chars->size();) {
    const CodePoint code_point = DecodeUtf8(chars->bytes(), offset);
    set.push_back(code_point.value);
    offset += code_point.size;
  }
  if (set.size() > 1) DFLASH_RETURN_IF_ERROR(runtime.Charge(text.size() * (set.size() / 16)));
  const auto drops = [&](char32_t c) {
    return chars == nullptr ? IsSpace(c) : set.find(c) != std::u32string::npos;
  };
  size_t begin = 0, end = text.size();
  while (left && begin < end) {
    const CodePoint code_point = DecodeUtf8(text.bytes(), begin);
    if (!drops(code_point.value)) break;
    begin += code_point.size;
  }
  while (right && begin < end) {
    const size_t previous = PreviousBoundary(text.bytes(), end);
    if (!drops(DecodeUtf8(text.bytes(), previous).value)) break;
    end = previous;
  }
  return text.Substring(begin, end);
}

absl::StatusOr<MarkedText> Replace(Runtime& runtime, const MarkedText& text, const MarkedText& old,
                                   const MarkedText& replacement, int64_t count) {
  DFLASH_RETURN_IF_ERROR(runtime.ChargeText(text.size()));
  MarkedTextBuilder builder;
  size_t copied = 0;  // text before this offset is done
  for (size_t search = 0; count != 0; --count) {
    const size_t found = text.bytes().find(old.bytes(), search);
    if (found == kNotFound) break;
    DFLASH_RETURN_IF_ERROR(runtime.ChargeAppend(builder.size(), (found - copied) + replacement.size()));
    builder.Append(text, copied, found);
    builder.Append(replacement);
    copied = found + old.size();
    search = copied;
    if (old.empty()) {  // between all characters
      if (found == text.size()) break;
      search = found + DecodeUtf8(text.bytes(), found).size;
    }
  }
  DFLASH_RETURN_IF_ERROR(runtime.ChargeAppend(builder.size(), text.size() - copied));
  builder.Append(text, copied, text.size());
  return builder.Build().WithMarkup(text.markup());
}

absl::StatusOr<MarkedText> ToCase(Runtime& runtime, const MarkedText& text,
                                  const std::function<LetterCase(char32_t)>& choose) {
  DFLASH_RETURN_IF_ERROR(runtime.Charge(text.size()));
  const std::string_view bytes = text.bytes();
  size_t offset = 0;
  bool after_cased = false;
  const MarkedText result = MapCharacters(text, [&](char32_t c, std::string* out) {
    offset += DecodeUtf8(bytes, offset).size;
    const bool before_cased = offset < bytes.size() && IsCased(DecodeUtf8(bytes, offset).value);
    const LetterCase letter_case = choose(c);
    if (c == U'Σ' && letter_case == LetterCase::kLower && after_cased && !before_cased) {
      AppendUtf8(U'ς', out);  // the last sigma of a word
    } else {
      AppendInCase(c, letter_case, out);
    }
    // Upper and lower case mix in the `title` filter only, which maps the tail of a word as a text of its
    // own.
    after_cased = IsCased(c) && letter_case != LetterCase::kUpper;
  });
  return result.WithMarkup(text.markup());
}

absl::StatusOr<MarkedText> Capitalize(Runtime& runtime, const MarkedText& text) {
  bool is_first = true;
  return ToCase(runtime, text, [&](char32_t) {
    return std::exchange(is_first, false) ? LetterCase::kTitle : LetterCase::kLower;
  });
}

absl::StatusOr<std::vector<MarkedText>> SplitLines(Runtime& runtime, const MarkedText& text) {
  DFLASH_RETURN_IF_ERROR(runtime.ChargeText(text.size()));
  const std::string_view bytes = text.bytes();
  std::vector<MarkedText> lines;
  size_t begin = 0;
  for (size_t offset = 0; offset < bytes.size();) {
    const CodePoint code_point = DecodeUtf8(bytes, offset);
    size_t next = offset + code_point.size;
    if (IsLineBoundary(code_point.value)) {
      DFLASH_RETURN_IF_ERROR(runtime.Charge(16));
      lines.push_back(text.Substring(begin, offset));
      if (code_point.value == '\r' && next < bytes.size() && bytes[next] == '\n') ++next;
      begin = next;
    }
    offset = next;
  }
  if (begin < bytes.size()) lines.push_back(text.Substring(begin, bytes.size()));
  return lines;
}

absl::StatusOr<MarkedText> Join(Runtime& runtime, const MarkedText& separator,
                                const std::vector<MarkedText>& texts) {
  MarkedTextBuilder builder;
  for (size_t i = 0; i < texts.size(); ++i) {
    DFLASH_RETURN_IF_ERROR(runtime.ChargeAppend(builder.size(), separator.size() + texts[i].size()));
    if (i > 0) builder.Append(separator);
    builder.Append(texts[i]);
  }
  return builder.Build().WithMarkup(separator.markup());
}

}  // namespace dflash::jinja
