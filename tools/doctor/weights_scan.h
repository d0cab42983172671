// All weights, read once: whether they are numbers, and their digests.
#pragma once

#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "worker/model/checkpoint.h"

namespace dflash::doctor {

struct WeightsScan {
  // "fc.weight: 3 of 196608 elements are no finite numbers, the first in row 0, column 7" of the first such
  // tensor by name; empty: there is none. Whatever is computed from them says nothing.
  std::string no_numbers;
  std::map<std::string, std::string> digests;  // as Checkpoint::ReadDigests gives them; empty: not wanted
};
// Errors: those of Checkpoint::VisitAll.
absl::StatusOr<WeightsScan> ScanWeights(const Checkpoint& checkpoint, bool with_digests);

}  // namespace dflash::doctor
