#include "base/json_value.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "base/status.h"

namespace dflash {
namespace {

// Builds the tree from parser events. The library's own tree cannot be used: it keeps the last of two equal
// keys and turns integers that do not fit into floats.
class TreeBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  TreeBuilder(std::string_view origin, const JsonLimits& limits) : origin_(origin), limits_(limits) {}

  absl::Status status = absl::OkStatus();
  JsonValue root;

  bool null() override { return Place({}) != nullptr; }
  bool boolean(bool value) override {
    JsonValue node;
    node.kind = JsonValue::Kind::kBool;
    node.boolean = value;
    return Place(std::move(node)) != nullptr;
  }
  bool number_integer(number_integer_t value) override {
    JsonValue node;
    node.kind = JsonValue::Kind::kInt;
    node.integer = value;
    return Place(std::move(node)) != nullptr;
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return IntegerOutOfRange();
    return number_integer(static_cast<int64_t>(value));
  }
  bool number_float(number_float_t value, const string_t& token) override {
    if (token.find_first_of(".eE") == std::string::npos) return IntegerOutOfRange();
    const size_t mantissa_end = std::min(token.find_first_of("eE"), token.size());
    const bool is_zero = token.find_first_of("123456789") >= mantissa_end;
    if (value == 0 && !is_zero)
      return Fail(absl::StrCat("number ", Printable(token), " is too small for a double"));
    JsonValue node;
    node.kind = JsonValue::Kind::kFloat;
    node.number = value;
    return Place(std::move(node)) != nullptr;
  }
  bool string(string_t& value) override {
    JsonValue node;
    node.kind = JsonValue::Kind::kString;
    node.string = std::move(value);
    return Place(std::move(node)) != nullptr;
  }
  bool binary(binary_t&) override { return Fail("binary value"); }
  bool start_object(size_t) override { return Open(JsonValue::Kind::kObject); }
  bool start_array(size_t) override { return Open(JsonValue::Kind::kArray); }
  bool key(string_t& value) override {
    open_.back()->members.push_back({std::move(value), {}});
    return true;
  }
  bool end_object() override {
    std::vector<JsonMember>& members = open_.back()->members;
    std::sort(members.begin(), members.end(),
              [](const JsonMember& a, const JsonMember& b) { return a.key < b.key; });
    const auto twice =
        std::adjacent_find(members.begin(), members.end(),
                           [](const JsonMember& a, const JsonMember& b) { return a.key == b.key; });
    if (twice != members.end()) {
      const std::string key = Printable(twice->key);
      const std::string parent = ContainerPath();
      status = absl::InvalidArgumentError(
          absl::StrCat(origin_, ": ", parent, parent.empty() ? "" : ".", key, ": the key appears twice"));
      return false;
    }
    open_.pop_back();
    return true;
  }
  bool end_array() override {
    open_.pop_back();
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& error) override {
    std::string text = error.what();
    if (const size_t bracket = text.find("] "); bracket != std::string::npos) text = text.substr(bracket + 2);
    text = text.substr(0, text.find("; last read"));  // raw bytes of the file
    return Fail(absl::StrCat("not valid JSON: ", text));
  }

 private:
  // Puts a value where the parser stands; null when a bound is exceeded.
  JsonValue* Place(JsonValue node) {
    if (++values_ > limits_.max_values) {
      Fail(absl::StrCat("more than ", limits_.max_values, " values"));
      return nullptr;
    }
    if (open_.empty()) {
      root = std::move(node);
      return &root;
    }
    JsonValue* parent = open_.back();
    if (parent->kind == JsonValue::Kind::kArray) {
      parent->elements.push_back(std::move(node));
      return &parent->elements.back();
    }
    parent->members.back().value = std::move(node);
    return &parent->members.back().value;
  }
  bool Open(JsonValue::Kind kind) {
    if (static_cast<int>(open_.size()) >= limits_.max_depth) {
      return Fail(absl::StrCat("nested deeper than ", limits_.max_depth, " levels"));
    }
    JsonValue node;
    node.kind = kind;
    JsonValue* placed = Place(std::move(node));
    if (placed == nullptr) return false;
    open_.push_back(placed);  // stays valid: nothing is added to its parent before it is closed
    return true;
  }
  bool IntegerOutOfRange() { return Fail("integer does not fit in 64 bits"); }
  bool Fail(const std::string& what) {
    const std::string path = Path();
    status = absl::InvalidArgumentError(absl::StrCat(origin_, ": ", path, path.empty() ? "" : ": ", what));
    return false;
  }
  // The path of the innermost open container.
  std::string ContainerPath() const {
    std::string path;
    for (size_t i = 0; i + 1 < open_.size(); ++i) {
      if (open_[i]->kind == JsonValue::Kind::kArray) {
        absl::StrAppend(&path, "[", open_[i]->elements.size() - 1, "]");
      } else {
        absl::StrAppend(&path, path.empty() ? "" : ".", Printable(open_[i]->members.back().key));
      }
    }
    return path;
  }
  // The path of the value that comes next.
  std::string Path() const {
    std::string path = ContainerPath();
    if (open_.empty()) return path;
    if (open_.back()->kind == JsonValue::Kind::kArray) {
      absl::StrAppend(&path, "[", open_.back()->elements.size(), "]");
    } else if (!open_.back()->members.empty()) {
      absl::StrAppend(&path, path.empty() ? "" : ".", Printable(open_.back()->members.back().key));
    }
    return path;
  }

  std::string origin_;
  JsonLimits limits_;
  std::vector<JsonValue*> open_;
  int64_t values_ = 0;
};

}  // namespace

const JsonValue* JsonValue::Find(std::string_view key) const {
  const auto found =
      std::lower_bound(members.begin(), members.end(), key,
                       [](const JsonMember& member, std::string_view k) { return member.key < k; });
  return found != members.end() && found->key == key ? &found->value : nullptr;
}

const char* Name(JsonValue::Kind kind) {
  switch (kind) {
    case JsonValue::Kind::kNull:
      return "null";
    case JsonValue::Kind::kBool:
      return "a boolean";
    case JsonValue::Kind::kInt:
      return "an integer";
    case JsonValue::Kind::kFloat:
      return "a number with a fraction or an exponent";
    case JsonValue::Kind::kString:
      return "a string";
    case JsonValue::Kind::kArray:
      return "a list";
    case JsonValue::Kind::kObject:
      return "an object";
  }
  return "?";
}

absl::StatusOr<JsonValue> ParseJson(std::string_view text, std::string_view origin,
                                    const JsonLimits& limits) {
  const std::string name(origin);
  if (static_cast<int64_t>(text.size()) > limits.max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": ", text.size(), " bytes of JSON; at most ", limits.max_bytes, " are accepted"));
  }
  // The library takes a zero byte for the end of its input and would ignore what follows.
  if (const size_t zero = text.find('\0'); zero != std::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": not valid JSON: a zero byte at offset ", zero));
  }
  TreeBuilder builder(origin, limits);
  bool parsed = false;
  try {
    parsed = nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": not valid JSON: ", error.what()));
  }
  DFLASH_RETURN_IF_ERROR(builder.status);
  if (!parsed) return absl::InvalidArgumentError(absl::StrCat(name, ": not valid JSON"));
  return std::move(builder.root);
}

std::string Printable(std::string_view text) {
  constexpr size_t kLongest = 96;
  const std::string escaped = absl::Utf8SafeCEscape(absl::string_view(text.data(), text.size()));
  if (escaped.size() <= kLongest) return escaped;
  size_t cut = kLongest;
  while (cut > 0 && (static_cast<unsigned char>(escaped[cut]) & 0xc0) == 0x80)
    --cut;  // not inside a character
  return escaped.substr(0, cut) + "...";
}

}  // namespace dflash
