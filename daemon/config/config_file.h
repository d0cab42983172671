// The configuration file of dflashd: YAML or JSON, one mapping from names to scalars. What the names mean is
// not known here (daemon/settings.h).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace dflash {

struct ConfigEntry {
  std::string key;
  std::string value;  // as written, without quotes
  std::string place;  // "FILE:LINE", or the file alone for JSON: what an error about the value names
};

// A file larger than this is no configuration.
inline constexpr int64_t kMaxConfigBytes = 256 << 10;

// Reads the text of a configuration file; text that begins with '{' is JSON, other text is YAML. An empty
// document has no entries. InvalidArgument, beginning with `origin`, for: more than kMaxConfigBytes; text
// that is not UTF-8, has control characters, or does not parse; several documents; a document that is no
// mapping; a key twice; a value that is no string, number or boolean (a list, a mapping, null, a tagged
// value).
absl::StatusOr<std::vector<ConfigEntry>> ParseConfig(std::string_view text, std::string_view origin);

}  // namespace dflash
