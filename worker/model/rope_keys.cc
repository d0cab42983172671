#include "worker/model/rope_keys.h"

#include <optional>
#include <utility>

#include "base/status.h"
#include "worker/model/config_options.h"

namespace dflash {

absl::StatusOr<RopeKeys> RopeKeys::Open(const JsonObject& object) {
  RopeKeys keys(object);
  for (const char* name : {"rope_parameters", "rope_scaling"}) {
    DFLASH_ASSIGN_OR_RETURN(const std::optional<JsonObject> nested, object.Find<JsonObject>(name));
    if (nested.has_value()) keys.nested_.push_back(*nested);
  }
  return keys;
}

std::vector<KeyPlace> RopeKeys::Places(const std::string& key) const {
  std::vector<KeyPlace> places;
  for (const JsonObject& nested : nested_) places.push_back({nested, key});
  places.push_back({flat_, key});
  return places;
}

absl::StatusOr<double> RopeKeys::RequireTheta() const {
  DFLASH_ASSIGN_OR_RETURN(const Placed<double> theta, RequireAgreeing<double>(Places("rope_theta")));
  if (!(theta.value > 1 && theta.value <= kMaxRopeTheta)) {
    return theta.place.Error(absl::StrCat(theta.value, " is outside (1, ", kMaxRopeTheta, "]"));
  }
  return theta.value;
}

absl::Status RopeKeys::CheckType(bool required) const {
  std::vector<KeyPlace> places = Places("rope_type");
  for (const JsonObject& nested : nested_) places.push_back({nested, "type"});
  DFLASH_ASSIGN_OR_RETURN(const auto type, FindAgreeing<std::string>(places));
  if (type.has_value() && type->value != "default") {
    return type->place.object.Unimplemented(
        type->place.key,
        absl::StrCat("rotary kind \"", Printable(type->value), "\"; only \"default\" is built"));
  }
  if (!type.has_value() && required) return RequireAgreeing<std::string>(Places("rope_type")).status();
  return absl::OkStatus();
}

}  // namespace dflash
