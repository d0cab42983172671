// The end of attention: splits that lie in the workspace become rows of the output.
//
// Item i of the call has slot i: outputs [tile_rows, kDim], then maxima and sums [tile_rows], float32.
#pragma once

#include "kernels/attention/attention_plan.cuh"
#include "kernels/device/cuda/launch.cuh"

namespace dflash {
namespace {

constexpr int kMergeThreads = 256;

// Writes two neighbouring columns, the first of them even.
__device__ __forceinline__ void WriteRow(const AttentionTask& task, int64_t row, int32_t head, int column,
                                         float first, float second) {
  if (column >= task.head_dim) return;
  __nv_bfloat16* to = task.out.Row(row) + int64_t{head} * task.head_dim + column;
  if (task.out_aligned) {
    *reinterpret_cast<uint32_t*>(to) = PackBf16(first, second);
    return;
  }
  to[0] = __float2bfloat16_rn(first);
  if (column + 1 < task.head_dim) to[1] = __float2bfloat16_rn(second);
}

// Merges the splits of every row and head, in ascending order. Block (heads, row): kDim / 4 threads a head.
template <int kDim>
__global__ void __launch_bounds__(kMergeThreads) MergeKernel(const AttentionTask task, int32_t tile_rows) {
  constexpr int kThreadsPerHead = kDim / 4, kHeads = kMergeThreads / kThreadsPerHead;
  __shared__ ItemTable table;
  __shared__ int32_t found;
  LetNextKernelStart();
  WaitForPreviousKernel();
  const auto row = static_cast<int32_t>(blockIdx.y);
  if (threadIdx.x == 0) found = -1;
  BuildItemTable(task, tile_rows, table);
  if (!IsSplit(task, table)) return;
  for (auto i = static_cast<int32_t>(threadIdx.x); i < task.segment_count; i += kMergeThreads) {
    const Segment segment = task.segments[i];
    if (row >= segment.first_row && row - segment.first_row < segment.row_count) found = i;
  }
  __syncthreads();
  const int32_t index = found;
  const auto head = static_cast<int32_t>(blockIdx.x * kHeads + threadIdx.x / kThreadsPerHead);
  if (index < 0 || head >= task.kv_heads * task.group) return;
  const SegmentPlan plan = PlanOf(task, index, tile_rows);
  if (plan.splits == 1) return;
  const int32_t packed = (row - plan.segment.first_row) * task.group + head % task.group;
  const int32_t tile = packed / tile_rows, tile_row = packed % tile_rows;
  const int64_t slot_floats = int64_t{tile_rows} * (kDim + 2);
  const int column = static_cast<int>(threadIdx.x) % kThreadsPerHead * 4;
  // From one split to the next the slots descend by as much.
  const int64_t first_slot = table.of_splits[index] + ItemOf(task, plan, 0, tile, head / task.group);
  const int64_t step = -int64_t{plan.tiles} * task.kv_heads * slot_floats;
  const float* slot = task.workspace + first_slot * slot_floats;
  const float* outputs = slot + tile_row * kDim + column;
  const float* maxima = slot + int64_t{tile_rows} * kDim + tile_row;

  float maximum = 0, sum = 0;
  float total[4] = {};
  constexpr int kAtOnce = 8;
  for (int32_t split = 0; split < plan.splits; split += kAtOnce) {
    float4 part[kAtOnce];
    float split_maximum[kAtOnce], split_sum[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool exists = split + i < plan.splits;
      const int64_t offset = exists ? (split + i) * step : 0;
      part[i] = *reinterpret_cast<const float4*>(outputs + offset);
      split_maximum[i] = maxima[offset];
      split_sum[i] = exists ? maxima[offset + tile_rows] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const MergeFactors f = MergeRow(maximum, sum, split_maximum[i], split_sum[i]);
      total[0] = fmaf(part[i].x, f.take, total[0] * f.keep);
      total[1] = fmaf(part[i].y, f.take, total[1] * f.keep);
      total[2] = fmaf(part[i].z, f.take, total[2] * f.keep);
      total[3] = fmaf(part[i].w, f.take, total[3] * f.keep);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    WriteRow(task, row, head, column + i, Normalized(total[i], sum), Normalized(total[i + 1], sum));
  }
}

template <int kDim>
cudaError_t LaunchMerge(const AttentionTask& task, int32_t tile_rows, int64_t rows,
                        const CudaContext& context) {
  constexpr int64_t kHeads = kMergeThreads / (kDim / 4);
  const LaunchShape shape = {.grid = Grid(CeilDiv(int64_t{task.kv_heads} * task.group, kHeads), rows),
                             .block = dim3(kMergeThreads)};
  return Launch(context, shape, MergeKernel<kDim>, task, tile_rows);
}

}  // namespace
}  // namespace dflash
