// What this machine can do right now, for the figures beside it.
#pragma once

#include <cstdint>

#include "kernels/device/stream.h"

namespace dflash::bench {

// Bytes per second of the stream's threads together, each reading its own part of `bytes` again and again:
// from whichever cache holds them, or from memory. Median of `repeats` passes.
double ReadRate(int64_t bytes, const Stream& stream, int repeats);

// Float32 operations per second (a fused multiply-add is two) of the stream's threads together.
double MultiplyAddRate(const Stream& stream, int repeats);

// Seconds that a parallel loop over nothing takes.
double LoopSeconds(const Stream& stream, int repeats);

}  // namespace dflash::bench
