// Causal depthwise convolution of Gated DeltaNet. Source: docs/spec/qwen3_5.md "GDN mixer", step 1.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/batch/segments.h"
#include "kernels/device/stream.h"

namespace dflash {

// The last `taps - 1` inputs of every slot, oldest first: activation dtype [slots, taps - 1, channels],
// device memory. Zero for a fresh sequence.
struct ConvState {
  void* data = nullptr;
  int64_t slots = 0;
  int64_t taps = 0;  // kernel width, e.g. 4
  int64_t channels = 0;

  int64_t Bytes() const;  // of the whole state
};

// For every row of every segment: y[t, c] = silu(sum_{j < taps} w[c, j] x[t - (taps - 1) + j, c]), where rows
// before the segment come from the slot's state. j ascending, float32. The state is not changed. x, y:
// activation dtype [T, channels]; w: bf16 or f32 [channels, taps]. No aliasing. Errors: InvalidArgument when
// shapes disagree.
absl::Status CausalConv(ConstMatrixView x, ConstMatrixView w, SegmentList segments, const ConvState& state,
                        MatrixView y, const Stream& stream);

// Commits the first row_counts[i] rows of segment i (all when null): the state becomes the last taps - 1
// inputs of (old state, those rows).
absl::Status AdvanceConvState(ConstMatrixView x, SegmentList segments, const int32_t* row_counts,
                              const ConvState& state, const Stream& stream);

// The same for all layers of a verification at once, which have the same rows and shapes of states.
struct ConvCommit {
  ConstMatrixView x;
  ConvState state;
};
absl::Status AdvanceConvStates(const std::vector<ConvCommit>& layers, SegmentList segments,
                               const int32_t* row_counts, const Stream& stream);

}  // namespace dflash
