#include "text/jinja/access.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "text/jinja/operators.h"

namespace dflash::jinja {

namespace {

constexpr std::array<std::string_view, 47> kTextMethods = {
    "capitalize", "casefold",     "center",       "count",   "encode",     "endswith",    "expandtabs",
    "find",       "format",       "format_map",   "index",   "isalnum",    "isalpha",     "isascii",
    "isdecimal",  "isdigit",      "isidentifier", "islower", "isnumeric",  "isprintable", "isspace",
    "istitle",    "isupper",      "join",         "ljust",   "lower",      "lstrip",      "maketrans",
    "partition",  "removeprefix", "removesuffix", "replace", "rfind",      "rindex",      "rjust",
    "rpartition", "rsplit",       "rstrip",       "split",   "splitlines", "startswith",  "strip",
    "swapcase",   "title",        "translate",    "upper",   "zfill"};
constexpr std::array<std::string_view, 6> kDictMethods = {"copy",  "fromkeys", "get",
                                                          "items", "keys",     "values"};
constexpr std::array<std::string_view, 5> kListMethods = {"clear", "copy", "count", "index", "pop"};
constexpr std::array<std::string_view, 2> kTupleMethods = {"count", "index"};
constexpr std::array<std::string_view, 5> kDictChangers = {"clear", "pop", "popitem", "setdefault", "update"};
constexpr std::array<std::string_view, 6> kListChangers = {"append", "extend",  "insert",
                                                           "remove", "reverse", "sort"};

template <size_t kSize>
bool Has(const std::array<std::string_view, kSize>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool IsList(const Value& value) {
  return value.AsSequence() != nullptr && value.AsSequence()->kind == Sequence::Kind::kList;
}

bool IsTuple(const Value& value) {
  return value.AsSequence() != nullptr && value.AsSequence()->kind == Sequence::Kind::kTuple;
}

bool HasMethod(const Value& object, std::string_view name) {
  if (object.AsText() != nullptr) return Has(kTextMethods, name);
  if (object.AsDict() != nullptr) return Has(kDictMethods, name);
  if (IsList(object)) return Has(kListMethods, name);
  return IsTuple(object) && Has(kTupleMethods, name);
}

bool IsUnsafe(const Value& object, std::string_view name) {
  if (name.size() > 4 && name.starts_with("__") && name.ends_with("__")) return true;
  if (object.As<Namespace*>() != nullptr) return name.starts_with("_");
  return (object.AsDict() != nullptr && Has(kDictChangers, name)) ||
         (IsList(object) && Has(kListChangers, name));
}

std::string Describe(const Value& object) {
  return object.IsNone() ? std::string("None") : absl::StrCat(TypeName(object), " object");
}

absl::StatusOr<Value> LoopAttribute(const Loop& loop, std::string_view name) {
  const auto count = static_cast<int64_t>(loop.items->items.size());
  const auto index = static_cast<int64_t>(loop.index);
  if (name == "index0") return Value(index);
  if (name == "index") return Value(index + 1);
  if (name == "revindex0") return Value(count - index - 1);
  if (name == "revindex") return Value(count - index);
  if (name == "length") return Value(count);
  if (name == "first") return Value(index == 0);
  if (name == "last") return Value(index + 1 == count);
  if (name == "depth") return Value(int64_t{1});
  if (name == "depth0") return Value(int64_t{0});
  if (name == "previtem") {
    return index > 0 ? loop.items->items[loop.index - 1] : Value::MakeUndefined("there is no previous item");
  }
  if (name == "nextitem") {
    return index + 1 < count ? loop.items->items[loop.index + 1]
                             : Value::MakeUndefined("there is no next item");
  }
  if (name == "cycle" || name == "changed") {
    return absl::UnimplementedError(absl::StrCat("loop.", View(name), " is not supported"));
  }
  return Value::MakeUndefined(absl::StrCat("'loop' has no attribute '", View(name), "'"));
}

// What Python's getattr finds, or nothing.
absl::StatusOr<std::optional<Value>> FindAttribute(Runtime& runtime, const Value& object,
                                                   std::string_view name) {
  if (IsUnsafe(object, name)) {
    return Value::MakeUndefined(
        absl::StrCat("access to attribute '", View(name), "' of '", TypeName(object), "' object is unsafe."));
  }
  if (const auto* loop = object.As<std::shared_ptr<Loop>>()) return LoopAttribute(**loop, name);
  if (const auto* attributes = object.As<Namespace*>()) {
    DFLASH_RETURN_IF_ERROR(runtime.Charge((*attributes)->attributes.size() / 8));
    const Value* found = (*attributes)->Find(name);
    return found == nullptr ? std::nullopt : std::optional<Value>(*found);
  }
  if (HasMethod(object, name)) return runtime.NewMethod(object, name);
  return std::nullopt;
}

Value NoAttribute(const Value& object, std::string_view name) {
  return Value::MakeUndefined(absl::StrCat("'", Describe(object), "' has no attribute '", View(name), "'"));
}

Value NoElement(const Value& object, const Value& key) {
  const std::optional<int64_t> index = AsInteger(key);
  return Value::MakeUndefined(
      absl::StrCat(Describe(object), " has no element ",
                   index.has_value() ? std::to_string(*index) : absl::StrCat("of key type ", TypeName(key))));
}

// Byte offsets of the characters, and the size at the end.
std::vector<size_t> Boundaries(const MarkedText& text) {
  std::vector<size_t> offsets;
  offsets.reserve(text.code_points() + 1);
  for (size_t offset = 0; offset < text.size(); offset += DecodeUtf8(text.bytes(), offset).size) {
    offsets.push_back(offset);
  }
  offsets.push_back(text.size());
  return offsets;
}

absl::StatusOr<std::optional<Value>> FindItem(Runtime& runtime, const Value& object, const Value& key) {
  if (const Dict* dict = object.AsDict()) {
    DFLASH_RETURN_IF_ERROR(runtime.Charge(dict->items.size() / 8));
    if (!IsKey(key)) return std::nullopt;
    if (const MarkedText* text = key.AsText()) DFLASH_RETURN_IF_ERROR(runtime.ChargeText(text->size()));
    const Value* found = dict->Find(key);
    return found == nullptr ? std::nullopt : std::optional<Value>(*found);
  }
  const std::optional<int64_t> index = AsInteger(key);
  if (!index.has_value()) return std::nullopt;
  const MarkedText* text = object.AsText();
  const Sequence* sequence = object.AsSequence();
  if (text == nullptr && (sequence == nullptr || (sequence->kind != Sequence::Kind::kList &&
                                                  sequence->kind != Sequence::Kind::kTuple &&
                                                  sequence->kind != Sequence::Kind::kRange))) {
    return std::nullopt;
  }
  const auto size = static_cast<int64_t>(text != nullptr ? text->code_points() : sequence->items.size());
  const int64_t position = *index < 0 ? *index + size : *index;
  if (position < 0 || position >= size) return std::nullopt;
  const auto place = static_cast<size_t>(position);
  if (text == nullptr) return sequence->items[place];
  if (text->ascii()) return Value(text->Substring(place, place + 1));
  DFLASH_RETURN_IF_ERROR(runtime.Charge(text->size() / 16));
  size_t begin = 0;
  for (size_t i = 0; i < place; ++i) begin += DecodeUtf8(text->bytes(), begin).size;
  return Value(text->Substring(begin, begin + DecodeUtf8(text->bytes(), begin).size));
}

}  // namespace

absl::StatusOr<Value> GetAttribute(Runtime& runtime, const Value& object, std::string_view name) {
  if (const auto* undefined = object.As<Undefined>()) return RenderError(*undefined->message);
  DFLASH_ASSIGN_OR_RETURN(std::optional<Value> attribute, FindAttribute(runtime, object, name));
  if (attribute.has_value()) return *std::move(attribute);
  if (const Dict* dict = object.AsDict()) {
    DFLASH_RETURN_IF_ERROR(runtime.Charge(dict->items.size() / 8));
    if (const Value* found = dict->Find(name)) return *found;
  }
  if (object.As<const MacroStatement*>() != nullptr || object.As<Builtin>() != nullptr ||
      object.As<std::shared_ptr<const Method>>() != nullptr) {
    return absl::UnimplementedError(absl::StrCat("attributes of a ", TypeName(object), " are not supported"));
  }
  return NoAttribute(object, name);
}

absl::StatusOr<Value> GetItem(Runtime& runtime, const Value& object, const Value& key) {
  if (const auto* undefined = object.As<Undefined>()) return RenderError(*undefined->message);
  DFLASH_ASSIGN_OR_RETURN(std::optional<Value> item, FindItem(runtime, object, key));
  if (item.has_value()) return *std::move(item);
  const MarkedText* name = key.AsText();
  if (name == nullptr) return NoElement(object, key);
  DFLASH_ASSIGN_OR_RETURN(std::optional<Value> attribute, FindAttribute(runtime, object, name->bytes()));
  return attribute.has_value() ? *std::move(attribute) : NoAttribute(object, name->bytes());
}

absl::StatusOr<Value> GetSlice(Runtime& runtime, const Value& object, const Value& start, const Value& stop,
                               const Value& step) {
  if (const auto* undefined = object.As<Undefined>()) return RenderError(*undefined->message);
  const MarkedText* text = object.AsText();
  if (text == nullptr && !IsList(object) && !IsTuple(object)) {
    if (object.AsSequence() != nullptr && object.AsSequence()->kind == Sequence::Kind::kRange) {
      return absl::UnimplementedError("slicing a range is not supported");
    }
    return RenderError("a value of type ", TypeName(object), " cannot be sliced");
  }
  for (const Value* bound : {&start, &stop, &step}) {
    if (!bound->IsNone() && !AsInteger(*bound).has_value()) {
      return RenderError("slice indices must be integers or None, not ", TypeName(*bound));
    }
  }
  const auto size =
      static_cast<int64_t>(text != nullptr ? text->code_points() : object.AsSequence()->items.size());
  // A stride beyond the size takes one item, however large it is.
  const int64_t stride = std::clamp(AsInteger(step).value_or(1), -size - 1, size + 1);
  if (stride == 0) return RenderError("slice step cannot be zero");
  const auto place = [&](const Value& bound, int64_t absent) {
    if (bound.IsNone()) return absent;
    int64_t position = *AsInteger(bound);
    if (position < 0) position += size;
    return stride > 0 ? std::clamp<int64_t>(position, 0, size) : std::clamp<int64_t>(position, -1, size - 1);
  };
  const int64_t first = place(start, stride > 0 ? 0 : size - 1);
  const int64_t end = place(stop, stride > 0 ? size : -1);
  if (text == nullptr) {
    std::vector<Value> items;
    for (int64_t i = first; stride > 0 ? i < end : i > end; i += stride) {
      items.push_back(object.AsSequence()->items[static_cast<size_t>(i)]);
    }
    return runtime.NewSequence(object.AsSequence()->kind, std::move(items));
  }
  DFLASH_RETURN_IF_ERROR(runtime.ChargeText(text->size()));
  if (stride == 1 && text->ascii()) {
    return Value(text->Substring(static_cast<size_t>(first), static_cast<size_t>(std::max(first, end))));
  }
  DFLASH_RETURN_IF_ERROR(runtime.Charge(text->code_points()));
  const std::vector<size_t> offsets = Boundaries(*text);
  if (stride == 1) {
    return Value(text->Substring(offsets[static_cast<size_t>(first)],
                                 offsets[static_cast<size_t>(std::max(first, end))]));
  }
  MarkedTextBuilder builder;
  for (int64_t i = first; stride > 0 ? i < end : i > end; i += stride) {
    builder.Append(*text, offsets[static_cast<size_t>(i)], offsets[static_cast<size_t>(i) + 1]);
  }
  return Value(builder.Build().WithMarkup(text->markup()));
}

absl::StatusOr<std::shared_ptr<const Sequence>> Iterate(Runtime& runtime, const Value& value) {
  if (const auto* sequence = value.As<std::shared_ptr<const Sequence>>()) {
    if ((*sequence)->kind != Sequence::Kind::kIterator) return *sequence;
    const auto consumed =
        static_cast<std::ptrdiff_t>(std::exchange((*sequence)->position, (*sequence)->items.size()));
    if (consumed == 0) return *sequence;
    auto rest = std::make_shared<Sequence>();
    rest->items.assign((*sequence)->items.begin() + consumed, (*sequence)->items.end());
    rest->depth = (*sequence)->depth;
    DFLASH_RETURN_IF_ERROR(runtime.Charge(rest->items.size()));
    return std::shared_ptr<const Sequence>(std::move(rest));
  }
  auto items = std::make_shared<Sequence>();
  if (const MarkedText* text = value.AsText()) {
    // A string of its own for each character: weighed by the memory that it takes.
    DFLASH_RETURN_IF_ERROR(runtime.Charge(16 * text->code_points()));
    const std::vector<size_t> offsets = Boundaries(*text);
    for (size_t i = 0; i + 1 < offsets.size(); ++i)
      items->items.emplace_back(text->Substring(offsets[i], offsets[i + 1]));
  } else if (const Dict* dict = value.AsDict()) {
    DFLASH_RETURN_IF_ERROR(runtime.Charge(dict->items.size()));
    for (const auto& item : dict->items) items->items.push_back(item.first);
  } else if (!value.IsUndefined()) {
    return RenderError("a value of type ", TypeName(value), " is not iterable");
  }
  return std::shared_ptr<const Sequence>(std::move(items));
}

bool IsIterable(const Value& value) {
  return value.IsUndefined() || value.AsText() != nullptr || value.AsSequence() != nullptr ||
         value.AsDict() != nullptr;
}

absl::StatusOr<int64_t> Length(const Value& value) {
  if (value.IsUndefined()) return 0;
  if (const MarkedText* text = value.AsText()) return static_cast<int64_t>(text->code_points());
  if (const Dict* dict = value.AsDict()) return static_cast<int64_t>(dict->items.size());
  if (const Sequence* sequence = value.AsSequence();
      sequence != nullptr && sequence->kind != Sequence::Kind::kIterator) {
    return static_cast<int64_t>(sequence->items.size());
  }
  if (const auto* loop = value.As<std::shared_ptr<Loop>>())
    return static_cast<int64_t>((*loop)->items->items.size());
  return RenderError("a value of type ", TypeName(value), " has no length");
}

}  // namespace dflash::jinja
