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

__device__ __forceinline__ SegmentPlan PlanOf(const AttentionTask& task, int32_t index,
                                              const Divisor& tile_rows) {
  SegmentPlan plan;
  plan.segment = task.segments[index];
  const Segment& segment = plan.segment;
  plan.context_start = task.context_starts == nullptr ? 0 : task.context_starts[segment.slot];
  plan.tiles = tile_rows.Of(segment.row_count * task.group.value + tile_rows.value - 1);
  const KeyRange keys = VisibleKeys(task, segment, plan.context_start, segment.start_position,
                                    segment.start_position + segment.row_count - 1);
  plan.first_split = task.schedule.SplitOf(keys.first / kAttentionBlock);
  plan.splits = keys.first < keys.end
                    ? task.schedule.SplitOf((keys.end - 1) / kAttentionBlock) - plan.first_split + 1
                    : 1;
  return plan;
}

// Room in shared memory for a value whose type has initializers, which nobody would run there.
template <typename T>
struct SharedRoom {
  alignas(16) uint8_t bytes[sizeof(T)];
  __device__ __forceinline__ T& Value() { return *reinterpret_cast<T*>(bytes); }
  __device__ __forceinline__ const T& Value() const { return *reinterpret_cast<const T*>(bytes); }
};

// Prefix sums over the segments of the number of items: with an item per split, and with one per tile. Plans
// of the first segments are kept: loading and dividing again is what a few rows would wait for.
struct ItemTable {
  static constexpr int32_t kPlans = 64;
  SharedRoom<SegmentPlan> plans[kPlans];
  int32_t of_splits[kMaxAttentionSegments + 1];
  int32_t of_tiles[kMaxAttentionSegments + 1];
  bool has_half_tiles;

  __device__ __forceinline__ const Divisor& TileRows(const AttentionTask& task) const {
    return has_half_tiles ? task.half_rows : task.tile_rows;
  }
  __device__ __forceinline__ SegmentPlan Plan(const AttentionTask& task, int32_t index) const {
    return index < kPlans ? plans[index].Value() : PlanOf(task, index, TileRows(task));
  }
  // The segment that a row of the step belongs to, -1: none. Called by whole warps.
  __device__ __forceinline__ int32_t SegmentOfRow(const AttentionTask& task, int32_t row) const {
    for (int32_t base = 0; base < task.segment_count; base += 32) {
      const int32_t i = base + static_cast<int32_t>(threadIdx.x) % 32;
      bool is_it = false;
      if (i < task.segment_count) {
        const Segment segment = i < kPlans ? plans[i].Value().segment : task.segments[i];
        is_it = row >= segment.first_row && row - segment.first_row < segment.row_count;
      }
      const uint32_t found = __ballot_sync(0xffffffffu, is_it);
      if (found != 0) return base + __ffs(static_cast<int>(found)) - 1;
    }
    return -1;
  }
};

// Called by one warp; `table` is in shared memory and holds for that warp at once.
__device__ __forceinline__ void BuildItemTable(const AttentionTask& task, ItemTable& table) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  bool has_half_tiles = false;
  if (task.may_split && task.half_rows.value > 0) {
    int32_t items = 0;
    for (int32_t i = lane; i < task.segment_count; i += 32) {
      const SegmentPlan plan = PlanOf(task, i, task.half_rows);
      items += plan.tiles * plan.splits * task.kv_heads.value;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      items += __shfl_xor_sync(0xffffffffu, items, distance);
    }
    has_half_tiles = items <= task.multiprocessors;
  }
  if (lane == 0) table.has_half_tiles = has_half_tiles;
  __syncwarp();
  const Divisor& tile_rows = table.TileRows(task);
  int32_t split_total = 0, tile_total = 0;
  for (int32_t base = 0; base < task.segment_count; base += 32) {
    const int32_t i = base + lane;
    int32_t splits = 0, tiles = 0;
    if (i < task.segment_count) {
      const SegmentPlan plan = PlanOf(task, i, tile_rows);
      if (i < ItemTable::kPlans) table.plans[i].Value() = plan;
      tiles = plan.tiles * task.kv_heads.value;
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
  __syncwarp();
}

// Whether splits are items of their own. One answer for the whole call.
__device__ __forceinline__ bool IsSplit(const AttentionTask& task, const ItemTable& table) {
  return task.may_split && table.of_splits[task.segment_count] <= task.slots;
}

// The last segment whose items begin at or before `item`, among those that have items; begin(i) is that of
// segment i.
template <typename Begin>
__device__ __forceinline__ int32_t SegmentOfItem(const Begin& begin, int32_t count, int32_t item) {
  int32_t low = 0, high = count;  // begin(low) <= item < begin(high)
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (begin(middle) <= item) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// A segment's slots of the workspace: splits from last to first, in a split the tiles, in a tile the KV
// heads.
__device__ __forceinline__ int32_t SlotOf(const AttentionTask& task, const SegmentPlan& plan, int32_t split,
                                          int32_t tile, int32_t kv_head) {
  return ((plan.splits - 1 - split) * plan.tiles + tile) * task.kv_heads.value + kv_head;
}

// An item: some splits of one tile of rows and one KV head.
struct Item {
  Segment segment;
  int32_t context_start;
  int32_t first_key;  // that any row of the tile sees; what lies before it may be anything
  int32_t kv_head;
  int32_t first_row, rows;  // packed rows of the tile, counted from the segment's first
  int32_t first_block, end_block;
  KeyRange free;  // keys that all rows see: blocks of nothing else need no mask
  bool is_final;  // else the one split goes to the workspace
  int32_t slot;   // there

  __device__ __forceinline__ bool IsMaskFree(int32_t block) const {
    return block * kAttentionBlock >= free.first && (block + 1) * kAttentionBlock <= free.end;
  }

  __device__ __forceinline__ int32_t Token(const AttentionTask& task, int32_t row) const {
    return task.group.Of(first_row + row);
  }
  __device__ __forceinline__ int32_t Head(const AttentionTask& task, int32_t row) const {
    return (kv_head - Token(task, row)) * task.group.value + first_row + row;
  }
  __device__ __forceinline__ int32_t Position(const AttentionTask& task, int32_t row) const {
    return segment.start_position + Token(task, row);
  }
};

// Items in the order in which they are taken, long ones first. Where splits are items: those that are not a
// segment's last, segment by segment, from late (large) to early ones; then the last of all segments, which
// are cut off at the end of what is there. Else the tiles, from late ones, which see more keys, to early
// ones.
__device__ __forceinline__ Item ItemAt(const AttentionTask& task, const ItemTable& table, bool is_split,
                                       int32_t index) {
  const int32_t count = task.segment_count;
  const int32_t whole = is_split ? table.of_splits[count] - table.of_tiles[count] : 0;
  const bool is_whole = index < whole;
  const auto begin = [&](int32_t i) {
    return is_whole ? table.of_splits[i] - table.of_tiles[i] : whole + table.of_tiles[i];
  };
  const int32_t i = SegmentOfItem(begin, count, index);
  const SegmentPlan plan = table.Plan(task, i);
  Item item;
  item.segment = plan.segment;
  item.context_start = plan.context_start;
  int32_t rest = index - begin(i);
  const int32_t of_heads = task.kv_heads.Of(rest);
  item.kv_head = rest - of_heads * task.kv_heads.value;
  rest = of_heads;
  const int32_t of_tiles = !is_whole ? 0 : plan.tiles == 1 ? rest : rest / plan.tiles;
  const int32_t split = plan.splits - 1 - (is_whole ? of_tiles + 1 : 0);  // of the segment
  const int32_t tile = is_split ? rest - of_tiles * plan.tiles : plan.tiles - 1 - rest;
  item.slot = table.of_splits[i] + SlotOf(task, plan, split, tile, item.kv_head);
  const int32_t tile_rows = table.TileRows(task).value;
  item.first_row = tile * tile_rows;
  item.rows = min(tile_rows, plan.segment.row_count * task.group.value - item.first_row);
  const int32_t position = item.Position(task, 0), last = item.Position(task, item.rows - 1);
  const KeyRange keys = VisibleKeys(task, plan.segment, plan.context_start, position, last);
  item.free.first = VisibleKeys(task, plan.segment, plan.context_start, last, last).first;
  item.free.end = VisibleKeys(task, plan.segment, plan.context_start, position, position).end;
  item.first_key = keys.first;
  item.first_block = keys.first / kAttentionBlock;
  item.end_block = keys.first < keys.end ? (keys.end - 1) / kAttentionBlock + 1 : item.first_block;
  item.is_final = !is_split || plan.splits == 1;
  if (is_split) {
    item.first_block = max(item.first_block, task.schedule.FirstBlock(plan.first_split + split));
    item.end_block = min(item.end_block, task.schedule.FirstBlock(plan.first_split + split + 1));
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

// A slot of the workspace: outputs of a tile's rows in whole groups of eight rows, then maxima and sums of as
// many, float32. Outputs lie as the threads of a product hold them, so that 16 columns of a row are 64 bytes
// of four threads: the columns in the order 0, 1, 8, 9, 2, 3, 10, 11, ...; of eight rows one after another.
__host__ __device__ constexpr int32_t SlotRows(int32_t tile_rows) { return (tile_rows + 7) / 8 * 8; }
template <int kDim>
__host__ __device__ constexpr int64_t SlotFloats(int32_t tile_rows) {
  return int64_t{SlotRows(tile_rows)} * (kDim + 2);
}
// Of an even column; the odd one follows.
template <int kDim>
__host__ __device__ constexpr int32_t SlotOutput(int32_t row, int32_t column) {
  return (row / 8 * (kDim / 16) + column / 16) * 128 + row % 8 * 16 + column % 8 / 2 * 4 + column / 8 % 2 * 2;
}
template <int kDim>
__host__ __device__ constexpr int32_t SlotMaximum(int32_t tile_rows, int32_t row) {
  return SlotRows(tile_rows) * kDim + row;
}
template <int kDim>
__host__ __device__ constexpr int32_t SlotSum(int32_t tile_rows, int32_t row) {
  return SlotRows(tile_rows) * (kDim + 1) + row;
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
