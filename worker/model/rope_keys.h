// The rotary keys of a configuration, which exporters write into `rope_parameters`, `rope_scaling` or beside
// the other keys. All places are read and have to agree.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/json_object.h"

namespace dflash {

class RopeKeys {
 public:
  // `object` holds the flat keys and perhaps the two nested objects.
  static absl::StatusOr<RopeKeys> Open(const JsonObject& object);

  // Where `key` may stand, nested places first.
  std::vector<KeyPlace> Places(const std::string& key) const;

  // In (1, 1e12].
  absl::StatusOr<double> RequireTheta() const;
  // Unimplemented, naming the kind, when `rope_type` (older exporters: `type`) is anything but "default"
  // (YaRN and the like change angles and scores); when `required`, InvalidArgument when it is absent.
  absl::Status CheckType(bool required) const;

 private:
  explicit RopeKeys(JsonObject object) : flat_(std::move(object)) {}
  std::vector<JsonObject> nested_;
  JsonObject flat_;
};

}  // namespace dflash
