// JSON as data: a bounded, strict parser. Configurations are read through JsonObject (json_object.h), which
// knows which keys were used; this is for what has no fixed set of keys (tensor headers, weight maps).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace dflash {

struct JsonMember;

// One parsed value. Integer tokens and tokens with a fraction or an exponent are different kinds: 1 is
// kInt, 1.0 and 1e0 are kFloat.
struct JsonValue {
  enum class Kind : uint8_t { kNull, kBool, kInt, kFloat, kString, kArray, kObject };

  Kind kind = Kind::kNull;
  bool boolean = false;
  int64_t integer = 0;
  double number = 0;
  std::string string;               // UTF-8
  std::vector<JsonValue> elements;  // kArray
  std::vector<JsonMember> members;  // kObject, sorted by key, keys distinct

  // The member's value, or null. Only for kObject.
  const JsonValue* Find(std::string_view key) const;
};

struct JsonMember {
  std::string key;
  JsonValue value;
};

const char* Name(JsonValue::Kind kind);

// Bounds on what a file from outside may make us hold.
struct JsonLimits {
  int64_t max_bytes = int64_t{4} << 20;
  int max_depth = 16;            // nested arrays and objects
  int64_t max_values = 1 << 18;  // values of all kinds together
};

// Parses one JSON document. Errors are InvalidArgument and start with `origin` (a path): not JSON or not
// UTF-8 (with line and column), a key twice in one object, an integer outside int64, a float outside double
// (too large, or too small and not zero), a bound exceeded; where there is one, the key path is named.
absl::StatusOr<JsonValue> ParseJson(std::string_view text, std::string_view origin,
                                    const JsonLimits& limits = {});

// A key or string from outside as it may appear in a message: escaped and cut.
std::string Printable(std::string_view text);

}  // namespace dflash
