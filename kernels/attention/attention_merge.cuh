// The end of attention: splits that lie in the workspace become rows of the output. Item i of the call has
// slot i.
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
// The kernel before, which writes the splits, promises that what was before it is complete: where they will
// lie is found out while it runs.
template <int kDim>
__global__ void __launch_bounds__(kMergeThreads, 2) MergeKernel(const AttentionTask task) {
  constexpr int kThreadsPerHead = kDim / 4, kHeads = kMergeThreads / kThreadsPerHead;
  __shared__ ItemTable table;
  __shared__ int32_t found;
  LetNextKernelStart();
  const auto row = static_cast<int32_t>(blockIdx.y);
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) found = -1;
    __syncwarp();
    BuildItemTable(task, table, [&](int32_t i, const SegmentPlan& plan) {
      const Segment& segment = plan.segment;
      if (row >= segment.first_row && row - segment.first_row < segment.row_count) found = i;
    });
  }
  __syncthreads();
  const int32_t index = found;
  const auto head = static_cast<int32_t>(blockIdx.x * kHeads + threadIdx.x / kThreadsPerHead);
  SegmentPlan plan = {};
  if (index >= 0 && IsSplit(task, table)) plan = table.Plan(task, index);
  if (head >= task.kv_heads.value * task.group.value || plan.splits <= 1) {
    WaitForPreviousKernel();  // who waits for this kernel waits for that one too
    return;
  }
  const int32_t kv_head = task.group.Of(head);
  const int32_t packed =
      (row - plan.segment.first_row) * task.group.value + head - kv_head * task.group.value;
  const Divisor& rows_of_tile = table.TileRows(task);
  const int32_t tile = rows_of_tile.Of(packed), tile_row = packed - tile * rows_of_tile.value;
  const int32_t tile_rows = task.tile_rows.value;
  const int64_t slot_floats = SlotFloats<kDim>(tile_rows);
  // The thread's four columns: two neighbours, and the two that are 8 behind.
  const int part_of_head = static_cast<int>(threadIdx.x) % kThreadsPerHead;
  const int column = part_of_head / 4 * 16 + part_of_head % 4 * 2;
  // From one split to the next the slots descend by as much.
  const int64_t first_slot = table.of_splits[index] + ItemOf(task, plan, 0, tile, kv_head);
  const int64_t step = -int64_t{plan.tiles} * task.kv_heads.value * slot_floats;
  const float* slot = task.workspace + first_slot * slot_floats;
  const float* outputs = slot + SlotOutput<kDim>(tile_row, column);
  const float* maxima = slot + SlotMaximum<kDim>(tile_rows, tile_row);
  const int32_t to_sums = SlotSum<kDim>(tile_rows, 0) - SlotMaximum<kDim>(tile_rows, 0);
  WaitForPreviousKernel();

  // Sixteen splits at a time: each of sixteen threads works out the factors of one (MergeRow, with a running
  // maximum), then all take them in one after another.
  constexpr int kAtOnce = 16;
  static_assert(kThreadsPerHead % kAtOnce == 0 && kAtOnce <= 32);
  const uint32_t team = 0xffffu << (threadIdx.x & 16u);
  const int member = static_cast<int>(threadIdx.x) % kAtOnce;
  float maximum = -INFINITY, sum = 0;
  float total[4] = {};
  for (int32_t split = 0; split < plan.splits; split += kAtOnce) {
    const bool exists = split + member < plan.splits;
    const int64_t offset = (split + member) * step;
    const float own_maximum = exists ? maxima[offset] : -INFINITY;
    const float own_sum = exists ? maxima[offset + to_sums] : 0.0f;
    float4 part[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      part[i] = make_float4(0, 0, 0, 0);
      if (split + i < plan.splits) part[i] = *reinterpret_cast<const float4*>(outputs + (split + i) * step);
    }
    float now = own_maximum;  // the maximum up to and with the split
#pragma unroll
    for (int distance = 1; distance < kAtOnce; distance *= 2) {
      const float other = __shfl_up_sync(team, now, distance, kAtOnce);
      if (member >= distance) now = fmaxf(now, other);
    }
    now = fmaxf(now, maximum);
    const float up = __shfl_up_sync(team, now, 1, kAtOnce), before = member == 0 ? maximum : up;
    const bool sees_nothing = now == -INFINITY;
    const float keep = sees_nothing ? 1.0f : ptx::Exp2(before - now);
    const float take = sees_nothing ? 0.0f : ptx::Exp2(own_maximum - now);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float k = __shfl_sync(team, keep, i, kAtOnce), t = __shfl_sync(team, take, i, kAtOnce);
      sum = fmaf(__shfl_sync(team, own_sum, i, kAtOnce), t, sum * k);
      total[0] = fmaf(part[i].x, t, total[0] * k);
      total[1] = fmaf(part[i].y, t, total[1] * k);
      total[2] = fmaf(part[i].z, t, total[2] * k);
      total[3] = fmaf(part[i].w, t, total[3] * k);
    }
    maximum = __shfl_sync(team, now, kAtOnce - 1, kAtOnce);
  }
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    WriteRow(task, row, head, column + 4 * i, Normalized(total[i], sum), Normalized(total[i + 1], sum));
  }
}

template <int kDim>
cudaError_t LaunchMerge(const AttentionTask& task, int64_t rows, const CudaContext& context) {
  constexpr int64_t kHeads = kMergeThreads / (kDim / 4);
  const LaunchShape shape = {
      .grid = Grid(CeilDiv(int64_t{task.kv_heads.value} * task.group.value, kHeads), rows),
      .block = dim3(kMergeThreads)};
  return Launch(context, shape, MergeKernel<kDim>, task);
}

}  // namespace
}  // namespace dflash
