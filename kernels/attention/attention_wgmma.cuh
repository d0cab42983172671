// Attention with warpgroup products, head_dim 128 or 256. Included by attention_wgmma_{128,256}.cu.
//
//   grid      as many blocks as run at once; items beyond the first come from a counter
//   block     two or three warpgroups. The first brings what the others need: its warp 0 says what the items
//             are and copies what lies in pages (a whole page's keys, or its values, are one contiguous
//             copy) and blocks that are the segment's own rows alone (tensor tiles); its warps 1 to 3 ask for
//             the queries (one tensor tile of tokens x heads for every 64 columns) and gather own rows of the
//             other blocks. The others, one or two as the tile's rows need, compute 64 packed rows each
//   shared    queries | ring of key and value blocks, keys before values
//   registers outputs of the current split, scores and weights of a block
//
// While the product of weights and values of a block runs, the scores of the next become weights. A row's
// arithmetic does not depend on where in a tile it lies, and not on the other rows.
//
// A few rows are a chain of waits, not bytes. So everything that does not need the kernel before happens
// while that runs, where the caller says that the context was written earlier (ContextWritten): the items,
// the pages and the first keys and values that the ring holds. After the wait come queries and the segment's
// own rows. Queries are released after their last product with keys, so that those of the next item arrive
// during the last product with values. Results of splits are written as they lie in registers (SlotOutput),
// 512 bytes a store of a warp, and merged by a second kernel that has found out its part when the first one
// ends.
//
// Bytes: every key block that a tile sees is read once per tile. Per key block of 64 x 256 and 128 rows: 64
// KiB and 8.4 MFLOP, some 2,050 cycles of the tensor cores.
#pragma once

#include <cuda.h>

#include <algorithm>

#include "kernels/attention/attention_merge.cuh"
#include "kernels/attention/attention_plan.cuh"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/ptx.cuh"
#include "kernels/device/cuda/shared_tile.cuh"
#include "kernels/device/cuda/tensor_map.h"
#include "kernels/device/cuda/wgmma.cuh"

namespace dflash {
namespace {

constexpr int kGroupThreads = 128;  // a warpgroup
constexpr int kGroups = 2;          // that compute, at most
constexpr int kGroupRows = kMaxWgmmaRows / kGroups;
constexpr int kWgmmaThreads = (1 + kGroups) * kGroupThreads;
constexpr int kGatherThreads = kGroupThreads - 32;  // warps 1 to 3 of the first warpgroup
constexpr int kGatherBarrier = 1;                   // a named barrier of theirs

// Announces bytes to a barrier without arriving.
__device__ __forceinline__ void ExpectBytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Of the launch: warps that compute.
__device__ __forceinline__ uint32_t ConsumerWarps() { return (blockDim.x - kGroupThreads) / 32; }

// The box of a tensor map of heads (MakeHeadsTensorMap) at (column, head, row).
__device__ __forceinline__ void CopyHeads(uint32_t to, const CUtensorMap* map, int32_t column, int32_t head,
                                          int32_t row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(map), "r"(column), "r"(head), "r"(row), "r"(barrier)
      : "memory");
}

template <int kDim>
struct WgmmaShape {
  static constexpr int kTileBytes = kAttentionBlock * 128;  // 64 rows x 64 columns
  static constexpr int kBlockBytes = kDim / 64 * kTileBytes;
  static constexpr int kStages = 1024 / kDim;                  // half of them keys
  static constexpr int kQueryTileBytes = kMaxWgmmaRows * 128;  // all rows x 64 columns
  static constexpr int kQueryBytes = kDim / 64 * kQueryTileBytes;
  static constexpr int kSharedBytes = 1024 + kQueryBytes + kStages * kBlockBytes;
};

// In this order, in all threads: the merge that follows relies on what was before this kernel.
__device__ __forceinline__ void FollowPreviousKernel() {
  WaitForPreviousKernel();
  LetNextKernelStart();
}

// All barriers of a block. `full` and `empty`: of a stage of the ring; `gather`: own keys and values of a
// pair of stages are wanted from the gathering warps.
template <int kStages>
struct Barriers {
  uint64_t full[kStages], empty[kStages], gather[kStages / 2];
  uint64_t queries_full, queries_empty;
  uint64_t item_full[2], item_empty[2];
};

// An item as warp 0 hands it out; `slot`: where its partial results go, -1 at the end of all items.
struct HandedItem {
  Item item;
  int32_t slot;
};

// Place in the ring: counts stages from the kernel's begin.
template <int kStages>
struct RingPlace {
  uint32_t count = 0;
  __device__ __forceinline__ uint32_t Stage() const { return count % kStages; }
  __device__ __forceinline__ uint32_t Parity() const { return count / kStages % 2; }
  __device__ __forceinline__ RingPlace operator+(uint32_t n) const { return {count + n}; }
};

// Where a block comes from: a page, the segment's rows, or neither alone.
enum class Origin : uint8_t { kPage, kRows, kGathered };

struct BlockOrigin {
  int32_t page;
  Origin origin;
};

// Called by a whole warp for consecutive blocks: pages of 32 blocks are looked up at a time.
struct OriginWalk {
  int32_t base = -1, pages = -1;

  __device__ __forceinline__ BlockOrigin At(const AttentionTask& task, const Item& item, int32_t block) {
    if (base < 0 || block >= base + 32) {
      base = block;
      pages = PageOf(task, item, block + static_cast<int32_t>(threadIdx.x) % 32);
    }
    const int32_t page = __shfl_sync(0xffffffffu, pages, block - base);
    const int32_t first = block * kAttentionBlock, end = first + kAttentionBlock;
    const Segment& segment = item.segment;
    if (first >= segment.start_position && end <= segment.start_position + segment.row_count &&
        first >= item.first_key) {
      return {page, Origin::kRows};
    }
    const bool whole = page >= 0 && first >= item.first_key && end <= segment.start_position;
    return {page, whole ? Origin::kPage : Origin::kGathered};
  }
};

// A gathered block: rows [old_begin, old_end) lie in its page, [own_begin, own_end) are the segment's own.
// Nobody sees the others: their keys may be anything; their values, whose weights are 0, must be numbers.
struct GatheredRows {
  int32_t old_begin, old_end, own_begin, own_end;

  __device__ __forceinline__ GatheredRows(const Item& item, int32_t block) {
    const int32_t start = item.segment.start_position, first = block * kAttentionBlock;
    const auto row_of = [&](int32_t position) { return min(max(position - first, 0), kAttentionBlock); };
    old_begin = row_of(item.first_key);
    old_end = max(old_begin, row_of(start));
    own_begin = row_of(max(start, item.first_key));
    own_end = max(own_begin, row_of(start + item.segment.row_count));
  }
};

template <int kDim>
struct BlockState {
  using Shape = WgmmaShape<kDim>;
  using Place = RingPlace<Shape::kStages>;
  uint32_t queries, ring;  // shared addresses
  Barriers<Shape::kStages>* barriers;
  SharedRoom<HandedItem>* handed;  // two

  __device__ __forceinline__ uint32_t StageAt(const Place& place) const {
    return ring + place.Stage() * Shape::kBlockBytes;
  }
  __device__ __forceinline__ uint32_t Full(const Place& place) const {
    return ptx::SharedAddress(&barriers->full[place.Stage()]);
  }
  __device__ __forceinline__ uint32_t Empty(const Place& place) const {
    return ptx::SharedAddress(&barriers->empty[place.Stage()]);
  }
  __device__ __forceinline__ uint32_t Gather(const Place& place) const {
    return ptx::SharedAddress(&barriers->gather[place.Stage() / 2]);
  }
  // The item handed out as the n-th. Called by whole warps.
  __device__ __forceinline__ HandedItem TakeItem(uint32_t n) const {
    ptx::BarrierWaitEndless(ptx::SharedAddress(&barriers->item_full[n % 2]), n / 2 % 2);
    const HandedItem taken = handed[n % 2].Value();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::BarrierArrive(ptx::SharedAddress(&barriers->item_empty[n % 2]));
    return taken;
  }
  __device__ __forceinline__ void HandOut(uint32_t n, const HandedItem& item) const {
    ptx::BarrierWait(ptx::SharedAddress(&barriers->item_empty[n % 2]), (n / 2 % 2) ^ 1);
    handed[n % 2].Value() = item;
    ptx::BarrierArrive(ptx::SharedAddress(&barriers->item_full[n % 2]));
  }
};

// Lane 0 of warp 0: asks for the keys and values of a block; of a gathered one for those in its page, and has
// the others gathered.
template <int kDim>
__device__ __forceinline__ void BringBlock(const AttentionTask& task, const CUtensorMap* k_map,
                                           const CUtensorMap* v_map, const Item& item, int32_t block,
                                           const BlockOrigin& from, uint64_t policy,
                                           const typename BlockState<kDim>::Place& place,
                                           const BlockState<kDim>& state) {
  using Shape = WgmmaShape<kDim>;
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
    const auto at = place + kind;
    ptx::BarrierWait(state.Empty(at), at.Parity() ^ 1);
    const __nv_bfloat16* in_page =
        task.pool +
        ((int64_t{from.page} * task.kv_heads.value + item.kv_head) * 2 + kind) * (kAttentionBlock * kDim);
    if (from.origin == Origin::kGathered) {
      const GatheredRows rows(item, block);
      if (from.page < 0 || rows.old_begin == rows.old_end) continue;
      const auto bytes = static_cast<uint32_t>(rows.old_end - rows.old_begin) * 128;
      ExpectBytes(state.Full(at), bytes * (kDim / 64));  // before the others arrive there
#pragma unroll
      for (int tile = 0; tile < kDim / 64; ++tile) {
        ptx::CopyBulk(state.StageAt(at) + tile * Shape::kTileBytes + rows.old_begin * 128,
                      in_page + (tile * kAttentionBlock + rows.old_begin) * 64, bytes, state.Full(at),
                      ptx::kEvictNormal);
      }
      continue;
    }
    ptx::BarrierArriveExpecting(state.Full(at), Shape::kBlockBytes);
    if (from.origin == Origin::kPage) {
      ptx::CopyBulk(state.StageAt(at), in_page, Shape::kBlockBytes, state.Full(at), policy);
      continue;
    }
    const int32_t row = item.segment.first_row + (block * kAttentionBlock - item.segment.start_position);
#pragma unroll
    for (int tile = 0; tile < kDim / 64; ++tile) {
      ptx::CopyTile(state.StageAt(at) + tile * Shape::kTileBytes, kind == 0 ? k_map : v_map,
                    item.kv_head * kDim + tile * 64, row, state.Full(at), ptx::kEvictNormal);
    }
  }
  if (from.origin == Origin::kGathered) ptx::BarrierArrive(state.Gather(place));
}

// Warp 0: hands out items, copies pages and whole blocks of rows.
template <int kDim>
__device__ __forceinline__ void CopyBlocks(const AttentionTask& task, const CUtensorMap* k_map,
                                           const CUtensorMap* v_map, ItemTable& table,
                                           const BlockState<kDim>& state) {
  using Shape = WgmmaShape<kDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  bool has_waited = !task.context_settled;
  if (has_waited) FollowPreviousKernel();
  BuildItemTable(task, table);
  const bool is_split = IsSplit(task, table);
  const int32_t items = is_split ? table.of_splits[task.segment_count] : table.of_tiles[task.segment_count];
  const bool is_counted = items > static_cast<int32_t>(gridDim.x);
  // Keys that are read once leave the second-level cache to partial results.
  const uint64_t policy = is_split ? ptx::kEvictFirst : ptx::kEvictNormal;
  typename BlockState<kDim>::Place place;
  auto index = static_cast<int32_t>(blockIdx.x);
  uint32_t n = 0;
  for (; index < items; ++n) {
    const Item item = ItemAt(task, table, is_split, index);
    if (lane == 0) state.HandOut(n, {item, is_split ? item.slot : static_cast<int32_t>(blockIdx.x)});
    OriginWalk walk;
    int32_t block = item.first_block;
    const auto bring = [&](const BlockOrigin& from) {
      if (lane == 0) BringBlock(task, k_map, v_map, item, block, from, policy, place, state);
      ++block;
      place = place + 2;
    };
    if (!has_waited) {  // blocks that the ring has room for, as long as pages have a part in them
      while (block < item.end_block && block < item.first_block + Shape::kStages / 2) {
        const BlockOrigin from = walk.At(task, item, block);
        if (from.origin == Origin::kRows) break;
        bring(from);
      }
      FollowPreviousKernel();
      has_waited = true;
    }
    // The next item is taken when the last blocks are asked for: earlier, and a block with a long item would
    // keep another from those that are free.
    int32_t next = is_counted ? -1 : items;
    const auto take_next = [&] {
      if (next < 0) {
        next = items;
        if (lane == 0) next = static_cast<int32_t>(gridDim.x) + atomicAdd(task.counters, 1);
      }
    };
    while (block < item.end_block) {
      if (block + Shape::kStages / 2 >= item.end_block) take_next();
      bring(walk.At(task, item, block));
    }
    take_next();
    index = __shfl_sync(0xffffffffu, next, 0);
  }
  if (!has_waited) FollowPreviousKernel();
  if (lane != 0) return;
  HandedItem none = {};
  none.slot = -1;
  state.HandOut(n, none);
  if (is_counted) {
    __threadfence();
    if (atomicAdd(task.counters + 1, 1) == static_cast<int32_t>(gridDim.x) - 1) {
      task.counters[0] = 0;
      task.counters[1] = 0;
    }
  }
}

// Warps 1 to 3.
template <int kDim>
__device__ __forceinline__ void GatherRows(const AttentionTask& task, const CUtensorMap* q_map,
                                           const BlockState<kDim>& state) {
  using Shape = WgmmaShape<kDim>;
  constexpr int kPieces = kDim / 8, kRowsAtOnce = kGatherThreads / kPieces;
  const int thread = static_cast<int>(threadIdx.x) - 32, piece = thread % kPieces,
            lane_row = thread / kPieces;
  const auto offset = [&](int row) {
    return static_cast<uint32_t>(piece / 8 * Shape::kTileBytes + row * 128 + ((piece % 8) ^ (row & 7)) * 16);
  };
  typename BlockState<kDim>::Place place;
  uint32_t gather_parity = 0;  // one bit for each pair of stages
  for (uint32_t n = 0;; ++n) {
    const auto [item, slot] = state.TakeItem(n);
    if (slot < 0) break;
    if (thread == 0) {
      // Whole tiles: rows beyond the item's hold anything, nobody reads what becomes of them.
      const uint32_t full = ptx::SharedAddress(&state.barriers->queries_full);
      ptx::BarrierWait(ptx::SharedAddress(&state.barriers->queries_empty), n % 2 ^ 1);
      ptx::BarrierArriveExpecting(full, static_cast<uint32_t>(task.tile_rows.value * (kDim * 2)));
#pragma unroll
      for (int tile = 0; tile < kDim / 64; ++tile) {
        CopyHeads(state.queries + tile * Shape::kQueryTileBytes, q_map, tile * 64,
                  item.kv_head * task.group.value, item.segment.first_row + item.Token(task, 0), full);
      }
    }

    OriginWalk walk;
    for (int32_t block = item.first_block; block < item.end_block; ++block, place = place + 2) {
      const BlockOrigin from = walk.At(task, item, block);
      if (from.origin != Origin::kGathered) continue;
      const uint32_t pair = place.Stage() / 2;
      ptx::BarrierWait(state.Gather(place), gather_parity >> pair & 1);
      gather_parity ^= 1u << pair;
      const GatheredRows rows(item, block);
      const uint32_t keys = state.StageAt(place), values = state.StageAt(place + 1);
      const int64_t column = int64_t{item.kv_head} * kDim + piece * 8;
      for (int row = rows.own_begin + lane_row; row < rows.own_end; row += kRowsAtOnce) {
        const int64_t from_row =
            item.segment.first_row + (block * kAttentionBlock + row - item.segment.start_position);
        ptx::CopyAsync16(keys + offset(row), task.block_k.Row(from_row) + column, true);
        ptx::CopyAsync16(values + offset(row), task.block_v.Row(from_row) + column, true);
      }
      ptx::CopyAsyncCommit();
      for (int row = lane_row; row < kAttentionBlock; row += kRowsAtOnce) {
        const bool is_old = row >= rows.old_begin && row < rows.old_end;
        if ((is_old && from.page >= 0) || (row >= rows.own_begin && row < rows.own_end)) continue;
        if (is_old) ptx::StoreShared16(keys + offset(row), make_uint4(0, 0, 0, 0));  // no page: zeros
        ptx::StoreShared16(values + offset(row), make_uint4(0, 0, 0, 0));
      }
      ptx::CopyAsyncWait<0>();
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // products see what was written
      ptx::NamedBarrier(kGatherBarrier, kGatherThreads);
      if (thread == 0) {
        ptx::BarrierArrive(state.Full(place));
        ptx::BarrierArrive(state.Full(place + 1));
      }
    }
  }
}

// What a thread of a computing warpgroup holds: two of its group's rows, Row(0) and Row(1). Of outputs and
// scores, element 4 j + 2 half + e is of Row(half), column 8 j + 2 (lane mod 4) + e.
template <int kDim>
struct GroupTile {
  using Shape = WgmmaShape<kDim>;
  using Place = typename BlockState<kDim>::Place;
  float outputs[kDim / 2];
  float scores[kAttentionBlock / 2];
  uint32_t weights[kAttentionBlock / 16][4];
  float maximum[2];  // of scaled scores, in units of log2
  float sum[2];      // over this thread's keys alone until Finish
  KeyRange visible[2];

  static __device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __device__ __forceinline__ int Group() { return static_cast<int>(threadIdx.x) / kGroupThreads - 1; }
  static __device__ __forceinline__ int Row(int half) {  // of the tile
    return Group() * kGroupRows + static_cast<int>(threadIdx.x) % kGroupThreads / 32 * 16 + Lane() / 4 +
           8 * half;
  }

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) outputs[i] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      maximum[half] = -INFINITY;
      sum[half] = 0;
    }
  }

  __device__ __forceinline__ void StartScores(uint32_t queries, uint32_t keys) {
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      ptx::Wgmma<kAttentionBlock>::Run(
          scores, ptx::SwizzledOperand(queries + k / 4 * Shape::kQueryTileBytes) + k % 4 * 2,
          ptx::SwizzledOperand(keys + k / 4 * Shape::kTileBytes) + k % 4 * 2, k > 0);
    }
    ptx::WgmmaCommit();
  }

  __device__ __forceinline__ void StartOutputs(uint32_t values) {
#pragma unroll
    for (int k = 0; k < kAttentionBlock / 16; ++k) {
      ptx::WgmmaRegisters<kDim>::Run(
          outputs, weights[k], ptx::SwizzledTransposedOperand(values + k * (16 * 128), Shape::kTileBytes), 1);
    }
    ptx::WgmmaCommit();
  }

  // Scores of keys that a row does not see become -infinity.
  __device__ __forceinline__ void Mask(int32_t block) {
    const int32_t first_key = block * kAttentionBlock + Lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kAttentionBlock / 2; ++i) {
      const int32_t key = first_key + i / 4 * 8 + i % 2;
      const KeyRange& keys = visible[i / 2 % 2];
      if (key < keys.first || key >= keys.end) scores[i] = -INFINITY;
    }
  }

  // Turns scores into weights relative to the new maxima, still as floats, and says by what outputs so far
  // are to be multiplied. A row that sees nothing of the block keeps all its bits: factor 1, weights 0.
  __device__ __forceinline__ void Weigh(float scale_log2, float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float best = -INFINITY;
#pragma unroll
      for (int j = 0; j < kAttentionBlock / 8; ++j) {
        best = fmaxf(best, fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
      }
      best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1));
      best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2));
      const float before = maximum[half], now = fmaxf(before, best * scale_log2);
      const float reference = now == -INFINITY ? 0.0f : now;
      maximum[half] = now;
      factor[half] = ptx::Exp2(before - reference);
#pragma unroll
      for (int j = 0; j < kAttentionBlock / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[4 * j + 2 * half + e];
          score = ptx::Exp2(fmaf(score, scale_log2, -reference));
        }
      }
    }
  }

  // Rounds the weights for the next product; sums are those of the rounded weights, so that they add up to 1.
  __device__ __forceinline__ void PackWeights(const float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = 0;
#pragma unroll
      for (int j = 0; j < kAttentionBlock / 8; ++j) {
        const uint32_t pair = PackBf16(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]);
        weights[j / 2][j % 2 * 2 + half] = pair;
        total += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xffff0000u);
      }
      sum[half] = fmaf(sum[half], factor[half], total);
    }
  }

  __device__ __forceinline__ void Rescale(const float (&factor)[2]) {
    if (!__any_sync(0xffffffffu, factor[0] != 1 || factor[1] != 1)) return;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) outputs[i] *= factor[i / 2 % 2];
  }

  static __device__ __forceinline__ void Release(uint32_t empty) {
    __syncwarp();
    if (Lane() == 0) ptx::BarrierArrive(empty);
  }

  static __device__ __forceinline__ void ReleaseQueries(const BlockState<kDim>& state) {
    Release(ptx::SharedAddress(&state.barriers->queries_empty));
  }

  // Blocks [first, end), at least one, whose keys lie at `place`.
  __device__ __forceinline__ void Run(const BlockState<kDim>& state, const Item& item, float scale_log2,
                                      int32_t first, int32_t end, Place place) {
    const uint32_t queries = state.queries + Group() * (kGroupRows * 128);
    float factor[2];
    ptx::BarrierWaitEndless(state.Full(place), place.Parity());
    ptx::WgmmaFence();
    StartScores(queries, state.StageAt(place));
    ptx::WgmmaWait<0>();
    ptx::KeepInPlace(scores);
    Release(state.Empty(place));
    if (first + 1 == item.end_block) ReleaseQueries(state);
    if (!item.IsMaskFree(first)) Mask(first);
    Weigh(scale_log2, factor);
    PackWeights(factor);
    for (int32_t block = first + 1; block < end; ++block, place = place + 2) {
      const Place keys = place + 2, values = place + 1;
      ptx::BarrierWaitEndless(state.Full(values), values.Parity());
      ptx::BarrierWaitEndless(state.Full(keys), keys.Parity());
      ptx::KeepInPlace(outputs);
      ptx::WgmmaFence();
      StartScores(queries, state.StageAt(keys));
      StartOutputs(state.StageAt(values));
      ptx::WgmmaWait<1>();
      ptx::KeepInPlace(scores);
      Release(state.Empty(keys));
      if (block + 1 == item.end_block) ReleaseQueries(state);
      if (!item.IsMaskFree(block)) Mask(block);
      Weigh(scale_log2, factor);
      ptx::WgmmaWait<0>();
      ptx::KeepInPlace(outputs);
      Release(state.Empty(values));
      ptx::KeepInPlace(scores);  // the product has read the weights before
      PackWeights(factor);
      Rescale(factor);
    }
    const Place values = place + 1;
    ptx::BarrierWaitEndless(state.Full(values), values.Parity());
    ptx::KeepInPlace(outputs);
    ptx::WgmmaFence();
    StartOutputs(state.StageAt(values));
    ptx::WgmmaWait<0>();
    ptx::KeepInPlace(outputs);
    Release(state.Empty(values));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
    }
  }

  // The thread's outputs of columns 16 i .. 16 i + 15, as they lie in a slot.
  __device__ __forceinline__ float4 Part(int i, int half) const {
    return make_float4(outputs[8 * i + 2 * half], outputs[8 * i + 2 * half + 1],
                       outputs[8 * i + 4 + 2 * half], outputs[8 * i + 5 + 2 * half]);
  }
  // Where Part(0, half) lies; every further part 128 floats behind.
  static __device__ __forceinline__ float4* PartsOf(float* slot, int half) {
    return reinterpret_cast<float4*>(slot + SlotOutput<kDim>(Row(half), Lane() % 4 * 2));
  }

  __device__ __forceinline__ void WritePartial(float* slot, int rows, int32_t tile_rows) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (Row(half) >= rows) continue;
      float4* parts = PartsOf(slot, half);
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) parts[32 * i] = Part(i, half);
      if (Lane() % 4 != 0) continue;
      slot[SlotMaximum<kDim>(tile_rows, Row(half))] = maximum[half];
      slot[SlotSum<kDim>(tile_rows, Row(half))] = sum[half];
    }
  }

  // The split is merged into what `slot` holds of the splits before it (nothing when `is_first`); outputs lie
  // in the slot then, `total_sum` is theirs.
  __device__ __forceinline__ void MergeInto(float* slot, int rows, bool is_first, float (&total_maximum)[2],
                                            float (&total_sum)[2]) {
    MergeFactors factors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (is_first) total_sum[half] = 0;
      factors[half] = MergeRow(total_maximum[half], total_sum[half], maximum[half], sum[half]);
    }
    // A few at a time: all at once there are no registers.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (Row(half) >= rows) continue;
      float4* parts = PartsOf(slot, half);
      const MergeFactors& f = factors[half];
#pragma unroll
      for (int i = 0; i < kDim / 16; i += 4) {
        float4 before[4] = {};
        if (!is_first) {
#pragma unroll
          for (int j = 0; j < 4; ++j) before[j] = parts[32 * (i + j)];
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float4 own = Part(i + j, half);
          parts[32 * (i + j)] = make_float4(
              fmaf(own.x, f.take, before[j].x * f.keep), fmaf(own.y, f.take, before[j].y * f.keep),
              fmaf(own.z, f.take, before[j].z * f.keep), fmaf(own.w, f.take, before[j].w * f.keep));
        }
        asm volatile("" ::: "memory");
      }
    }
  }

  __device__ __forceinline__ void WriteOutputs(const AttentionTask& task, const Item& item) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = Row(half);
      if (row >= item.rows) continue;
      const int64_t to = item.segment.first_row + item.Token(task, row);
      const int32_t head = item.Head(task, row);
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        WriteRow(task, to, head, 8 * j + Lane() % 4 * 2, Normalized(outputs[4 * j + 2 * half], sum[half]),
                 Normalized(outputs[4 * j + 2 * half + 1], sum[half]));
      }
    }
  }
};

// The outputs of an item whose splits have been merged into `slot`; the same thread has written what it
// reads.
template <int kDim>
__device__ __forceinline__ void WriteMerged(const AttentionTask& task, const Item& item, float* slot,
                                            const float (&sum)[2]) {
  using Tile = GroupTile<kDim>;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = Tile::Row(half);
    if (row >= item.rows) continue;
    const int64_t to = item.segment.first_row + item.Token(task, row);
    const int32_t head = item.Head(task, row);
    const float4* parts = Tile::PartsOf(slot, half);
#pragma unroll 4
    for (int i = 0; i < kDim / 16; ++i) {
      const float4 part = parts[32 * i];
      const int column = 16 * i + Tile::Lane() % 4 * 2;
      WriteRow(task, to, head, column, Normalized(part.x, sum[half]), Normalized(part.y, sum[half]));
      WriteRow(task, to, head, column + 8, Normalized(part.z, sum[half]), Normalized(part.w, sum[half]));
    }
  }
}

template <int kDim>
__device__ __forceinline__ void Compute(const AttentionTask& task, const BlockState<kDim>& state) {
  using Tile = GroupTile<kDim>;
  typename BlockState<kDim>::Place place;
  for (uint32_t n = 0;; ++n) {
    const HandedItem handed = state.TakeItem(n);
    if (handed.slot < 0) break;
    const Item& item = handed.item;
    const int32_t blocks = item.end_block - item.first_block;
    const uint32_t queries_full = ptx::SharedAddress(&state.barriers->queries_full);
    const bool has_work = blocks > 0 && Tile::Group() * kGroupRows < item.rows;
    if (!has_work) {
      ptx::BarrierWaitEndless(queries_full, n % 2);
      Tile::ReleaseQueries(state);
      for (int32_t i = 0; i < 2 * blocks; ++i, place = place + 1) {  // the ring goes on
        ptx::BarrierWaitEndless(state.Full(place), place.Parity());
        Tile::Release(state.Empty(place));
      }
      if (Tile::Group() * kGroupRows >= item.rows) continue;
    }
    Tile tile;
    tile.Clear();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t position = item.Position(task, Tile::Row(half));
      tile.visible[half] = VisibleKeys(task, item.segment, item.context_start, position, position);
    }
    float* slot = task.workspace + handed.slot * SlotFloats<kDim>(task.tile_rows.value);
    float total_maximum[2] = {}, total_sum[2] = {};
    bool is_first = true;
    if (has_work) ptx::BarrierWaitEndless(queries_full, n % 2);
    for (int32_t block = item.first_block; block < item.end_block;) {
      const int32_t end = min(item.end_block, task.schedule.FirstBlock(task.schedule.SplitOf(block) + 1));
      tile.Run(state, item, task.scale_log2, block, end, place);
      place = place + static_cast<uint32_t>(2 * (end - block));
      block = end;
      const bool is_last = block == item.end_block;
      if (!item.is_final || (is_first && is_last)) break;
      tile.MergeInto(slot, item.rows, is_first, total_maximum, total_sum);
      is_first = false;
      if (!is_last) tile.Clear();
    }
    if (!item.is_final) {
      tile.WritePartial(slot, item.rows, task.tile_rows.value);
    } else if (is_first) {
      tile.WriteOutputs(task, item);
    } else {
      WriteMerged<kDim>(task, item, slot, total_sum);
    }
  }
}

template <int kDim>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    WgmmaAttentionKernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                         const __grid_constant__ CUtensorMap v_map, const AttentionTask task) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Shape = WgmmaShape<kDim>;
  extern __shared__ uint8_t shared_memory[];
  __shared__ ItemTable table;
  __shared__ Barriers<Shape::kStages> barriers;
  __shared__ SharedRoom<HandedItem> handed[2];
  const uint32_t shared = (ptx::SharedAddress(shared_memory) + 1023u) & ~1023u;
  const BlockState<kDim> state = {shared, shared + Shape::kQueryBytes, &barriers, handed};
  if (threadIdx.x == 0) {
    ptx::PrefetchTensorMap(&q_map);
    ptx::PrefetchTensorMap(&k_map);
    ptx::PrefetchTensorMap(&v_map);
    for (int i = 0; i < Shape::kStages; ++i) {
      ptx::BarrierInit(ptx::SharedAddress(&barriers.full[i]), 1);
      ptx::BarrierInit(ptx::SharedAddress(&barriers.empty[i]), ConsumerWarps());
    }
    for (int i = 0; i < Shape::kStages / 2; ++i) ptx::BarrierInit(ptx::SharedAddress(&barriers.gather[i]), 1);
    ptx::BarrierInit(ptx::SharedAddress(&barriers.queries_full), 1);
    ptx::BarrierInit(ptx::SharedAddress(&barriers.queries_empty), ConsumerWarps());
    for (int i = 0; i < 2; ++i) {
      ptx::BarrierInit(ptx::SharedAddress(&barriers.item_full[i]), 1);
      ptx::BarrierInit(ptx::SharedAddress(&barriers.item_empty[i]), ConsumerWarps() + kGatherThreads / 32);
    }
    ptx::BarrierInitFence();
  }
  __syncthreads();
  // The same for a whole warp, in a way that the compiler sees.
  if (__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroupThreads, 0) == 0) {
    ptx::GiveRegisters<56>();
    if (threadIdx.x < 32) {
      CopyBlocks<kDim>(task, &k_map, &v_map, table, state);
    } else {
      FollowPreviousKernel();
      GatherRows<kDim>(task, &q_map, state);
    }
  } else {
    ptx::TakeRegisters<224>();
    FollowPreviousKernel();
    Compute<kDim>(task, state);
  }
#endif
}

}  // namespace

template <int kDim>
cudaError_t LaunchWgmmaAttention(AttentionTask task, int32_t tile_tokens, int64_t items, ConstMatrixView q,
                                 ConstMatrixView block_k, ConstMatrixView block_v,
                                 const CudaContext& context) {
  using Shape = WgmmaShape<kDim>;
  const auto kernel = WgmmaAttentionKernel<kDim>;
  const int64_t blocks = std::min<int64_t>(items, context.multiprocessors);
  const int32_t tile_rows = task.tile_rows.value;
  const int64_t slots = kWorkspaceBytes / (SlotFloats<kDim>(tile_rows) * static_cast<int64_t>(sizeof(float)));
  if (slots < blocks) return cudaErrorNotSupported;
  task.slots = static_cast<int32_t>(slots);
  // Set at every call: it belongs to the device, and costs less than remembering where it has been set.
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (error != cudaSuccess) return error;
  CUtensorMap q_map, k_map, v_map;
  error = MakeHeadsTensorMap(q, kDim, task.group.value, tile_tokens, &q_map);
  if (error == cudaSuccess) error = MakeRowsTensorMap(block_k, kAttentionBlock, BoxLayout::kSwizzled, &k_map);
  if (error == cudaSuccess) error = MakeRowsTensorMap(block_v, kAttentionBlock, BoxLayout::kSwizzled, &v_map);
  if (error != cudaSuccess) return error;
  const int groups = tile_rows > kGroupRows ? kGroups : 1;
  const LaunchShape shape = {.grid = Grid(blocks),
                             .block = dim3(static_cast<unsigned>((1 + groups) * kGroupThreads)),
                             .shared_bytes = Shape::kSharedBytes};
  error = Launch(context, shape, kernel, q_map, k_map, v_map, task);
  if (error != cudaSuccess || !task.may_split) return error;
  return LaunchMerge<kDim>(task, q.rows, context);
}

}  // namespace dflash
