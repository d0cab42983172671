// Included by causal_conv_cpu_{scalar,avx2,avx512}.cc.
#pragma once

#include <cstdint>

#include "kernels/causal_conv/causal_conv_cpu.h"
#include "kernels/device/cpu/simd.h"
#include "kernels/elementary/elementary.h"

namespace dflash {

void DFLASH_SIMD_NAME(ConvolveRow)(const float* w, const float* const* inputs, int64_t taps, int64_t channels,
                                   float* y) {
  using namespace DFLASH_SIMD_NAMESPACE;  // NOLINT: the lanes of this file's instruction set
  int64_t c = 0;
  for (; c + kLanes <= channels; c += kLanes) {
    F32x16 sum = F32x16::Broadcast(0);
    for (int64_t j = 0; j < taps; ++j) sum = Fma(Load(w + j * channels + c), Load(inputs[j] + c), sum);
    Store(y + c, Silu(sum));
  }
  if (c < channels) {
    const int n = static_cast<int>(channels - c);
    F32x16 sum = F32x16::Broadcast(0);
    for (int64_t j = 0; j < taps; ++j) {
      sum = Fma(LoadPartial(w + j * channels + c, n), LoadPartial(inputs[j] + c, n), sum);
    }
    StorePartial(y + c, Silu(sum), n);
  }
}

}  // namespace dflash
