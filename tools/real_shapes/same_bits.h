// Whether a row's bits depend on its company, at real sizes.
#pragma once

#include "absl/status/status.h"
#include "worker/load_group.h"

namespace dflash {

// Runs one prompt of `prompt` tokens in several slots, cut into different steps, then verifies the same block
// after it: alone, row by row, beside other sequences, in two parts, and in one step with another prompt.
// Prints one line a check; Internal when any logit of any row differs from those of the block that was
// verified alone. The group needs eight slots and prompt + 64 tokens in each.
absl::Status CompareCompany(Group& group, int64_t prompt);

}  // namespace dflash
