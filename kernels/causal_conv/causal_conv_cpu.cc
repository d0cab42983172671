#include "kernels/causal_conv/causal_conv_cpu.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include "base/status.h"
#include "kernels/batch/segments_cpu.h"
#include "kernels/causal_conv/causal_conv_backend.h"
#include "kernels/device/cpu/instruction_set.h"
#include "kernels/device/cpu/thread_pool.h"

namespace dflash::backend {
namespace {

// Transposes [channels, taps], rows `stride` apart, to [taps, channels].
template <typename T>
void WeightsByTap(const T* w, int64_t stride, int64_t channels, int64_t taps, float* by_tap) {
  for (int64_t j = 0; j < taps; ++j) {
    for (int64_t c = 0; c < channels; ++c) by_tap[j * channels + c] = static_cast<float>(w[c * stride + j]);
  }
}

}  // namespace

absl::Status CausalConv(ConstMatrixView x, ConstMatrixView w, SegmentList segments, const ConvState& state,
                        MatrixView y, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckSegments("CausalConv", segments, x.rows, state.slots));
  const int64_t taps = state.taps, history = taps - 1;
  const auto convolve = ForCurrentInstructionSet(ConvolveRowScalar, ConvolveRowAvx2, ConvolveRowAvx512);
  ParallelFor(stream, state.channels, 64, [&](int64_t begin, int64_t end) {
    const int64_t channels = end - begin;
    std::vector<float> by_tap(static_cast<size_t>(taps * channels));
    if (w.dtype == DType::kF32) {
      WeightsByTap(w.Row<float>(begin), w.row_stride, channels, taps, by_tap.data());
    } else {
      WeightsByTap(w.Row<bf16>(begin), w.row_stride, channels, taps, by_tap.data());
    }
    std::vector<const float*> inputs(static_cast<size_t>(taps));
    for (int64_t i = 0; i < segments.count; ++i) {
      const Segment& segment = segments.data[i];
      const float* past = static_cast<const float*>(state.data) + segment.slot * history * state.channels;
      for (int64_t t = 0; t < segment.row_count; ++t) {
        for (int64_t j = 0; j < taps; ++j) {
          const int64_t row = t - history + j;
          inputs[static_cast<size_t>(j)] = begin + (row < 0 ? past + (row + history) * state.channels
                                                            : x.Row<float>(segment.first_row + row));
        }
        convolve(by_tap.data(), inputs.data(), taps, channels, y.Row<float>(segment.first_row + t) + begin);
      }
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

}  // namespace dflash::backend
