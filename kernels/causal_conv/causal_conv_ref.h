// Reference of the causal depthwise convolution over one sequence: inputs in one dense array, zeros before
// it. Acc = double is the oracle of every backend's test.
#pragma once

#include <cmath>
#include <cstdint>

namespace dflash {

// x, y: [T, channels]; w: [channels, taps], already widened to float.
template <typename Acc>
void CausalConvRef(const float* x, const float* w, int64_t T, int64_t channels, int64_t taps, Acc* y) {
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t c = 0; c < channels; ++c) {
      Acc sum = 0;
      for (int64_t j = 0; j < taps; ++j) {
        const int64_t row = t - (taps - 1) + j;
        if (row >= 0) sum += Acc(w[c * taps + j]) * Acc(x[row * channels + c]);
      }
      y[t * channels + c] = sum / (Acc(1) + std::exp(-sum));
    }
  }
}

}  // namespace dflash
