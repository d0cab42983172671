// Rotary position embedding, half-split pairs ("NeoX"). Sources: docs/spec/qwen3_5.md "Partial RoPE",
// docs/spec/dflash.md "Positions".
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/batch/segments.h"
#include "kernels/device/stream.h"
#include "kernels/rms_norm/rms_norm.h"

namespace dflash {

struct RopeShape {
  int64_t head_dim = 0;
  int64_t rotary_dim = 0;  // even, <= head_dim; elements beyond it pass through
  double theta = 0;
};

// Rotates in place: for every row of a segment with absolute position p, every head, j in [0, rotary_dim /
// 2):
//   (x_j, x_{j + R/2}) <- (x_j c - x_{j + R/2} s, x_{j + R/2} c + x_j s),  c, s = cos, sin(p *
//   float32(theta^(-2 j / R)))
// The angle is a float32 product; its cosine and sine are rounded to float32 once.
// x: activation dtype [T, heads * head_dim], any row stride; rows outside every segment are untouched.
// Errors: InvalidArgument when x.cols is no multiple of head_dim or the shape is illegal.
absl::Status ApplyRope(MatrixView x, const RopeShape& shape, SegmentList segments, const Stream& stream);

// RmsNorm of every head of q and of k in place, then ApplyRope: the bits of the four calls. q_weight,
// k_weight: as of RmsNorm, one group per head. q may have no columns. What is enqueued after it may rely on
// everything enqueued before it (ContextWritten in kernels/attention/attention.h).
absl::Status NormAndRope(MatrixView q, ConstMatrixView q_weight, MatrixView k, ConstMatrixView k_weight,
                         NormWeight weight, float eps, const RopeShape& shape, SegmentList segments,
                         const Stream& stream);

}  // namespace dflash
