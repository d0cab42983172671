// Golden bundles of a pair, tensors included.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "tools/doctor/doctor.h"

namespace dflash::doctor {

// Runs the serving path over `prompts` (kind, prompt_ids, chat and text are read) and writes what it computes
// as a golden bundle, tensors of the first `tensor_prompts` prompts. One rank.
absl::Status RecordBundle(const DoctorOptions& options, const std::string& folder, int64_t tensor_prompts,
                          int64_t max_tokens);

}  // namespace dflash::doctor
