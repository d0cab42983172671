// Included once per instruction set.
#pragma once

#include "kernels/device/cpu/simd.h"
#include "kernels/rope/rope_cpu.h"

namespace dflash {
namespace DFLASH_SIMD_NAMESPACE {
namespace {

void Rotate(const float* cosines, const float* sines, int64_t half, int64_t heads, int64_t head_dim,
            float* x) {
  for (int64_t j = 0; j < half; j += kLanes) {
    const int lanes = half - j < kLanes ? static_cast<int>(half - j) : kLanes;
    const F32x16 c = LoadPartial(cosines + j, lanes), s = LoadPartial(sines + j, lanes);
    for (int64_t head = 0; head < heads; ++head) {
      float* low = x + head * head_dim + j;
      float* high = low + half;
      const F32x16 first = LoadPartial(low, lanes), second = LoadPartial(high, lanes);
      StorePartial(low, first * c - second * s, lanes);
      StorePartial(high, second * c + first * s, lanes);
    }
  }
}

}  // namespace
}  // namespace DFLASH_SIMD_NAMESPACE

const RopeKernels DFLASH_SIMD_NAME(kRope) = {DFLASH_SIMD_NAMESPACE::Rotate};

}  // namespace dflash
