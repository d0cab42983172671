// The inner loop of the CPU backend's convolution. One function per instruction set, all with the same bits.
#pragma once

#include <cstdint>

namespace dflash {

// y[c] = silu(sum_j w[j channels + c] inputs[j][c]) for c in [0, channels), j in [0, taps) ascending.
using ConvolveRow = void(const float* w, const float* const* inputs, int64_t taps, int64_t channels,
                         float* y);
ConvolveRow ConvolveRowScalar, ConvolveRowAvx2, ConvolveRowAvx512;

}  // namespace dflash
