// Whether the weights are those that a golden bundle was recorded with.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tools/doctor/report.h"

namespace dflash::doctor {

// What is known of one model's tensors, by canonical name.
struct TensorDigests {
  std::map<std::string, std::string> samples;  // Checkpoint::fingerprints
  std::map<std::string, std::string> whole;    // Checkpoint::ReadDigests
};

// One model's tensors against the recorded ones.
struct WeightsComparison {
  std::vector<std::string> different;  // names
  int64_t compared = 0;                // by samples, or by all bytes
  int64_t whole = 0;                   // of these, by all bytes
  int64_t uncompared = 0;              // tensors that only the model, or only the bundle, has

  // All tensors are compared, or one of them differs; else it stays unknown.
  Weights outcome() const;
};
WeightsComparison CompareWeights(const TensorDigests& own, const TensorDigests& recorded);

// The finding "revisions", and what the report knows of the weights from now on.
void JudgeRevisions(const WeightsComparison& target, const WeightsComparison& drafter, Report* report);

}  // namespace dflash::doctor
