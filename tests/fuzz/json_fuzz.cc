// JSON of clients (tools, arguments of calls) and of files. nlohmann's own parser is the oracle: what ours
// accept, it accepts and reads alike.
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/json_object.h"
#include "base/json_value.h"
#include "text/ordered_json.h"

namespace dflash {
namespace {

using Json = nlohmann::ordered_json;

// Equal values; an integer and a float are different things, and -0.0 is not 0.0.
bool Same(const JsonValue& ours, const Json& theirs) {
  switch (ours.kind) {
    case JsonValue::Kind::kNull:
      return theirs.is_null();
    case JsonValue::Kind::kBool:
      return theirs.is_boolean() && theirs.get<bool>() == ours.boolean;
    case JsonValue::Kind::kInt:
      return theirs.is_number_integer() && theirs.get<int64_t>() == ours.integer;
    case JsonValue::Kind::kFloat:
      return theirs.is_number_float() && theirs.get<double>() == ours.number;
    case JsonValue::Kind::kString:
      return theirs.is_string() && theirs.get_ref<const std::string&>() == ours.string;
    case JsonValue::Kind::kArray: {
      if (!theirs.is_array() || theirs.size() != ours.elements.size()) return false;
      for (size_t i = 0; i < theirs.size(); ++i) {
        if (!Same(ours.elements[i], theirs[i])) return false;
      }
      return true;
    }
    case JsonValue::Kind::kObject: {
      if (!theirs.is_object() || theirs.size() != ours.members.size()) return false;
      for (const JsonMember& member : ours.members) {
        const auto it = theirs.find(member.key);
        if (it == theirs.end() || !Same(member.value, *it)) return false;
      }
      return true;
    }
  }
  return false;
}

void Run(std::string_view text) {
  // Theirs compares each key with all before it: only short texts are compared.
  const absl::StatusOr<Json> ordered = ParseOrderedJson(text, "input");
  const absl::StatusOr<JsonValue> value = ParseJson(text, "input");
  for (const absl::Status& status : {ordered.status(), value.status()}) {
    DFLASH_CHECK(status.ok() || status.code() == absl::StatusCode::kInvalidArgument,
                 status.ToString().c_str());
    DFLASH_CHECK(status.ok() || status.message().substr(0, 5) == "input", status.ToString().c_str());
  }
  if (text.size() > 4096) return;
  const Json theirs = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  DFLASH_CHECK(!ordered.ok() || !theirs.is_discarded());
  DFLASH_CHECK(!value.ok() || !theirs.is_discarded());
  if (value.ok()) {
    DFLASH_CHECK(Same(*value, theirs));
    // Stricter than the other in keys only (and in depth and number of values).
    DFLASH_CHECK(ordered.ok());
  }
  // Printing what was read gives something that reads the same.
  if (ordered.ok()) {
    const std::string printed = ordered->dump();
    const absl::StatusOr<Json> again = ParseOrderedJson(printed, "input");
    DFLASH_CHECK(again.ok() && again->dump() == printed);
    if (value.ok()) DFLASH_CHECK(theirs.dump() == printed);
  }
  (void)JsonObject::Parse(text, "input");
  (void)Printable(text);
}

}  // namespace
}  // namespace dflash

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  dflash::Run(std::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
