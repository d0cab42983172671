// What only whole requests show: ranks, preemption, prefix, sampling, limits, metrics, calibration,
// end-to-end.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/ranks.h"

namespace dflash::doctor {

// Generates at most `max_prompts` prompts of the bundle, or parts of the long prompt where there is none.
// long_prompt: longer than every window and than one page and a half. After CheckLongContext, whose finding
// "prefix" is completed. Errors: InvalidArgument when no prompt of the bundle fits into the context; those of
// the engine.
absl::Status CheckEngine(const Subject& subject, Ranks& ranks, const std::vector<int32_t>& long_prompt,
                         int64_t max_prompts);

}  // namespace dflash::doctor
