// Every operation but the linear ones, at the shapes of a pair of models.
#pragma once

#include <cstdint>

#include "kernels/device/stream.h"
#include "tools/dflash_bench/report.h"
#include "worker/model/draft_config.h"
#include "worker/model/target_config.h"

namespace dflash::bench {

// One call of each for a sequence of `context` committed tokens: 1 row, a block of rows, and 64 prompt rows
// where the arithmetic of prompts differs.
void MeasureOperations(const TargetConfig& target, const DraftConfig* draft, int64_t context, int64_t block,
                       int repeats, const Stream& stream, Report& report);

}  // namespace dflash::bench
