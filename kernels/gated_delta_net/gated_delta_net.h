// Gated DeltaNet: the recurrence of the target's linear-attention layers, with delta records.
// Sources: docs/spec/qwen3_5.md "GDN mixer", "Chunked form", "Delta records".
//
// Per value head j, with key head j / (value_heads / key_heads), state S [key_dim, value_dim] in float32:
//   q = l2norm(q) / sqrt(key_dim), k = l2norm(k)        l2norm(x) = x / sqrt(sum x^2 + 1e-6)
//   beta = sigmoid(b),  g = -exp(a_log) * softplus(a + dt_bias)
//   c = beta (v - e^g S'k),  o = e^g S'q + (k . q) c,  S <- e^g S + k c'        (S' = transpose of S before
//   the token)
// A delta record is (k, c, g) of one row: what is needed to replay the row's change of S. Verification never
// changes S: it writes records; the accepted ones are folded into S by the next verification of the sequence.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/batch/segments.h"
#include "kernels/causal_conv/causal_conv.h"
#include "kernels/device/stream.h"
#include "kernels/rms_norm/rms_norm.h"

namespace dflash {

struct GatedDeltaNetShape {
  int64_t key_heads = 0;
  int64_t value_heads = 0;  // a multiple of key_heads
  int64_t key_dim = 0;
  int64_t value_dim = 0;

  int64_t QkvCols() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
  int64_t StateFloats() const { return value_heads * key_dim * value_dim; }
  // k of every key head (after l2norm), c of every value head, g of every value head; whole pieces of 16
  // bytes.
  int64_t RecordFloats() const {
    return (key_heads * key_dim + value_heads * value_dim + value_heads + 3) / 4 * 4;
  }
};

// Inputs of one layer for all rows of the step.
struct GatedDeltaNetInput {
  ConstMatrixView qkv;    // [T, QkvCols()], activation dtype, after convolution: q heads, k heads, v heads
  ConstMatrixView beta;   // [T, value_heads], activation dtype or f32: the logits b
  ConstMatrixView decay;  // [T, value_heads], activation dtype or f32: the logits a
  const float* a_log = nullptr;    // [value_heads], device memory
  const float* dt_bias = nullptr;  // [value_heads], device memory
};

// One layer's recurrent states and records, device memory, float32.
struct GatedDeltaNetState {
  float* states = nullptr;   // [slots, value_heads, key_dim, value_dim]
  float* records = nullptr;  // [slots, 2, max_rows, RecordFloats()], two buffers used in turn
  int64_t slots = 0;
  int64_t max_rows = 0;  // rows of the largest verify segment
};

// Which records are accepted but not yet folded, the same for all layers; int32 per slot, device memory.
struct PendingRecords {
  const int32_t* buffer = nullptr;  // 0 or 1: the buffer that holds them
  const int32_t* count = nullptr;   // [0, max_rows]
};

// VERIFY rows. For every segment: folds the slot's pending records into S (S <- e^g S + k c', row after row,
// written back), then runs the recurrence over the segment's rows from S without changing it, writes o and
// one record a row into the buffer that is not pending. One row or sixteen, any acceptance pattern: the same
// bits. o: activation dtype [T, value_heads * value_dim]. A slot may occur in one segment only. Errors:
// InvalidArgument when shapes disagree or a segment has more than max_rows rows (where that can be seen).
absl::Status GatedDeltaNetVerify(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                                 SegmentList segments, const PendingRecords& pending,
                                 const GatedDeltaNetState& state, MatrixView o, const Stream& stream);

// What stands around the recurrence in a layer.
struct GatedDeltaNetSurroundings {
  ConstMatrixView conv_weight;  // as of CausalConv, channels = QkvCols()
  ConvState conv_state;
  ConstMatrixView norm_weight;  // as of GatedRmsNorm, one group per value head
  ConstMatrixView z;
  GateActivation gate = GateActivation::kSilu;
  float eps = 0;
};

// VERIFY rows: CausalConv of input.qkv into `convolved`, GatedDeltaNetVerify of that, GatedRmsNorm of o in
// place. The bits are those of the three calls. convolved: activation dtype [T, QkvCols()], scratch: what it
// holds afterwards is not said. Errors: those of the three.
absl::Status GatedDeltaNetMixerVerify(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                                      const GatedDeltaNetSurroundings& around, SegmentList segments,
                                      const PendingRecords& pending, const GatedDeltaNetState& state,
                                      MatrixView convolved, MatrixView o, const Stream& stream);

// PREFILL rows: the closed chunk form on the absolute 64-token grid (a segment that starts or ends inside a
// grid cell is a shorter chunk), S advanced to the end of the segment. The slot must have no pending records.
// Equal to the recurrence up to float32 rounding; segment borders on the grid change no bit.
absl::Status GatedDeltaNetPrefill(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                                  SegmentList segments, const GatedDeltaNetState& state, MatrixView o,
                                  const Stream& stream);

// Folds the pending records of the listed slots (int32, device memory) into S, as GatedDeltaNetVerify would:
// before a checkpoint, preemption or transfer. The caller sets their counts to 0 afterwards.
absl::Status GatedDeltaNetFold(const GatedDeltaNetShape& shape, const int32_t* slots, int64_t slot_count,
                               const PendingRecords& pending, const GatedDeltaNetState& state,
                               const Stream& stream);

}  // namespace dflash
