// Values of the template language: Python's, as far as chat templates use them. Lists and dicts are immutable
// and shared (the sandbox of transformers forbids changing them too); only a namespace can be assigned to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "text/jinja/marked_text.h"

namespace dflash::jinja {

struct Sequence;
struct Dict;
struct Namespace;
struct Loop;
struct Method;
struct MacroStatement;

// A missing value. Prints as nothing, is false and iterates as empty; any other use is an error with
// `message`.
struct Undefined {
  std::shared_ptr<const std::string> message;
};
struct None {};

enum class Builtin : uint8_t { kRange, kDict, kNamespace, kRaiseException, kStrftimeNow };

struct Value {
  using Data =
      std::variant<Undefined, None, bool, int64_t, double, MarkedText, std::shared_ptr<const Sequence>,
                   std::shared_ptr<const Dict>, Namespace*, std::shared_ptr<Loop>, const MacroStatement*,
                   Builtin, std::shared_ptr<const Method>>;

  Value() : data(None{}) {}
  Value(Data d, bool from_content = false)
      : data(std::move(d)), is_content(from_content) {}  // NOLINT: a plain wrapper

  static Value MakeUndefined(std::string message) {
    return Value(Undefined{std::make_shared<const std::string>(std::move(message))});
  }
  static Value Text(std::string_view template_text) {
    return Value(MarkedText::FromTemplate(std::string(template_text)));
  }

  template <typename T>
  const T* As() const {
    return std::get_if<T>(&data);
  }
  bool IsUndefined() const { return std::holds_alternative<Undefined>(data); }
  bool IsNone() const { return std::holds_alternative<None>(data); }
  const MarkedText* AsText() const { return std::get_if<MarkedText>(&data); }
  const Sequence* AsSequence() const;
  const Dict* AsDict() const;

  Data data;
  // For None, booleans and numbers: came from outside, so that what they print as is content. Strings and
  // containers carry their own marks.
  bool is_content = false;
};

// Everything that is, in Python, a list, a tuple or a view that is walked in order.
struct Sequence {
  enum class Kind : uint8_t {
    kList,
    kTuple,
    kRange,
    kDictKeys,
    kDictValues,
    kDictItems,
    kIterator,  // a generator: no length, no index, consumed once
  };
  Kind kind = Kind::kList;
  std::vector<Value> items;
  int depth = 1;            // 1 + the deepest element
  bool is_content = false;  // came from outside as a whole: its punctuation counts as content too
  std::string range_repr;   // kRange only: "range(0, 3)"
  mutable size_t position =
      0;  // kIterator only: items already consumed. An iterator never leaves its rendering
};

struct Dict {
  std::vector<std::pair<Value, Value>> items;  // insertion order; keys are strings, numbers, booleans or None
  int depth = 1;
  bool is_content = false;

  const Value* Find(const Value& key) const;
  const Value* Find(std::string_view key) const;
};

// Owned by the Runtime, so that a namespace that holds itself leaks nothing.
struct Namespace {
  std::vector<std::pair<std::string, Value>> attributes;

  const Value* Find(std::string_view name) const;
  void Assign(std::string_view name, Value value);
};

// The `loop` variable.
struct Loop {
  std::shared_ptr<const Sequence> items;
  size_t index = 0;
};

// A method bound to its object, e.g. `text.strip`.
struct Method {
  Value self;
  std::string name;
};

inline const Sequence* Value::AsSequence() const {
  const auto* pointer = std::get_if<std::shared_ptr<const Sequence>>(&data);
  return pointer == nullptr ? nullptr : pointer->get();
}
inline const Dict* Value::AsDict() const {
  const auto* pointer = std::get_if<std::shared_ptr<const Dict>>(&data);
  return pointer == nullptr ? nullptr : pointer->get();
}

// How deep containers nest in the value; 0 for a scalar.
int DepthOf(const Value& value);

// Python's bool().
bool IsTrue(const Value& value);

// Python's name of the type, e.g. "str", "NoneType", for error messages.
const char* TypeName(const Value& value);

// Whether the value can be a dict key here; tuples (hashable in Python) are not supported as keys.
bool IsKey(const Value& value);

// Python's == of two keys: 1, 1.0 and True are one key.
bool SameKey(const Value& a, const Value& b);

}  // namespace dflash::jinja
