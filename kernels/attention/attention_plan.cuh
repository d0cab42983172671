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

__device__ __forceinline__ SegmentPlan PlanOf(const AttentionTask& task, int32_t index, int32_t tile_rows) {
  SegmentPlan plan;
  plan.segment = task.segments[index];
  const Segment& segment = plan.segment;
  plan.context_start = task.context_starts == nullptr ? 0 : task.context_starts[segment.slot];
  plan.tiles = (segment.row_count * task.group + tile_rows - 1) / tile_rows;
  const KeyRange keys = VisibleKeys(task, segment, plan.context_start, segment.start_position,
                                    segment.start_position + segment.row_count - 1);
  plan.first_split = task.schedule.SplitOf(keys.first / kAttentionBlock);
  plan.splits = keys.first < keys.end
                    ? task.schedule.SplitOf((keys.end - 1) / kAttentionBlock) - plan.first_split + 1
                    : 1;
  return plan;
}

// Prefix sums over the segments of the number of items: with an item per split, and with one per tile.
struct ItemTable {
  int32_t of_splits[kMaxAttentionSegments + 1];
  int32_t of_tiles[kMaxAttentionSegments + 1];
};

// Called by all threads of a block; `table` is in shared memory.
__device__ __forceinline__ void BuildItemTable(const AttentionTask& task, int32_t tile_rows,
                                               ItemTable& table) {
  if (threadIdx.x < 32) {
    const auto lane = static_cast<int32_t>(threadIdx.x);
    int32_t split_total = 0, tile_total = 0;
    for (int32_t base = 0; base < task.segment_count; base += 32) {
      const int32_t i = base + lane;
      int32_t splits = 0, tiles = 0;
      if (i < task.segment_count) {
        const SegmentPlan plan = PlanOf(task, i, tile_rows);
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

// An item: some splits of one tile of rows and one KV head.
struct Item {
  Segment segment;
  int32_t context_start;
  int32_t first_key;  // that any row of the tile sees; what lies before it may be anything
  int32_t kv_head;
  int32_t group;
  int32_t first_row, rows;  // packed rows of the tile, counted from the segment's first
  int32_t first_block, end_block;
  bool is_final;  // else the one split goes to the workspace

  __device__ __forceinline__ int32_t Token(int32_t row) const { return (first_row + row) / group; }
  __device__ __forceinline__ int32_t Head(int32_t row) const {
    return kv_head * group + (first_row + row) % group;
  }
  __device__ __forceinline__ int32_t Position(int32_t row) const {
    return segment.start_position + Token(row);
  }
};

__device__ __forceinline__ Item ItemAt(const AttentionTask& task, const ItemTable& table, bool is_split,
                                       int32_t tile_rows, int32_t index) {
  const int32_t* prefix = is_split ? table.of_splits : table.of_tiles;
  const int32_t i = SegmentOfItem(prefix, task.segment_count, index);
  const SegmentPlan plan = PlanOf(task, i, tile_rows);
  Item item;
  item.segment = plan.segment;
  item.context_start = plan.context_start;
  int32_t rest = index - prefix[i];
  item.kv_head = rest % task.kv_heads;
  rest /= task.kv_heads;
  // Later tiles see more keys: they go first.
  const int32_t tile = is_split ? rest % plan.tiles : plan.tiles - 1 - rest;
  item.group = task.group;
  item.first_row = tile * tile_rows;
  item.rows = min(tile_rows, plan.segment.row_count * task.group - item.first_row);
  const KeyRange keys =
      VisibleKeys(task, plan.segment, plan.context_start, item.Position(0), item.Position(item.rows - 1));
  item.first_key = keys.first;
  item.first_block = keys.first / kAttentionBlock;
  item.end_block = keys.first < keys.end ? (keys.end - 1) / kAttentionBlock + 1 : item.first_block;
  item.is_final = !is_split || plan.splits == 1;
  if (is_split) {
    const int32_t split = plan.first_split + plan.splits - 1 - rest / plan.tiles;
    item.first_block = max(item.first_block, task.schedule.FirstBlock(split));
    item.end_block = min(item.end_block, task.schedule.FirstBlock(split + 1));
  }
  return item;
}

// The page that holds positions of a block before the segment's own rows, -1 when there are none (or the
// table is wrong: such keys read as zeros).
__device__ __forceinline__ int32_t PageOf(const AttentionTask& task, const Item& item, int32_t block) {
  if (block >= item.end_block || block * kAttentionBlock >= item.segment.start_position) return -1;
  if (block >= task.pages_per_slot) return -1;
  const int32_t page = task.pages[int64_t{item.segment.slot} * task.pages_per_slot + block];
  return page >= 0 && page < task.page_count ? page : -1;
}

// Blocks that all rows of the item see whole need no mask.
struct MaskFree {
  int32_t first, end;  // keys
  __device__ __forceinline__ MaskFree(const AttentionTask& task, const Item& item) {
    const int32_t position = item.Position(0), last = item.Position(item.rows - 1);
    first = VisibleKeys(task, item.segment, item.context_start, last, last).first;
    end = VisibleKeys(task, item.segment, item.context_start, position, position).end;
  }
  __device__ __forceinline__ bool Has(int32_t block) const {
    return block * kAttentionBlock >= first && (block + 1) * kAttentionBlock <= end;
  }
};

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
