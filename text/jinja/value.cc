#include "text/jinja/value.h"

#include <algorithm>
#include <optional>

namespace dflash::jinja {

namespace {

// Exact for every int64 and every double: long double has at least 64 bits of mantissa where we run.
std::optional<long double> AsNumber(const Value& value) {
  if (const bool* b = value.As<bool>()) return *b ? 1 : 0;
  if (const int64_t* i = value.As<int64_t>()) return static_cast<long double>(*i);
  if (const double* d = value.As<double>()) return *d;
  return std::nullopt;
}

}  // namespace

const Value* Dict::Find(const Value& key) const {
  const auto found =
      std::find_if(items.begin(), items.end(), [&](const auto& item) { return SameKey(item.first, key); });
  return found == items.end() ? nullptr : &found->second;
}

const Value* Dict::Find(std::string_view key) const {
  const auto found = std::find_if(items.begin(), items.end(), [&](const auto& item) {
    const MarkedText* text = item.first.AsText();
    return text != nullptr && text->bytes() == key;
  });
  return found == items.end() ? nullptr : &found->second;
}

const Value* Namespace::Find(std::string_view name) const {
  const auto found = std::find_if(attributes.begin(), attributes.end(),
                                  [&](const auto& attribute) { return attribute.first == name; });
  return found == attributes.end() ? nullptr : &found->second;
}

void Namespace::Assign(std::string_view name, Value value) {
  for (auto& attribute : attributes) {
    if (attribute.first == name) {
      attribute.second = std::move(value);
      return;
    }
  }
  attributes.emplace_back(name, std::move(value));
}

int DepthOf(const Value& value) {
  if (const Sequence* sequence = value.AsSequence()) return sequence->depth;
  if (const Dict* dict = value.AsDict()) return dict->depth;
  if (const auto* loop = value.As<std::shared_ptr<Loop>>()) return (*loop)->items->depth;
  if (const auto* method = value.As<std::shared_ptr<const Method>>()) return DepthOf((*method)->self);
  return 0;
}

bool IsTrue(const Value& value) {
  if (value.IsUndefined() || value.IsNone()) return false;
  if (const bool* b = value.As<bool>()) return *b;
  if (const int64_t* i = value.As<int64_t>()) return *i != 0;
  if (const double* d = value.As<double>()) return *d != 0;
  if (const MarkedText* text = value.AsText()) return !text->empty();
  if (const Sequence* sequence = value.AsSequence()) {
    return sequence->kind == Sequence::Kind::kIterator || !sequence->items.empty();
  }
  if (const Dict* dict = value.AsDict()) return !dict->items.empty();
  return true;
}

const char* TypeName(const Value& value) {
  if (value.IsUndefined()) return "Undefined";
  if (value.IsNone()) return "NoneType";
  if (value.As<bool>() != nullptr) return "bool";
  if (value.As<int64_t>() != nullptr) return "int";
  if (value.As<double>() != nullptr) return "float";
  if (value.AsText() != nullptr) return "str";
  if (value.AsDict() != nullptr) return "dict";
  if (value.As<Namespace*>() != nullptr) return "Namespace";
  if (value.As<std::shared_ptr<Loop>>() != nullptr) return "LoopContext";
  if (value.As<const MacroStatement*>() != nullptr) return "Macro";
  if (value.As<Builtin>() != nullptr) return "function";
  if (const Sequence* sequence = value.AsSequence()) {
    switch (sequence->kind) {
      case Sequence::Kind::kList:
        return "list";
      case Sequence::Kind::kTuple:
        return "tuple";
      case Sequence::Kind::kRange:
        return "range";
      case Sequence::Kind::kDictKeys:
        return "dict_keys";
      case Sequence::Kind::kDictValues:
        return "dict_values";
      case Sequence::Kind::kDictItems:
        return "dict_items";
      case Sequence::Kind::kIterator:
        return "generator";
    }
  }
  return "method";
}

bool IsKey(const Value& value) {
  return value.IsNone() || value.AsText() != nullptr || AsNumber(value).has_value();
}

bool SameKey(const Value& a, const Value& b) {
  const MarkedText* text_a = a.AsText();
  const MarkedText* text_b = b.AsText();
  if (text_a != nullptr || text_b != nullptr) {
    return text_a != nullptr && text_b != nullptr && text_a->bytes() == text_b->bytes();
  }
  if (a.IsNone() || b.IsNone()) return a.IsNone() && b.IsNone();
  const std::optional<long double> number_a = AsNumber(a);
  const std::optional<long double> number_b = AsNumber(b);
  return number_a.has_value() && number_b.has_value() && *number_a == *number_b;
}

}  // namespace dflash::jinja
