// The inner loop of the CPU backend's convolution. One function per instruction set, all with the same bits.
#pragma once

#include <cstdint>

#include "base/matrix_view.h"
#include "kernels/batch/segments.h"
#include "kernels/causal_conv/causal_conv.h"

namespace dflash {

// Some rows over neighbouring channels: y[t, c] = silu(sum_j w[c, j] in[t + j, c]), j in [0, taps) ascending,
// where in = the taps - 1 rows of the past, then x.
struct ConvTask {
  const void* w = nullptr;  // [channels, taps], rows w_stride apart; bf16 or f32
  bool w_is_bf16 = false;
  int64_t w_stride = 0;
  int64_t taps = 0;
  const float* past = nullptr;  // [taps - 1, channels], rows past_stride apart
  int64_t past_stride = 0;
  const float* x = nullptr;  // [rows, channels]
  int64_t x_stride = 0;
  int64_t rows = 0;
  int64_t channels = 0;
  float* y = nullptr;  // [rows, channels]
  int64_t y_stride = 0;
};
using ConvolveRows = void(const ConvTask& task);
ConvolveRows ConvolveRowsScalar, ConvolveRowsAvx2, ConvolveRowsAvx512;
ConvolveRows& CurrentConvolveRows();

// The task of `channels` channels from `first_channel` on for a segment's rows; y is left to the caller.
ConvTask ConvTaskOf(const ConstMatrixView& x, const ConstMatrixView& w, const Segment& segment,
                    const ConvState& state, int64_t first_channel, int64_t channels);

}  // namespace dflash
