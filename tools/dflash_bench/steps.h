// Whole steps of the engine: a plain step, and a round of draft, verification, sampling and commit.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "kernels/device/stream.h"
#include "tools/dflash_bench/report.h"
#include "worker/load_group.h"

namespace dflash::bench {

struct StepOptions {
  GroupOptions group;
  std::string message;  // of the user; its answer is generated again and again, greedily
  int64_t max_tokens = 128;
  int passes = 5;  // answers without and with speculation, in turn
};

// Adds the medians of all parts, and the ratio of a round to the sgemm time of its linear layers.
// Errors: those of LoadGroup, of the chat template and of the engine; NotFound when no step was a whole
// round.
absl::Status MeasureSteps(const StepOptions& options, const TargetConfig& target, const DraftConfig* draft,
                          Report& report);

}  // namespace dflash::bench
