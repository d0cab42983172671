// Whether the weights are those that a golden bundle was recorded with.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tools/doctor/report.h"

namespace dflash::doctor {

// One model's fingerprints (Checkpoint::fingerprints) against the recorded ones.
struct WeightsComparison {
  std::vector<std::string> different;  // names
  int64_t compared = 0;
  int64_t uncompared = 0;  // tensors that only the model, or only the bundle, has

  // All tensors are compared, or one of them differs; else it stays unknown.
  Weights outcome() const;
};
WeightsComparison CompareWeights(const std::map<std::string, std::string>& own,
                                 const std::map<std::string, std::string>& recorded);

// The finding "revisions", and what the report knows of the weights from now on.
void JudgeRevisions(const WeightsComparison& target, const WeightsComparison& drafter, Report* report);

}  // namespace dflash::doctor
