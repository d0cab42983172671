#include "base/json_object.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status.h"

namespace dflash {

struct Asked {
  std::string path;             // of the object
  std::set<std::string> names;  // of its keys
};

struct JsonObject::File {
  std::string origin;
  JsonValue root;
  std::set<const JsonValue*> read;          // values that a getter returned or looked at
  std::map<const JsonValue*, Asked> asked;  // what getters asked for, present or not
  std::set<std::string> asked_paths;
};

namespace {

// Edit distance with transpositions of neighbours; more than `limit` is reported as limit + 1.
size_t EditDistance(std::string_view a, std::string_view b, size_t limit) {
  if (a.size() > b.size() + limit || b.size() > a.size() + limit) return limit + 1;
  std::vector<size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1] ? 1 : 0)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before.swap(last);
    last.swap(row);
  }
  return std::min(last[b.size()], limit + 1);
}

std::string Join(const std::string& path, std::string_view key) {
  return absl::StrCat(path, path.empty() ? "" : ".", Printable(key));
}

std::string ToText(int64_t value) { return absl::StrCat(value); }
std::string ToText(double value) { return absl::StrCat(value); }
std::string ToText(bool value) { return value ? "true" : "false"; }
std::string ToText(const std::string& value) { return absl::StrCat("\"", Printable(value), "\""); }
std::string ToText(const std::vector<int64_t>& value) {
  return Printable(absl::StrCat("[", absl::StrJoin(value, ", "), "]"));
}

}  // namespace

absl::StatusOr<JsonObject> JsonObject::Parse(std::string_view text, std::string_view origin,
                                             const JsonLimits& limits) {
  auto file = std::make_shared<File>();
  file->origin = std::string(origin);
  DFLASH_ASSIGN_OR_RETURN(file->root, ParseJson(text, origin, limits));
  if (file->root.kind != JsonValue::Kind::kObject) {
    return absl::InvalidArgumentError(
        absl::StrCat(file->origin, ": expected an object, found ", Name(file->root.kind)));
  }
  const JsonValue* root = &file->root;
  return JsonObject(std::move(file), root, "");
}

const std::string& JsonObject::origin() const { return file_->origin; }
std::string JsonObject::PathOf(const std::string& key) const { return Join(path_, key); }

absl::Status JsonObject::Error(const std::string& key, const std::string& what) const {
  return absl::InvalidArgumentError(absl::StrCat(file_->origin, ": ", PathOf(key), ": ", what));
}

absl::Status JsonObject::Unimplemented(const std::string& key, const std::string& what) const {
  return absl::UnimplementedError(absl::StrCat(file_->origin, ": ", PathOf(key), ": ", what));
}

// Records the question; null when the key is absent or null.
const JsonValue* JsonObject::Lookup(const std::string& key) const {
  Asked& asked = file_->asked[node_];
  asked.path = path_;
  asked.names.insert(key);
  file_->asked_paths.insert(PathOf(key));
  const JsonValue* value = node_->Find(key);
  if (value == nullptr) return nullptr;
  file_->read.insert(value);
  return value->kind == JsonValue::Kind::kNull ? nullptr : value;
}

bool JsonObject::Has(const std::string& key) const { return Lookup(key) != nullptr; }

JsonValue::Kind JsonObject::KindOf(const std::string& key) const {
  const JsonValue* value = node_->Find(key);
  return value == nullptr ? JsonValue::Kind::kNull : value->kind;
}

template <typename T>
absl::Status JsonObject::Convert(const JsonValue& value, const std::string& key, T* out) const {
  using Kind = JsonValue::Kind;
  const auto mismatch = [&](const char* expected) {
    return Error(key, absl::StrCat("expected ", expected, ", found ", Name(value.kind)));
  };
  if constexpr (std::is_same_v<T, int64_t>) {
    if (value.kind != Kind::kInt) return mismatch("an integer");
    *out = value.integer;
  } else if constexpr (std::is_same_v<T, double>) {
    constexpr int64_t kExact = int64_t{1} << 53;
    if (value.kind == Kind::kFloat) {
      *out = value.number;
    } else if (value.kind != Kind::kInt) {
      return mismatch("a number");
    } else if (value.integer < -kExact || value.integer > kExact) {
      return Error(key, absl::StrCat(value.integer, " has no exact double"));
    } else {
      *out = static_cast<double>(value.integer);
    }
  } else if constexpr (std::is_same_v<T, bool>) {
    if (value.kind != Kind::kBool) return mismatch("a boolean");
    *out = value.boolean;
  } else if constexpr (std::is_same_v<T, std::string>) {
    if (value.kind != Kind::kString) return mismatch("a string");
    *out = value.string;
  } else {  // a list
    if (value.kind != Kind::kArray) return mismatch("a list");
    for (size_t i = 0; i < value.elements.size(); ++i) {
      typename T::value_type element{};
      DFLASH_RETURN_IF_ERROR(Convert(value.elements[i], absl::StrCat(key, "[", i, "]"), &element));
      out->push_back(std::move(element));
    }
  }
  return absl::OkStatus();
}

template <typename T>
absl::StatusOr<std::optional<T>> JsonObject::Find(const std::string& key) const {
  const JsonValue* value = Lookup(key);
  if (value == nullptr) return std::optional<T>();
  if constexpr (std::is_same_v<T, JsonObject>) {
    if (value->kind != JsonValue::Kind::kObject) {
      return Error(key, absl::StrCat("expected an object, found ", Name(value->kind)));
    }
    return std::optional<T>(JsonObject(file_, value, PathOf(key)));
  } else {
    T result{};
    DFLASH_RETURN_IF_ERROR(Convert(*value, key, &result));
    return std::optional<T>(std::move(result));
  }
}

template <typename T>
absl::StatusOr<T> JsonObject::Require(const std::string& key) const {
  DFLASH_ASSIGN_OR_RETURN(std::optional<T> value, Find<T>(key));
  if (value.has_value()) return *std::move(value);
  if (node_->Find(key) != nullptr) return Error(key, "is null, but has to be given");
  return Missing({PathOf(key)});
}

absl::StatusOr<std::optional<int64_t>> JsonObject::FindInt(const std::string& key, int64_t lowest,
                                                           int64_t highest) const {
  DFLASH_ASSIGN_OR_RETURN(const std::optional<int64_t> value, Find<int64_t>(key));
  if (value.has_value() && (*value < lowest || *value > highest)) {
    return Error(key, absl::StrCat(*value, " is outside [", lowest, ", ", highest, "]"));
  }
  return value;
}

absl::StatusOr<int64_t> JsonObject::RequireInt(const std::string& key, int64_t lowest,
                                               int64_t highest) const {
  DFLASH_RETURN_IF_ERROR(Require<int64_t>(key).status());
  DFLASH_ASSIGN_OR_RETURN(const std::optional<int64_t> value, FindInt(key, lowest, highest));
  return *value;
}

absl::Status JsonObject::Missing(const std::vector<std::string>& paths) const {
  DFLASH_CHECK(!paths.empty());
  std::string text = absl::StrCat(file_->origin, ": missing key ", paths[0]);
  if (paths.size() > 1)
    absl::StrAppend(&text, " (or ", absl::StrJoin(paths.begin() + 1, paths.end(), ", or "), ")");
  for (const auto& [node, asked] : file_->asked) {
    std::vector<std::string> absent;
    for (const std::string& name : asked.names) {
      if (node->Find(name) == nullptr) absent.push_back(name);
    }
    for (const JsonMember& member : node->members) {
      if (file_->read.contains(&member.value)) continue;
      const std::string meant = NearestName(member.key, absent);
      if (meant.empty()) continue;
      return absl::InvalidArgumentError(absl::StrCat(text, "; there is ", Join(asked.path, member.key),
                                                     ": is ", Join(asked.path, meant), " meant?"));
    }
  }
  return absl::InvalidArgumentError(text);
}

std::vector<std::string> JsonObject::UnreadKeys(const std::vector<std::string>& informational) const {
  std::set<const JsonValue*> accepted;
  for (const std::string& path : informational) {
    const JsonValue* node = node_;
    size_t start = 0;
    while (node != nullptr) {
      const size_t dot = path.find('.', start);
      const std::string key = path.substr(start, dot - start);
      if (dot == std::string::npos) file_->asked[node].names.insert(key);
      node = node->kind == JsonValue::Kind::kObject ? node->Find(key) : nullptr;
      if (dot == std::string::npos) break;
      start = dot + 1;
    }
    file_->asked_paths.insert(path_.empty() ? path : absl::StrCat(path_, ".", path));
    if (node != nullptr) accepted.insert(node);
  }
  std::vector<std::string> messages;
  CollectUnread(accepted, *node_, path_, &messages);
  return messages;
}

void JsonObject::CollectUnread(const std::set<const JsonValue*>& informational, const JsonValue& node,
                               const std::string& path, std::vector<std::string>* messages) const {
  for (const JsonMember& member : node.members) {
    if (informational.contains(&member.value)) continue;
    const std::string member_path = Join(path, member.key);
    if (file_->read.contains(&member.value)) {
      CollectUnread(informational, member.value, member_path, messages);
      continue;
    }
    std::vector<std::string> absent;  // asked for, but not there: candidates for what was meant
    for (const std::string& name : file_->asked[&node].names) {
      if (node.Find(name) == nullptr) absent.push_back(name);
    }
    const std::string nearest = NearestName(member.key, absent);
    messages->push_back(
        absl::StrCat(file_->origin, ": unlisted key ", member_path,
                     nearest.empty() ? "" : absl::StrCat(" (is ", Join(path, nearest), " meant?)")));
  }
}

absl::Status JsonObject::CheckAllKeysRead(const std::vector<std::string>& informational) const {
  const std::vector<std::string> unread = UnreadKeys(informational);
  if (unread.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      unread.size() == 1 ? unread[0] : absl::StrCat(unread[0], " (and ", unread.size() - 1, " more)"));
}

std::set<std::string> JsonObject::AskedKeys() const { return file_->asked_paths; }

template <typename T>
absl::StatusOr<std::optional<Placed<T>>> FindAgreeing(const std::vector<KeyPlace>& places) {
  std::optional<Placed<T>> first;
  for (const KeyPlace& place : places) {
    DFLASH_ASSIGN_OR_RETURN(std::optional<T> value, place.object.template Find<T>(place.key));
    if (!value.has_value()) continue;
    if (!first.has_value()) {
      first = Placed<T>{*std::move(value), place};
    } else if (*value != first->value) {
      return place.Error(absl::StrCat(ToText(*value), " contradicts ", first->place.Path(), ", which is ",
                                      ToText(first->value)));
    }
  }
  return first;
}

template <typename T>
absl::StatusOr<Placed<T>> RequireAgreeing(const std::vector<KeyPlace>& places) {
  DFLASH_CHECK(!places.empty());
  DFLASH_ASSIGN_OR_RETURN(std::optional<Placed<T>> found, FindAgreeing<T>(places));
  if (found.has_value()) return *std::move(found);
  std::vector<std::string> paths;
  for (const KeyPlace& place : places) paths.push_back(place.Path());
  return places[0].object.Missing(paths);
}

std::string NearestName(std::string_view name, const std::vector<std::string>& candidates) {
  constexpr size_t kLongest = 64;
  std::string nearest;
  if (name.size() > kLongest) return nearest;
  size_t best = std::min<size_t>(2, name.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const size_t distance = EditDistance(name, candidate, 2);
    if (distance < best) {
      best = distance;
      nearest = candidate;
    }
  }
  return nearest;
}

#define DFLASH_JSON_TYPE(T)                                                                \
  template absl::StatusOr<std::optional<T>> JsonObject::Find<T>(const std::string&) const; \
  template absl::StatusOr<T> JsonObject::Require<T>(const std::string&) const
DFLASH_JSON_TYPE(int64_t);
DFLASH_JSON_TYPE(double);
DFLASH_JSON_TYPE(bool);
DFLASH_JSON_TYPE(std::string);
DFLASH_JSON_TYPE(std::vector<int64_t>);
DFLASH_JSON_TYPE(std::vector<std::string>);
DFLASH_JSON_TYPE(JsonObject);
#undef DFLASH_JSON_TYPE
#define DFLASH_JSON_TYPE(T)                                                                        \
  template absl::StatusOr<std::optional<Placed<T>>> FindAgreeing<T>(const std::vector<KeyPlace>&); \
  template absl::StatusOr<Placed<T>> RequireAgreeing<T>(const std::vector<KeyPlace>&)
DFLASH_JSON_TYPE(int64_t);
DFLASH_JSON_TYPE(double);
DFLASH_JSON_TYPE(bool);
DFLASH_JSON_TYPE(std::string);
DFLASH_JSON_TYPE(std::vector<int64_t>);
#undef DFLASH_JSON_TYPE

}  // namespace dflash
