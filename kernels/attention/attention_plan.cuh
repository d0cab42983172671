// The work items of one call, derived on the device from what the segments say. Every block derives the same.
#pragma once

#include "kernels/attention/attention_cuda.h"
#include "kernels/device/cuda/shared_tile.cuh"

namespace dflash {

struct KeyRange {
  int32_t first, end;
};

// What the rows at positions [first_row, last_row] of a segment see together.
__device__ __forceinline__ KeyRange VisibleKeys(const AttentionTask& task, const Segment& segment,
                                                int32_t context_start, int32_t first_row, int32_t last_row) {
  KeyRange keys = {context_start, segment.start_position + segment.row_count};
  if (task.causal) keys.end = min(keys.end, last_row + 1);
  if (task.window > 0) {
    keys.first = max(keys.first, first_row - task.window + 1);
    if (!task.causal) keys.end = min(keys.end, last_row + task.window);
  }
  return keys;
}

struct SegmentPlan {
  Segment segment;
  int32_t context_start;
  int32_t tiles;                // of rows
  int32_t first_split, splits;  // that any of its rows sees; one (of nothing) when they see nothing
};

__device__ __forceinline__ SegmentPlan PlanOf(const AttentionTask& task, int32_t index, int32_t tile_tokens) {
  SegmentPlan plan;
  plan.segment = task.segments[index];
  const Segment& segment = plan.segment;
  plan.context_start = task.context_starts == nullptr ? 0 : task.context_starts[segment.slot];
  plan.tiles = (segment.row_count + tile_tokens - 1) / tile_tokens;
  const KeyRange keys = VisibleKeys(task, segment, plan.context_start, segment.start_position,
                                    segment.start_position + segment.row_count - 1);
  const SplitSchedule schedule = {task.window > 0};
  plan.first_split = schedule.SplitOf(keys.first / kAttentionBlock);
  plan.splits =
      keys.first < keys.end ? schedule.SplitOf((keys.end - 1) / kAttentionBlock) - plan.first_split + 1 : 1;
  return plan;
}

// Prefix sums over the segments of the number of items: with an item per split, and with one per tile.
struct ItemTable {
  int32_t of_splits[kMaxAttentionSegments + 1];
  int32_t of_tiles[kMaxAttentionSegments + 1];
};

// Called by all threads of a block; `table` is in shared memory.
__device__ __forceinline__ void BuildItemTable(const AttentionTask& task, int32_t tile_tokens,
                                               ItemTable& table) {
  if (threadIdx.x < 32) {
    const auto lane = static_cast<int32_t>(threadIdx.x);
    int32_t split_total = 0, tile_total = 0;
    for (int32_t base = 0; base < task.segment_count; base += 32) {
      const int32_t i = base + lane;
      int32_t splits = 0, tiles = 0;
      if (i < task.segment_count) {
        const SegmentPlan plan = PlanOf(task, i, tile_tokens);
        tiles = plan.tiles * task.kv_heads;
        splits = tiles * plan.splits;
      }
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int32_t before_splits = __shfl_up_sync(0xffffffffu, splits, distance);
        const int32_t before_tiles = __shfl_up_sync(0xffffffffu, tiles, distance);
        if (lane >= distance) {
          splits += before_splits;
          tiles += before_tiles;
        }
      }
      if (i < task.segment_count) {
        table.of_splits[i + 1] = split_total + splits;
        table.of_tiles[i + 1] = tile_total + tiles;
      }
      split_total += __shfl_sync(0xffffffffu, splits, 31);
      tile_total += __shfl_sync(0xffffffffu, tiles, 31);
    }
    if (lane == 0) table.of_splits[0] = table.of_tiles[0] = 0;
  }
  __syncthreads();
}

// Whether splits are items of their own. One answer for the whole call.
__device__ __forceinline__ bool IsSplit(const AttentionTask& task, const ItemTable& table) {
  return task.may_split && table.of_splits[task.segment_count] <= task.slots;
}

// The last segment whose items begin at or before `item`, among those that have items.
__device__ __forceinline__ int32_t SegmentOfItem(const int32_t* prefix, int32_t count, int32_t item) {
  int32_t low = 0, high = count;  // prefix[low] <= item < prefix[high]
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (prefix[middle] <= item) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// A segment's items: splits from last to first (the largest come first), in a split the tiles, in a tile the
// KV heads.
__device__ __forceinline__ int32_t ItemOf(const AttentionTask& task, const SegmentPlan& plan, int32_t split,
                                          int32_t tile, int32_t kv_head) {
  return ((plan.splits - 1 - split) * plan.tiles + tile) * task.kv_heads + kv_head;
}

// How the state (maximum, sum) of a row takes in that of the next split: outputs become
// fma(split's, take, state's * keep). Maxima in units of log2. A sum of 0 belongs to a row that saw nothing.
struct MergeFactors {
  float keep, take;
};
__device__ __forceinline__ MergeFactors MergeRow(float& maximum, float& sum, float split_maximum,
                                                 float split_sum) {
  if (split_sum == 0) return {1, 0};
  if (sum == 0) {
    maximum = split_maximum;
    sum = split_sum;
    return {0, 1};
  }
  const float larger = fmaxf(maximum, split_maximum);
  const MergeFactors factors = {ptx::Exp2(maximum - larger), ptx::Exp2(split_maximum - larger)};
  maximum = larger;
  sum = fmaf(split_sum, factors.take, sum * factors.keep);
  return factors;
}

// The end of a row: -0 becomes 0, whatever way the value came.
__device__ __forceinline__ float Normalized(float value, float sum) {
  return __fdiv_rn(__fadd_rn(value, 0.0f), sum == 0 ? 1.0f : sum);
}

}  // namespace dflash
