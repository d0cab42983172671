// Included once per instruction set. A tile holds R rows x B blocks of sums in registers while k runs; the
// order of the sum of one output is the same in every tile: 0, then one fma per k, ascending.
#pragma once

#include "kernels/device/cpu/simd.h"
#include "kernels/linear/linear_cpu.h"

namespace dflash {
namespace DFLASH_SIMD_NAMESPACE {
namespace {

#if defined(__AVX512F__)
inline constexpr int kMaxRows = 12;   // 12 rows x 1 block x 2 vectors = 24 of 32 registers
inline constexpr int kMaxBlocks = 4;  // few rows: enough independent sums to hide the latency of fma
inline constexpr int kWideRows = 3;   // up to here kMaxBlocks blocks at once
inline constexpr int kTallBlocks = 1;
#elif defined(__AVX2__)
inline constexpr int kMaxRows = 3;  // 3 rows x 1 block x 4 registers = 12 of 16
inline constexpr int kMaxBlocks = 2;
inline constexpr int kWideRows = 1;
inline constexpr int kTallBlocks = 1;
#else
inline constexpr int kMaxRows = 1;
inline constexpr int kMaxBlocks = 1;
inline constexpr int kWideRows = 1;
inline constexpr int kTallBlocks = 1;  // blocks at once for more rows
#endif

// With several row tiles k runs in chunks, so that the rows' part of a chunk (outer loop) and the weights of
// the blocks at hand (for all row tiles) stay in the second-level cache. The sums of a chunk continue those
// in y.
inline constexpr int64_t kChunk = 1024;

struct Bf16Words {
  static constexpr int64_t kBytes = 2;
  static DFLASH_SIMD_INLINE void Load32(const void* p, F32x16* low, F32x16* high) {
    const I32x16 words = BitsOf(Load(static_cast<const float*>(p)));
    *low = FromBits(words << 16);
    *high = FromBits(words & I32x16::Broadcast(static_cast<int32_t>(0xffff0000u)));
  }
};
struct Floats {
  static constexpr int64_t kBytes = 4;
  static DFLASH_SIMD_INLINE void Load32(const void* p, F32x16* low, F32x16* high) {
    *low = Load(static_cast<const float*>(p));
    *high = Load(static_cast<const float*>(p) + kLanes);
  }
};

DFLASH_SIMD_INLINE int LanesLeft(int64_t columns) {
  return columns >= kLanes ? kLanes : columns > 0 ? static_cast<int>(columns) : 0;
}

// Weights are fetched this far ahead: the hardware's own prefetching stops at every 4 KiB.
inline constexpr int64_t kPrefetchBytes = 2048;

// What a tile may touch of y: all of its columns, or the columns that there are (the last block of N).
template <bool kWhole>
struct OutputColumns {
  int64_t left;  // columns from the tile's first to the end
  DFLASH_SIMD_INLINE F32x16 Get(const float* y, int vector) const {
    if constexpr (kWhole) return Load(y + vector * kLanes);
    return LoadPartial(y + vector * kLanes, LanesLeft(left - vector * kLanes));
  }
  DFLASH_SIMD_INLINE void Put(float* y, int vector, F32x16 value) const {
    if constexpr (kWhole) return Store(y + vector * kLanes, value);
    const int lanes = LanesLeft(left - vector * kLanes);
    if (lanes > 0) StorePartial(y + vector * kLanes, value, lanes);
  }
};

// Adds k in [k_begin, k_end) to the sums of R rows x B blocks; they start at 0 or at what y holds.
template <typename Weights, int R, int B, bool kWhole>
DFLASH_SIMD_INLINE void TileOfColumns(const LinearTask& task, int64_t row, int64_t block, int64_t k_begin,
                                      int64_t k_end) {
  const int64_t depth = task.in_features;
  const int64_t step = kLinearBlock * Weights::kBytes;
  F32x16 sum[R][2 * B];
  const float* x[R];
  const char* w[B];
#pragma GCC unroll 8
  for (int b = 0; b < B; ++b) {
    w[b] = static_cast<const char*>(task.packed) + ((block + b) * depth + k_begin) * step;
  }
  const int64_t column = block * kLinearBlock;
  const OutputColumns<kWhole> columns = {task.out_features - column};
  float* const first_y = task.y + row * task.y_stride + column;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    x[r] = task.x + (row + r) * task.x_stride;
#pragma GCC unroll 8
    for (int v = 0; v < 2 * B; ++v) sum[r][v] = F32x16::Broadcast(0.0f);
  }
  if (k_begin > 0) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < 2 * B; ++v) sum[r][v] = columns.Get(first_y + r * task.y_stride, v);
    }
  }
  // Towards the end of these blocks the next ones begin: B blocks on, where k begins.
  const int64_t last_ahead = k_end - kPrefetchBytes / step;
  int64_t ahead = kPrefetchBytes;
  for (int64_t k = k_begin; k < k_end; ++k) {
    if (k == last_ahead) ahead += (B * depth - (k_end - k_begin)) * step;
    F32x16 weight[2 * B];
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) {
      __builtin_prefetch(w[b] + ahead);
      Weights::Load32(w[b], &weight[2 * b], &weight[2 * b + 1]);
      w[b] += step;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const F32x16 factor = F32x16::Broadcast(x[r][k]);
#pragma GCC unroll 8
      for (int v = 0; v < 2 * B; ++v) sum[r][v] = Fma(factor, weight[v], sum[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * B; ++v) columns.Put(first_y + r * task.y_stride, v, sum[r][v]);
  }
}

template <typename Weights, int R, int B>
void Tile(const LinearTask& task, int64_t row, int64_t block, int64_t k_begin, int64_t k_end) {
  if ((block + B) * kLinearBlock <= task.out_features) {
    TileOfColumns<Weights, R, B, true>(task, row, block, k_begin, k_end);
  } else {
    TileOfColumns<Weights, R, B, false>(task, row, block, k_begin, k_end);
  }
}

// One tile of `rows` <= R rows.
template <typename Weights, int R, int B>
void TileOfRows(const LinearTask& task, int64_t rows, int64_t row, int64_t block, int64_t k_begin,
                int64_t k_end) {
  if constexpr (R > 1) {
    if (rows < R) return TileOfRows<Weights, R - 1, B>(task, rows, row, block, k_begin, k_end);
  }
  Tile<Weights, R, B>(task, row, block, k_begin, k_end);
}

// k in [k_begin, k_end) for all rows, B blocks at a time as long as there are B, then fewer.
template <typename Weights, int R, int B>
void Blocks(const LinearTask& task, int64_t block, int64_t end, int64_t k_begin, int64_t k_end) {
  const int64_t tiles = (task.rows + R - 1) / R;
  for (; block + B <= end; block += B) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      // Rows are spread evenly over the tiles.
      const int64_t row = task.rows * tile / tiles;
      const int64_t rows = task.rows * (tile + 1) / tiles - row;
      TileOfRows<Weights, R, B>(task, rows, row, block, k_begin, k_end);
    }
  }
  if constexpr (B > 1) Blocks<Weights, R, B / 2>(task, block, end, k_begin, k_end);
}

template <typename Weights, int R, int B>
void Chunks(const LinearTask& task) {
  const int64_t chunk = task.rows > R ? kChunk : task.in_features;
  for (int64_t k = 0; k < task.in_features; k += chunk) {
    Blocks<Weights, R, B>(task, task.first_block, task.first_block + task.block_count, k,
                          k + chunk < task.in_features ? k + chunk : task.in_features);
  }
}

template <typename Weights>
void RunLinear(const LinearTask& task) {
  if (task.rows <= kWideRows) {
    Chunks<Weights, kWideRows, kMaxBlocks>(task);
  } else {
    Chunks<Weights, kMaxRows, kTallBlocks>(task);
  }
}

}  // namespace
}  // namespace DFLASH_SIMD_NAMESPACE

const LinearKernels DFLASH_SIMD_NAME(kLinear) = {
    DFLASH_SIMD_NAMESPACE::RunLinear<DFLASH_SIMD_NAMESPACE::Bf16Words>,
    DFLASH_SIMD_NAMESPACE::RunLinear<DFLASH_SIMD_NAMESPACE::Floats>};

}  // namespace dflash
