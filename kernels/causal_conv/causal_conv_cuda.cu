#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/causal_conv/causal_conv_backend.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/segment_of_row.cuh"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/device/cuda/vector.cuh"
#include "kernels/elementary/elementary.h"

namespace dflash::backend {
namespace {

constexpr int kThreads = 256;

struct ConvTask {
  Bf16Rows x, y;
  Parameters weight;     // [channels, taps]
  bool weight_is_dense;  // bf16, one channel right behind the other, from a multiple of 16 bytes
  Bf16Rows state;        // row slot * (taps - 1) + j
  int64_t rows, channels;
  int32_t taps;
  const Segment* segments;
  int64_t segment_count;
};

// Block (256 chunks of channels, kRows rows of x); the common width of four taps, with weights and inputs in
// registers. Every row is computed alike, so the bits do not depend on kRows.
template <int kRows, bool kVectorized>
__global__ void FourTapsKernel(const ConvTask task) {
  LetNextKernelStart();
  constexpr int kTaps = 4;
  const int64_t channel = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kChunk;
  const int count = static_cast<int>(max(min(task.channels - channel, int64_t{kChunk}), int64_t{0}));
  float weights[kTaps][kChunk];
  if (kVectorized && task.weight_is_dense && count > 0) {  // the weights of two channels are 16 bytes
    const auto* from = static_cast<const __nv_bfloat16*>(task.weight.data) + channel * kTaps;
#pragma unroll
    for (int pair = 0; pair < kChunk / 2; ++pair) {
      float values[kChunk];
      Load<true>(from + pair * 2 * kTaps, kChunk, values);
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        weights[j][2 * pair] = values[j];
        weights[j][2 * pair + 1] = values[kTaps + j];
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) weights[j][i] = i < count ? task.weight.At(channel + i, j) : 0.0f;
    }
  }
  WaitForPreviousKernel();
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kRows;
  __shared__ int32_t index_of[kRows];
  if (threadIdx.x < kRows) index_of[threadIdx.x] = -1;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < task.segment_count; i += kThreads) {
    const Segment segment = task.segments[i];
    const int64_t begin = max(int64_t{segment.first_row} - first, int64_t{0});
    const int64_t end = min(int64_t{segment.first_row} + segment.row_count - first, int64_t{kRows});
    for (int64_t row = begin; row < end; ++row) index_of[row] = static_cast<int32_t>(i);
  }
  __syncthreads();
  if (count == 0) return;
  const auto input_of = [&](const Segment& segment, int64_t row) {
    const int64_t inside = row - segment.first_row;  // negative: before the segment
    return (inside >= 0 ? task.x.Row(row)
                        : task.state.Row(int64_t{segment.slot} * (kTaps - 1) + inside + (kTaps - 1))) +
           channel;
  };
  const auto finish = [&](const float(&inputs)[kTaps][kChunk], int64_t row) {
    float sums[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kTaps; ++j) sum = fmaf(weights[j][i], inputs[j][i], sum);
      sums[i] = SiluF32(sum);
    }
    Store<kVectorized>(task.y.Row(row) + channel, count, sums);
  };
  bool one_segment = kVectorized && index_of[0] >= 0;
#pragma unroll
  for (int r = 1; r < kRows; ++r) one_segment = one_segment && index_of[r] == index_of[0];
  if (one_segment) {  // all reads are on their way before the first is used
    const Segment segment = task.segments[index_of[0]];
    uint4 raw[kRows + kTaps - 1];
#pragma unroll
    for (int r = 0; r < kRows + kTaps - 1; ++r) {
      raw[r] = *reinterpret_cast<const uint4*>(input_of(segment, first + r - (kTaps - 1)));
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float inputs[kTaps][kChunk];
#pragma unroll
      for (int j = 0; j < kTaps; ++j) Unpack(raw[r + j], inputs[j]);
      finish(inputs, first + r);
    }
    return;
  }
#pragma unroll 1
  for (int r = 0; r < kRows; ++r) {
    if (index_of[r] < 0) continue;
    const Segment segment = task.segments[index_of[r]];
    float inputs[kTaps][kChunk];
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      Load<kVectorized>(input_of(segment, first + r - (kTaps - 1) + j), count, inputs[j]);
    }
    finish(inputs, first + r);
  }
}

// Block (256 channels, row): any number of taps.
__global__ void AnyTapsKernel(const ConvTask task) {
  LetNextKernelStart();
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = blockIdx.y;
  WaitForPreviousKernel();
  const int32_t index = SegmentOfRow(task.segments, task.segment_count, row);
  if (index < 0 || channel >= task.channels) return;
  const Segment segment = task.segments[index];
  float sum = 0;
  for (int j = 0; j < task.taps; ++j) {
    const int64_t inside = row - (task.taps - 1) + j - segment.first_row;  // negative: before the segment
    const __nv_bfloat16* input =
        inside >= 0 ? task.x.Row(segment.first_row + inside)
                    : task.state.Row(int64_t{segment.slot} * (task.taps - 1) + inside + (task.taps - 1));
    sum = fmaf(task.weight.At(channel, j), __bfloat162float(input[channel]), sum);
  }
  task.y.Row(row)[channel] = __float2bfloat16_rn(SiluF32(sum));
}

// The layers of one launch: they travel as the kernel's argument.
constexpr int64_t kLayersAtOnce = 64;
struct AdvanceTask {
  struct Layer {
    Bf16Rows x, state;  // of ConvTask
  };
  Layer layers[kLayersAtOnce];
  int64_t channels;
  int32_t taps;
  const Segment* segments;
  const int32_t* row_counts;
};

// Block (256 channels, segment, layer).
__global__ void AdvanceKernel(const __grid_constant__ AdvanceTask task) {
  LetNextKernelStart();
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (channel >= task.channels) return;
  WaitForPreviousKernel();
  const AdvanceTask::Layer& layer = task.layers[blockIdx.z];
  const Segment segment = task.segments[blockIdx.y];
  const int64_t rows = task.row_counts == nullptr ? segment.row_count : task.row_counts[blockIdx.y];
  if (rows <= 0) return;
  const int64_t history = task.taps - 1;
  for (int64_t j = 0; j < history; ++j) {  // ascending: what is read lies behind what is written
    const int64_t row = rows + j - history;
    const __nv_bfloat16* from =
        row < 0 ? layer.state.Row(segment.slot * history + rows + j) : layer.x.Row(segment.first_row + row);
    layer.state.Row(segment.slot * history + j)[channel] = from[channel];
  }
}

ConvTask TaskOf(ConstMatrixView x, SegmentList segments, const ConvState& state) {
  ConvTask task = {};
  task.x = Bf16RowsOf(x);
  task.state = {static_cast<__nv_bfloat16*>(state.data), state.channels};
  task.rows = x.rows;
  task.channels = state.channels;
  task.taps = static_cast<int32_t>(state.taps);
  task.segments = segments.data;
  task.segment_count = segments.count;
  return task;
}

template <int kRows>
cudaError_t LaunchFourTaps(const ConvTask& task, bool vectorized, const Stream& stream) {
  const LaunchShape shape = {
      .grid = Grid(CeilDiv(task.channels, kThreads * kChunk), CeilDiv(task.rows, kRows)),
      .block = dim3(kThreads)};
  return Launch(CudaOf(stream), shape,
                vectorized ? FourTapsKernel<kRows, true> : FourTapsKernel<kRows, false>, task);
}

}  // namespace

absl::Status CausalConv(ConstMatrixView x, ConstMatrixView w, SegmentList segments, const ConvState& state,
                        MatrixView y, const Stream& stream) {
  if (x.rows == 0 || segments.count == 0) return absl::OkStatus();
  if (x.rows > 65535) {  // CUDA's bound of the grid
    return absl::UnimplementedError(absl::StrCat("CausalConv: ", x.rows, " rows in one call"));
  }
  ConvTask task = TaskOf(x, segments, state);
  task.y = Bf16RowsOf(y);
  task.weight = ParametersOf(w);
  task.weight_is_dense =
      w.dtype == DType::kBf16 && w.row_stride == w.cols && reinterpret_cast<uintptr_t>(w.data) % 16 == 0;
  if (state.taps != 4) {
    const LaunchShape shape = {.grid = Grid(CeilDiv(task.channels, kThreads), task.rows),
                               .block = dim3(kThreads)};
    return CudaStatus(Launch(CudaOf(stream), shape, AnyTapsKernel, task), "CausalConv");
  }
  const ConstMatrixView history(state.data, DType::kBf16, state.slots, state.channels, state.channels);
  const bool vectorized = IsVectorized(x) && IsVectorized(y) && IsVectorized(history);
  constexpr int64_t kFewRows =
      128;  // as many blocks as possible; beyond it inputs are read once, not four times
  return CudaStatus(x.rows <= kFewRows ? LaunchFourTaps<1>(task, vectorized, stream)
                                       : LaunchFourTaps<8>(task, vectorized, stream),
                    "CausalConv");
}

absl::Status AdvanceConvStates(const std::vector<ConvCommit>& layers, SegmentList segments,
                               const int32_t* row_counts, const Stream& stream) {
  if (segments.count == 0) return absl::OkStatus();
  const ConvState& any = layers[0].state;
  AdvanceTask task = {};
  task.channels = any.channels;
  task.taps = static_cast<int32_t>(any.taps);
  task.segments = segments.data;
  task.row_counts = row_counts;
  for (size_t first = 0; first < layers.size(); first += kLayersAtOnce) {
    const size_t count = std::min<size_t>(kLayersAtOnce, layers.size() - first);
    for (size_t i = 0; i < count; ++i) {
      const ConvCommit& layer = layers[first + i];
      task.layers[i] = {Bf16RowsOf(layer.x),
                        {static_cast<__nv_bfloat16*>(layer.state.data), layer.state.channels}};
    }
    const LaunchShape shape = {
        .grid = dim3(static_cast<unsigned>(CeilDiv(any.channels, kThreads)),
                     static_cast<unsigned>(segments.count), static_cast<unsigned>(count)),
        .block = dim3(kThreads)};
    DFLASH_RETURN_IF_ERROR(
        CudaStatus(Launch(CudaOf(stream), shape, AdvanceKernel, task), "AdvanceConvState"));
  }
  return absl::OkStatus();
}

}  // namespace dflash::backend
