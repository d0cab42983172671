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
  Parameters weight;  // [channels, taps]
  Bf16Rows state;     // row slot * (taps - 1) + j
  int64_t rows, channels;
  int32_t taps;
  const Segment* segments;
  int64_t segment_count;
};

// Block (256 chunks of channels, kRows rows of x). kTaps = 0: any number of taps. Rows differ only in how
// often the weights are read, so the bits do not depend on kRows.
template <int kTaps, int kRows, bool kVectorized>
__global__ void ConvKernel(const ConvTask task) {
  LetNextKernelStart();
  const int taps = kTaps > 0 ? kTaps : task.taps;
  const int64_t channel = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kChunk;
  const int count = static_cast<int>(max(min(task.channels - channel, int64_t{kChunk}), int64_t{0}));
  float weights[kTaps > 0 ? kTaps : 1][kChunk];
  if constexpr (kTaps > 0) {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) weights[j][i] = i < count ? task.weight.At(channel + i, j) : 0.0f;
    }
  }
  WaitForPreviousKernel();
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * kRows;
       row < min(task.rows, (static_cast<int64_t>(blockIdx.y) + 1) * kRows); ++row) {
    const int32_t index = SegmentOfRow(task.segments, task.segment_count, row);
    __syncthreads();  // all have the answer before the next row's search
    if (index < 0 || count == 0) continue;
    const Segment segment = task.segments[index];
    float sums[kChunk] = {};
#pragma unroll
    for (int j = 0; j < taps; ++j) {
      const int64_t input_row = row - (taps - 1) + j;
      const __nv_bfloat16* input = input_row >= segment.first_row
                                       ? task.x.Row(input_row)
                                       : task.state.Row(int64_t{segment.slot} * (taps - 1) +
                                                        (input_row - segment.first_row) + (taps - 1));
      float values[kChunk];
      Load<kVectorized>(input + channel, count, values);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        float weight;
        if constexpr (kTaps > 0) {
          weight = weights[j][i];
        } else {
          weight = i < count ? task.weight.At(channel + i, j) : 0.0f;
        }
        sums[i] = fmaf(weight, values[i], sums[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sums[i] = SiluF32(sums[i]);
    Store<kVectorized>(task.y.Row(row) + channel, count, sums);
  }
}

// Block (256 channels, segment).
__global__ void AdvanceKernel(const ConvTask task, const int32_t* row_counts) {
  LetNextKernelStart();
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (channel >= task.channels) return;
  WaitForPreviousKernel();
  const Segment segment = task.segments[blockIdx.y];
  const int64_t rows = row_counts == nullptr ? segment.row_count : row_counts[blockIdx.y];
  if (rows <= 0) return;
  const int64_t history = task.taps - 1;
  for (int64_t j = 0; j < history; ++j) {  // ascending: what is read lies behind what is written
    const int64_t row = rows + j - history;
    const __nv_bfloat16* from =
        row < 0 ? task.state.Row(segment.slot * history + rows + j) : task.x.Row(segment.first_row + row);
    task.state.Row(segment.slot * history + j)[channel] = from[channel];
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

template <int kTaps, int kRows>
cudaError_t LaunchConv(const ConvTask& task, bool vectorized, const Stream& stream) {
  const LaunchShape shape = {
      .grid = Grid(CeilDiv(task.channels, kThreads * kChunk), CeilDiv(task.rows, kRows)),
      .block = dim3(kThreads)};
  return Launch(CudaOf(stream), shape,
                vectorized ? ConvKernel<kTaps, kRows, true> : ConvKernel<kTaps, kRows, false>, task);
}

}  // namespace

absl::Status CausalConv(ConstMatrixView x, ConstMatrixView w, SegmentList segments, const ConvState& state,
                        MatrixView y, const Stream& stream) {
  if (x.rows == 0 || segments.count == 0) return absl::OkStatus();
  ConvTask task = TaskOf(x, segments, state);
  task.y = Bf16RowsOf(y);
  task.weight = ParametersOf(w);
  const ConstMatrixView history(state.data, DType::kBf16, state.slots, state.channels, state.channels);
  const bool vectorized = IsVectorized(x) && IsVectorized(y) && IsVectorized(history);
  // Few rows: as many blocks as possible. Many: the weights are read once for eight rows. (65535 blocks of
  // rows are CUDA's bound.)
  constexpr int64_t kFewRows = 128;
  constexpr int kRowsTogether = 8;
  if (x.rows > 65535 * kRowsTogether)
    return absl::UnimplementedError("CausalConv: too many rows in one call");
  cudaError_t error;
  if (state.taps == 4) {
    error = x.rows <= kFewRows ? LaunchConv<4, 1>(task, vectorized, stream)
                               : LaunchConv<4, kRowsTogether>(task, vectorized, stream);
  } else {
    error = LaunchConv<0, kRowsTogether>(task, vectorized, stream);
  }
  return CudaStatus(error, "CausalConv");
}

absl::Status AdvanceConvState(ConstMatrixView x, SegmentList segments, const int32_t* row_counts,
                              const ConvState& state, const Stream& stream) {
  if (segments.count == 0) return absl::OkStatus();
  const LaunchShape shape = {.grid = Grid(CeilDiv(state.channels, kThreads), segments.count),
                             .block = dim3(kThreads)};
  return CudaStatus(Launch(CudaOf(stream), shape, AdvanceKernel, TaskOf(x, segments, state), row_counts),
                    "AdvanceConvState");
}

}  // namespace dflash::backend
