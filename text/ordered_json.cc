#include "text/ordered_json.h"

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"

namespace dflash {
namespace {

using Json = nlohmann::ordered_json;
// An ordered_map is a vector of its members; only its own functions look for keys.
using Members = Json::object_t::Container;

Members& MembersOf(Json& object) { return object.get_ref<Json::object_t&>(); }

// Builds a document and stops at the first thing that is out of bounds.
class Builder : public nlohmann::json_sax<Json> {
 public:
  explicit Builder(const OrderedJsonLimits& limits) : limits_(limits) {}

  Json TakeResult() { return std::move(root_); }
  const std::string& error() const { return error_; }

  bool null() override { return Add(nullptr); }
  bool boolean(bool value) override { return Add(value); }
  bool number_integer(number_integer_t value) override { return Add(value); }
  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<number_unsigned_t>(INT64_MAX)) return Fail("an integer above 2^63 - 1");
    return Add(static_cast<int64_t>(value));
  }
  bool number_float(number_float_t value, const string_t& digits) override {
    if (digits.find_first_of(".eE") == std::string::npos) return Fail("an integer of more than 64 bits");
    return Add(value);
  }
  bool string(string_t& value) override { return Add(std::move(value)); }
  bool binary(binary_t&) override { return Fail("a binary value"); }
  bool start_object(size_t) override { return Open(Json::object()); }
  bool key(string_t& key) override {
    MembersOf(*open_.back()).emplace_back(std::move(key), nullptr);
    return true;
  }
  bool end_object() override {
    const std::optional<std::string> repeated = MergeRepeatedKeys(*open_.back());
    if (repeated.has_value() && !limits_.repeated_keys)
      return Fail(absl::StrCat("the key \"", *repeated, "\" twice"));
    open_.pop_back();
    return true;
  }
  bool start_array(size_t) override { return Open(Json::array()); }
  bool end_array() override {
    open_.pop_back();
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
    const std::string what = error.what();
    const size_t tag_end = what.find("] ");
    return Fail(absl::StrCat("not JSON (byte ", position,
                             "): ", tag_end == std::string::npos ? what : what.substr(tag_end + 2)));
  }

 private:
  bool Fail(std::string error) {
    error_ = std::move(error);
    return false;
  }

  // Puts a value where the document is: the root, the end of an array, or behind the last key of an object.
  Json* Place(Json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Json& container = *open_.back();
    if (container.is_array()) {
      container.push_back(std::move(value));
      return &container.back();
    }
    Json& slot = MembersOf(container).back().second;
    slot = std::move(value);
    return &slot;
  }
  bool Add(Json value) {
    Place(std::move(value));
    return true;
  }
  bool Open(Json container) {
    if (open_.size() == limits_.max_depth) return Fail(absl::StrCat("nests deeper than ", limits_.max_depth));
    open_.push_back(Place(std::move(container)));
    return true;
  }

  // Returns the first of them.
  static std::optional<std::string> MergeRepeatedKeys(Json& object) {
    Members& members = MembersOf(object);
    std::unordered_map<std::string_view, size_t> places;
    std::optional<std::string> repeated;
    for (size_t i = 0; i < members.size(); ++i) {
      if (!places.emplace(members[i].first, i).second && !repeated.has_value()) repeated = members[i].first;
    }
    if (!repeated.has_value()) return std::nullopt;
    for (auto& [key, value] : members) {
      Json& first = members[places[key]].second;
      if (&first != &value) first = std::move(value);
    }
    Members distinct;
    for (size_t i = 0; i < members.size(); ++i) {
      if (places[members[i].first] == i) {
        distinct.emplace_back(members[i].first, std::move(members[i].second));
      }
    }
    members.swap(distinct);
    return repeated;
  }

  const OrderedJsonLimits& limits_;
  Json root_;
  std::vector<Json*> open_;  // containers not yet closed, each the last value of the one before
  std::string error_;
};

}  // namespace

absl::StatusOr<Json> ParseOrderedJson(std::string_view text, std::string_view origin,
                                      const OrderedJsonLimits& limits) {
  const std::string where(origin);
  if (text.size() > limits.max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": ", text.size(), " bytes of JSON, at most ", limits.max_bytes, " are allowed"));
  }
  Builder builder(limits);
  if (!Json::sax_parse(text, &builder)) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": ", builder.error()));
  }
  return builder.TakeResult();
}

}  // namespace dflash
