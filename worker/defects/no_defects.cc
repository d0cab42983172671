#include "worker/defects/defects.h"

namespace dflash {
namespace {
absl::Status NotBuilt() {
  return absl::UnimplementedError("defect injection: only in builds of the preset `defects`");
}
}  // namespace

std::vector<std::string> DefectNames() { return {}; }
absl::Status PlantDefect(const std::string&, FeatureContract&) { return NotBuilt(); }
absl::StatusOr<std::unique_ptr<Drafter>> PlantDefect(const std::string&, const FeatureContract&,
                                                     std::unique_ptr<Drafter>, SequenceTable*,
                                                     const Stream&) {
  return NotBuilt();
}
absl::Status PlantDefect(const std::string&, std::optional<bool>&) { return NotBuilt(); }

}  // namespace dflash
