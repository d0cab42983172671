// Included once per instruction set. The sum of squares has one order for all of them: element d belongs to
// partial sum d mod 64; the 64 sums are added as four vectors of 16, then over the lanes.
#pragma once

#include "kernels/device/cpu/simd.h"
#include "kernels/elementary/elementary.h"
#include "kernels/rms_norm/rms_norm_cpu.h"

namespace dflash {
namespace DFLASH_SIMD_NAMESPACE {
namespace {

DFLASH_SIMD_INLINE int LanesLeft(int64_t columns) {
  return columns < kLanes ? static_cast<int>(columns) : kLanes;
}
DFLASH_SIMD_INLINE F32x16 LoadUpTo(const float* p, int lanes) {
  return lanes == kLanes ? Load(p) : LoadPartial(p, lanes);
}
DFLASH_SIMD_INLINE void StoreUpTo(float* p, F32x16 value, int lanes) {
  lanes == kLanes ? Store(p, value) : StorePartial(p, value, lanes);
}

DFLASH_SIMD_INLINE F32x16 Factor(const NormGroup& group, int64_t d, int lanes) {
  F32x16 weight;
  if (group.weight_is_bf16) {
    const bf16* w = static_cast<const bf16*>(group.weight) + d;
    weight = lanes == kLanes ? LoadBf16(w) : LoadBf16Partial(w, lanes);
  } else {
    weight = LoadUpTo(static_cast<const float*>(group.weight) + d, lanes);
  }
  return F32x16::Broadcast(group.offset) + weight;
}

// 1 / sqrt(mean(x^2) + eps)
DFLASH_SIMD_INLINE F32x16 InverseRms(const NormGroup& group, const float* x) {
  F32x16 sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = F32x16::Broadcast(0.0f);
  int64_t d = 0;
  for (; d + 4 * kLanes <= group.dim; d += 4 * kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const F32x16 value = Load(x + d + i * kLanes);
      sums[i] = Fma(value, value, sums[i]);
    }
  }
  for (int i = 0; d < group.dim; ++i, d += kLanes) {
    const F32x16 value = LoadUpTo(x + d, LanesLeft(group.dim - d));
    sums[i] = Fma(value, value, sums[i]);
  }
  const float sum = ReduceAdd((sums[0] + sums[1]) + (sums[2] + sums[3]));
  return F32x16::Broadcast(1.0f / __builtin_sqrtf(sum / static_cast<float>(group.dim) + group.eps));
}

void Norm(const NormGroup& group, const float* x, NormGate gate, const float* z, float* y) {
  const F32x16 scale = InverseRms(group, x);
  for (int64_t d = 0; d < group.dim; d += kLanes) {
    const int lanes = LanesLeft(group.dim - d);
    F32x16 value = LoadUpTo(x + d, lanes) * scale * Factor(group, d, lanes);
    if (gate != NormGate::kNone) {
      const F32x16 logit = LoadUpTo(z + d, lanes);
      const F32x16 sigmoid = Sigmoid(logit);
      value = value * (gate == NormGate::kSilu ? logit * sigmoid : sigmoid);
    }
    StoreUpTo(y + d, value, lanes);
  }
}

void AddNorm(const NormGroup& group, float* residual, const float* delta, float* y) {
  for (int64_t d = 0; d < group.dim; d += kLanes) {
    const int lanes = LanesLeft(group.dim - d);
    StoreUpTo(residual + d, LoadUpTo(residual + d, lanes) + LoadUpTo(delta + d, lanes), lanes);
  }
  Norm(group, residual, NormGate::kNone, nullptr, y);
}

}  // namespace
}  // namespace DFLASH_SIMD_NAMESPACE

const RmsNormKernels DFLASH_SIMD_NAME(kRmsNorm) = {DFLASH_SIMD_NAMESPACE::Norm,
                                                   DFLASH_SIMD_NAMESPACE::AddNorm};

}  // namespace dflash
