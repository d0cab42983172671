// Included by causal_conv_cpu_{scalar,avx2,avx512}.cc.
#pragma once

#include <cstdint>

#include "kernels/causal_conv/causal_conv_cpu.h"
#include "kernels/device/cpu/simd.h"
#include "kernels/elementary/elementary.h"

namespace dflash {
namespace DFLASH_SIMD_NAMESPACE {
namespace {

// Weights of tap j for the `lanes` channels from c on.
DFLASH_SIMD_INLINE F32x16 TapWeights(const ConvTask& task, int64_t c, int64_t j, int lanes) {
  if (task.w_is_bf16) {
    const bf16* w = static_cast<const bf16*>(task.w) + c * task.w_stride + j;
    uint32_t words[kLanes] = {};
    for (int i = 0; i < lanes; ++i) words[i] = static_cast<uint32_t>(w[i * task.w_stride].bits) << 16;
    float values[kLanes];
    __builtin_memcpy(values, words, sizeof(values));
    return Load(values);
  }
  const float* w = static_cast<const float*>(task.w) + c * task.w_stride + j;
  float values[kLanes];
  for (int i = 0; i < lanes; ++i) values[i] = w[i * task.w_stride];
  return LoadPartial(values, lanes);
}

DFLASH_SIMD_INLINE F32x16 LoadUpTo(const float* p, int lanes) {
  return lanes == kLanes ? Load(p) : LoadPartial(p, lanes);
}
DFLASH_SIMD_INLINE void StoreUpTo(float* p, F32x16 value, int lanes) {
  lanes == kLanes ? Store(p, value) : StorePartial(p, value, lanes);
}

// Four taps: weights and the last three inputs stay in registers.
DFLASH_SIMD_INLINE void ConvolveFourTaps(const ConvTask& task, int64_t c, int lanes) {
  const F32x16 w0 = TapWeights(task, c, 0, lanes), w1 = TapWeights(task, c, 1, lanes),
               w2 = TapWeights(task, c, 2, lanes), w3 = TapWeights(task, c, 3, lanes);
  F32x16 x0 = LoadUpTo(task.past + c, lanes), x1 = LoadUpTo(task.past + task.past_stride + c, lanes),
         x2 = LoadUpTo(task.past + 2 * task.past_stride + c, lanes);
  for (int64_t t = 0; t < task.rows; ++t) {
    const F32x16 x3 = LoadUpTo(task.x + t * task.x_stride + c, lanes);
    const F32x16 sum = Fma(w3, x3, Fma(w2, x2, Fma(w1, x1, Fma(w0, x0, F32x16::Broadcast(0)))));
    StoreUpTo(task.y + t * task.y_stride + c, Silu(sum), lanes);
    x0 = x1;
    x1 = x2;
    x2 = x3;
  }
}

// Any number of taps, one after the other; y holds the sums meanwhile.
DFLASH_SIMD_INLINE void ConvolveTaps(const ConvTask& task, int64_t c, int lanes) {
  for (int64_t j = 0; j < task.taps; ++j) {
    const F32x16 w = TapWeights(task, c, j, lanes);
    const bool is_last = j == task.taps - 1;
    for (int64_t t = 0; t < task.rows; ++t) {
      const int64_t row = t + j - (task.taps - 1);
      const float* in = row < 0 ? task.past + (t + j) * task.past_stride : task.x + row * task.x_stride;
      float* y = task.y + t * task.y_stride + c;
      const F32x16 before = j == 0 ? F32x16::Broadcast(0) : LoadUpTo(y, lanes);
      const F32x16 sum = Fma(w, LoadUpTo(in + c, lanes), before);
      StoreUpTo(y, is_last ? Silu(sum) : sum, lanes);
    }
  }
}

}  // namespace
}  // namespace DFLASH_SIMD_NAMESPACE

void DFLASH_SIMD_NAME(ConvolveRows)(const ConvTask& task) {
  using namespace DFLASH_SIMD_NAMESPACE;  // NOLINT: the lanes of this file's instruction set
  for (int64_t c = 0; c < task.channels; c += kLanes) {
    const int lanes = task.channels - c < kLanes ? static_cast<int>(task.channels - c) : kLanes;
    task.taps == 4 ? ConvolveFourTaps(task, c, lanes) : ConvolveTaps(task, c, lanes);
  }
}

}  // namespace dflash
