// Weights that are no numbers: whatever is computed from them says nothing.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "worker/model/checkpoint.h"

namespace dflash::doctor {

// Reads all of a checkpoint. "fc.weight: 3 of 196608 elements are no finite numbers, the first in row 0,
// column 7" of the first such tensor by name; empty: there is none. Errors: those of Checkpoint::ReadInto.
absl::StatusOr<std::string> FindNoNumbers(const Checkpoint& checkpoint);

}  // namespace dflash::doctor
