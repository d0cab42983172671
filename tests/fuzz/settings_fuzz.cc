// Configuration files. Whatever the bytes: an answer, errors with the file's name, and entries that make the
// same entries again when written as YAML.
#include <cstdint>
#include <string>
#include <string_view>

#include "base/check.h"
#include "daemon/config/config_file.h"
#include "nlohmann/json.hpp"

namespace dflash {
namespace {

void Run(std::string_view text) {
  const absl::StatusOr<std::vector<ConfigEntry>> entries = ParseConfig(text, "input");
  if (!entries.ok()) {
    DFLASH_CHECK(entries.status().code() == absl::StatusCode::kInvalidArgument &&
                     entries.status().message().substr(0, 5) == "input",
                 entries.status().ToString().c_str());
    return;
  }
  std::string again;
  for (const ConfigEntry& entry : *entries) {
    if (entry.key == "end-of-the-file")
      return;  // the one key that is taken in YAML, where ParseConfig puts it
    // A JSON string is a YAML string, unless control characters were escaped; those do not come through.
    again += nlohmann::json(entry.key).dump() + ": " + nlohmann::json(entry.value).dump() + "\n";
  }
  if (static_cast<int64_t>(again.size()) > kMaxConfigBytes || again.empty()) return;
  const absl::StatusOr<std::vector<ConfigEntry>> second = ParseConfig(again, "input");
  DFLASH_CHECK(second.ok(), second.status().ToString().c_str());
  DFLASH_CHECK(second->size() == entries->size());
  for (size_t i = 0; i < entries->size(); ++i) {
    DFLASH_CHECK((*second)[i].key == (*entries)[i].key && (*second)[i].value == (*entries)[i].value,
                 (*entries)[i].key.c_str());
  }
}

}  // namespace
}  // namespace dflash

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  dflash::Run({reinterpret_cast<const char*>(data), size});
  return 0;
}
