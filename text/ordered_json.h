// JSON text from clients (tools, arguments of calls) with the order of its keys kept, as templates print it.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "absl/status/statusor.h"

namespace dflash {

struct OrderedJsonLimits {
  size_t max_bytes = size_t{4} << 20;
  size_t max_depth = 128;  // nested arrays and objects
  bool repeated_keys = true;
};

// Parses one JSON document (RFC 8259) in time linear in its size: ordered_json::parse compares each key with
// all before it, which takes minutes for a megabyte of keys. Of a key that occurs twice the last value
// counts, at the place of the first, as in Python, unless the limits do without. Errors are InvalidArgument
// and start with `origin`: not JSON or not UTF-8, a bound exceeded, an integer outside int64 or a float
// outside double (their digits could not be printed again).
absl::StatusOr<nlohmann::ordered_json> ParseOrderedJson(std::string_view text, std::string_view origin,
                                                        const OrderedJsonLimits& limits = {});

}  // namespace dflash
