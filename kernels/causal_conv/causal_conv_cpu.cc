#include "kernels/causal_conv/causal_conv_cpu.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include "base/status.h"
#include "kernels/batch/segments_cpu.h"
#include "kernels/causal_conv/causal_conv_backend.h"
#include "kernels/device/cpu/instruction_set.h"
#include "kernels/device/cpu/thread_pool.h"

namespace dflash {

ConvolveRows& CurrentConvolveRows() {
  return *ForCurrentInstructionSet(&ConvolveRowsScalar, &ConvolveRowsAvx2, &ConvolveRowsAvx512);
}

ConvTask ConvTaskOf(const ConstMatrixView& x, const ConstMatrixView& w, const Segment& segment,
                    const ConvState& state, int64_t first_channel, int64_t channels) {
  ConvTask task;
  task.w = static_cast<const char*>(w.data) + first_channel * w.row_stride * SizeOf(w.dtype);
  task.w_is_bf16 = w.dtype == DType::kBf16;
  task.w_stride = w.row_stride;
  task.taps = state.taps;
  task.past = static_cast<const float*>(state.data) + segment.slot * (state.taps - 1) * state.channels +
              first_channel;
  task.past_stride = state.channels;
  task.x = x.Row<float>(segment.first_row) + first_channel;
  task.x_stride = x.row_stride;
  task.rows = segment.row_count;
  task.channels = channels;
  return task;
}

namespace backend {

absl::Status CausalConv(ConstMatrixView x, ConstMatrixView w, SegmentList segments, const ConvState& state,
                        MatrixView y, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckSegments("CausalConv", segments, x.rows, state.slots));
  ConvolveRows& convolve = CurrentConvolveRows();
  ParallelFor(stream, state.channels, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < segments.count; ++i) {
      const Segment& segment = segments.data[i];
      if (segment.row_count == 0) continue;
      ConvTask task = ConvTaskOf(x, w, segment, state, begin, end - begin);
      task.y = y.Row<float>(segment.first_row) + begin;
      task.y_stride = y.row_stride;
      convolve(task);
    }
  });
  return absl::OkStatus();
}

namespace {

void Advance(ConstMatrixView x, SegmentList segments, const int32_t* row_counts, const ConvState& state) {
  const int64_t history = state.taps - 1;
  const auto row_bytes = static_cast<size_t>(state.channels * SizeOf(DType::kF32));
  for (int64_t i = 0; i < segments.count; ++i) {
    const Segment& segment = segments.data[i];
    const int64_t count = RowsOf(segments, row_counts, i);
    if (count == 0) continue;
    float* past = static_cast<float*>(state.data) + segment.slot * history * state.channels;
    for (int64_t j = 0; j < history; ++j) {  // ascending: what is read lies behind what is written
      const int64_t row = count + j - history;
      const float* from =
          row < 0 ? past + (count + j) * state.channels : x.Row<float>(segment.first_row + row);
      std::memcpy(past + j * state.channels, from, row_bytes);
    }
  }
}

}  // namespace

absl::Status AdvanceConvStates(const std::vector<ConvCommit>& layers, SegmentList segments,
                               const int32_t* row_counts, const Stream&) {
  DFLASH_RETURN_IF_ERROR(
      CheckSegments("AdvanceConvState", segments, layers[0].x.rows, layers[0].state.slots));
  DFLASH_RETURN_IF_ERROR(CheckRowCounts("AdvanceConvState", segments, row_counts));
  for (const ConvCommit& layer : layers) Advance(layer.x, segments, row_counts, layer.state);
  return absl::OkStatus();
}

}  // namespace backend
}  // namespace dflash
