// How the CUDA backend divides attention into work. Private to kernels/attention.
//
// Rows: the queries of the `group` heads that share a KV head are packed, token by token, and cut into tiles
// of rows of the matrix instruction. Keys: blocks of 64 on the absolute grid, reduced in two levels: blocks
// into splits, splits into the result, both in ascending order. Where a split begins is a function of the
// position alone, so the arithmetic of a row depends on nothing but the keys that it sees; who computes which
// split, and whether splits meet in registers or in the workspace, changes no bit.
//
// Pages: [kv_heads][keys, values][padded head_dim / 64][64 tokens][64], bf16, zeros in the padding. The
// 16-byte piece p of a token's 128 bytes lies at piece p xor (token mod 8): what warpgroup products read in
// shared memory, so that the keys of a whole block are one contiguous copy, and so are the values.
//
// Two kernels: attention_wgmma.cuh for head_dim 128 and 256 on compute capability 9.0, with aligned operands;
// attention_kernel.cuh for everything else. Partial results of either are merged by attention_merge.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "base/matrix_view.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/attention_splits_cuda.h"
#include "kernels/batch/segments.h"
#include "kernels/device/cuda/context.h"
#include "kernels/device/cuda/vector.cuh"

namespace dflash {

inline constexpr int kAttentionBlock = 64;  // keys
inline constexpr int kMaxAttentionSegments = 1024;
inline constexpr int kMaxHeadDim = 256;

// The head_dim that the kernels compute with: 64, 128 or 256 (beyond that there are pages, but no kernel).
constexpr int64_t PaddedHeadDim(int64_t head_dim) {
  if (head_dim <= 64) return 64;
  return head_dim <= 128 ? 128 : (head_dim + 255) / 256 * 256;
}

// Elements from the beginning of a page's keys or values of one head to 8 elements of a token.
__host__ __device__ constexpr int64_t PagePiece(int64_t token, int64_t piece) {
  return piece / 8 * (kAttentionBlock * 64) + token * 64 + ((piece % 8) ^ (token % 8)) * 8;
}

// Division of numbers below 2^31 by one that the host knows: a multiplication. Source: T. Granlund, P. L.
// Montgomery, "Division by Invariant Integers using Multiplication", 1994.
struct Divisor {
  int32_t value = 1;
  uint32_t multiplier = 0, shift = 0;

  Divisor() = default;
  explicit Divisor(int64_t by) : value(static_cast<int32_t>(by)) {
    if (by == 0) return;
    while (int64_t{1} << shift < by) ++shift;
    multiplier =
        static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - static_cast<uint64_t>(by))) /
                                  static_cast<uint64_t>(by) +
                              1);
  }
#if defined(__CUDACC__)
  __device__ __forceinline__ int32_t Of(int32_t number) const {
    const auto n = static_cast<uint32_t>(number);
    return static_cast<int32_t>((__umulhi(n, multiplier) + n) >> shift);
  }
#endif
};

struct AttentionTask {
  Bf16Rows q, block_k, block_v, out;
  bool q_aligned, block_aligned, out_aligned;  // heads of whole 16-byte pieces; out: of pairs
  Bf16Rows gate;                               // null: none; the merge applies it
  bool gate_aligned;                           // heads of pairs
  const __nv_bfloat16* pool;
  int32_t page_count, head_dim;
  Divisor kv_heads, group;  // query heads that share a KV head
  Divisor tile_rows;        // packed; of a slot of the workspace as well
  Divisor half_rows;        // of the tiles taken where they do not fill half the machine; value 0: none are
  int32_t multiprocessors;
  const Segment* segments;
  int32_t segment_count;
  const int32_t* context_starts;  // may be null
  const int32_t* pages;
  int32_t pages_per_slot;
  bool causal;
  int32_t window;  // 0: unlimited
  SplitSchedule schedule;
  float scale_log2;      // scale * log2(e)
  bool context_settled;  // ContextWritten::kBeforeLastNormAndRope
  bool may_split;        // partial results of splits may go through the workspace
  float* workspace;
  int32_t slots;      // partial results that the workspace holds
  int32_t* counters;  // two: the next item, blocks that are done; 0 before and after
};

// Launches for one padded head_dim; `m_tiles` in 1..3: tiles of 32 * m_tiles packed rows. `items`: an upper
// bound of the work items, `rows`: of the step.
template <int kDim>
cudaError_t LaunchAttention(AttentionTask task, int m_tiles, int64_t items, int64_t rows,
                            const CudaContext& context);
extern template cudaError_t LaunchAttention<64>(AttentionTask, int, int64_t, int64_t, const CudaContext&);
extern template cudaError_t LaunchAttention<128>(AttentionTask, int, int64_t, int64_t, const CudaContext&);
extern template cudaError_t LaunchAttention<256>(AttentionTask, int, int64_t, int64_t, const CudaContext&);

// The largest m_tiles that fit the shared memory which the device lets a block have; 0: none.
template <int kDim>
int AttentionTilesThatFit(int64_t shared_bytes);
extern template int AttentionTilesThatFit<64>(int64_t);
extern template int AttentionTilesThatFit<128>(int64_t);
extern template int AttentionTilesThatFit<256>(int64_t);

// The same for 128 and 256 with warpgroup products; tiles of `tile_tokens` rows of the step, with their group
// at most kMaxWgmmaRows packed rows. All operands aligned. q, block_k, block_v: as in task, for the copy
// engine.
inline constexpr int kMaxWgmmaRows = 128;
template <int kDim>
cudaError_t LaunchWgmmaAttention(AttentionTask task, int32_t tile_tokens, int64_t items, ConstMatrixView q,
                                 ConstMatrixView block_k, ConstMatrixView block_v,
                                 const CudaContext& context);
extern template cudaError_t LaunchWgmmaAttention<128>(AttentionTask, int32_t, int64_t, ConstMatrixView,
                                                      ConstMatrixView, ConstMatrixView, const CudaContext&);
extern template cudaError_t LaunchWgmmaAttention<256>(AttentionTask, int32_t, int64_t, ConstMatrixView,
                                                      ConstMatrixView, ConstMatrixView, const CudaContext&);

}  // namespace dflash
