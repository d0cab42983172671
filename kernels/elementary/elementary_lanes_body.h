// Included once per instruction set.
#pragma once

#include "kernels/device/cpu/simd.h"
#include "kernels/elementary/elementary.h"
#include "kernels/elementary/elementary_lanes.h"

namespace dflash {
namespace DFLASH_SIMD_NAMESPACE {

#define DFLASH_LANES_FUNCTION(Name, function)                                        \
  static void Name(const float* x, float* y, int64_t count) {                        \
    for (int64_t i = 0; i < count; i += kLanes) Store(y + i, function(Load(x + i))); \
  }
DFLASH_LANES_FUNCTION(RunExp, Exp)
DFLASH_LANES_FUNCTION(RunLog, Log)
DFLASH_LANES_FUNCTION(RunLog1p, Log1p)
DFLASH_LANES_FUNCTION(RunSigmoid, Sigmoid)
DFLASH_LANES_FUNCTION(RunSilu, Silu)
DFLASH_LANES_FUNCTION(RunSoftplus, Softplus)
#undef DFLASH_LANES_FUNCTION

inline constexpr ElementaryLanes kTable = {RunExp, RunLog, RunLog1p, RunSigmoid, RunSilu, RunSoftplus};

}  // namespace DFLASH_SIMD_NAMESPACE

const ElementaryLanes DFLASH_SIMD_NAME(kElementaryLanes) = DFLASH_SIMD_NAMESPACE::kTable;

}  // namespace dflash
