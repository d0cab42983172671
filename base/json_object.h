// Strict reading of configuration objects. Every getter records the key that it read; CheckAllKeysRead then
// fails for every key that nobody asked for, so that a key which defines the model cannot be lost in silence.
// There are no defaults here: a caller that wants one has to write it down.
//
// Rules of all getters: null counts as absent; an integer must be written as one (1.0 is refused), an integer
// is a legal float when a double holds it exactly; every error is InvalidArgument and names the file and the
// key's full path.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/json_value.h"

namespace dflash {

// A handle on one object of a parsed file: cheap to copy, copies share the file and the record of what was
// read. Not thread-safe.
class JsonObject {
 public:
  // `origin` is what messages call the file.
  static absl::StatusOr<JsonObject> Parse(std::string_view text, std::string_view origin,
                                          const JsonLimits& limits = {});

  // The key's value, nullopt when it is absent or null. T is one of int64_t, double, bool, std::string,
  // std::vector<int64_t>, std::vector<std::string>, JsonObject; other types than T are an error.
  template <typename T>
  absl::StatusOr<std::optional<T>> Find(const std::string& key) const;
  // As Find, but absence is an error too (see Missing).
  template <typename T>
  absl::StatusOr<T> Require(const std::string& key) const;
  // Require / Find and a bound: lowest <= value <= highest.
  absl::StatusOr<int64_t> RequireInt(const std::string& key, int64_t lowest, int64_t highest) const;
  absl::StatusOr<std::optional<int64_t>> FindInt(const std::string& key, int64_t lowest,
                                                 int64_t highest) const;
  // Whether the key is there and not null, whatever its type. Records the key as read.
  bool Has(const std::string& key) const;
  JsonValue::Kind KindOf(const std::string& key) const;  // kNull when absent; does not record

  // Fails for the first key, at any depth below this object, that no getter read and `informational` does not
  // list; proposes the nearest name that was asked for. Entries of `informational` are key paths ("a.b");
  // everything below an entry is accepted.
  absl::Status CheckAllKeysRead(const std::vector<std::string>& informational) const;
  // One message per such key.
  std::vector<std::string> UnreadKeys(const std::vector<std::string>& informational) const;
  // The paths of all keys that were asked for, present or not, relative to the file's outermost object. For
  // tests that compare code and documentation.
  std::set<std::string> AskedKeys() const;

  // InvalidArgument for an absent key, or several of which one has to be there. Mentions the key of the file
  // that probably misspells it or an absent key that was asked for earlier (such as the object that should
  // hold it).
  absl::Status Missing(const std::vector<std::string>& paths) const;
  // InvalidArgument / Unimplemented about a key of this object.
  absl::Status Error(const std::string& key, const std::string& what) const;
  absl::Status Unimplemented(const std::string& key, const std::string& what) const;

  const std::string& origin() const;
  std::string PathOf(const std::string& key) const;  // full key path

 private:
  struct File;
  JsonObject(std::shared_ptr<File> file, const JsonValue* node, std::string path)
      : file_(std::move(file)), node_(node), path_(std::move(path)) {}
  const JsonValue* Lookup(const std::string& key) const;
  template <typename T>
  absl::Status Convert(const JsonValue& value, const std::string& key, T* out) const;
  void CollectUnread(const std::set<const JsonValue*>& informational, const JsonValue& node,
                     const std::string& path, std::vector<std::string>* messages) const;

  std::shared_ptr<File> file_;
  const JsonValue* node_;
  std::string path_;  // empty for the outermost object
};

// A place where a key may stand.
struct KeyPlace {
  JsonObject object;
  std::string key;

  std::string Path() const { return object.PathOf(key); }
  absl::Status Error(const std::string& what) const { return object.Error(key, what); }
};

template <typename T>
struct Placed {
  T value;
  KeyPlace place;  // the first of the places where the value stands
};

// A key that exporters write at different places: reads all of them. nullopt when it stands nowhere;
// InvalidArgument, naming both places, when two of them disagree. T as in JsonObject::Find, without
// JsonObject.
template <typename T>
absl::StatusOr<std::optional<Placed<T>>> FindAgreeing(const std::vector<KeyPlace>& places);
// As FindAgreeing, but absence is an error that names the places.
template <typename T>
absl::StatusOr<Placed<T>> RequireAgreeing(const std::vector<KeyPlace>& places);

// The candidate that `name` most likely misspells, or "" when none is close.
std::string NearestName(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace dflash
