// Product of small float32 matrices in one fixed order, for kernel bodies (kernels/device/cpu/simd.h).
#pragma once

#include <cstdint>

#include "kernels/device/cpu/simd.h"

namespace dflash::DFLASH_SIMD_NAMESPACE {

// Rows and columns that one pass over k keeps in registers: 16 accumulators of AVX-512 (of 32 registers) or 8
// of AVX2 (of 16), enough to hide the latency of fma. Few columns take more rows.
#if defined(__AVX512F__)
inline constexpr int kTileVectors = 4;
inline constexpr int kTileRowsOfOne = 8;  // one vector of columns
#else
inline constexpr int kTileVectors = 1;
inline constexpr int kTileRowsOfOne = 4;
#endif

template <int kRows, int kVectors>
DFLASH_SIMD_INLINE void TileProductBlock(const float* a, int64_t a_row, int64_t a_k, const float* b,
                                         int64_t b_row, int64_t depth, float* c, int64_t c_row) {
  F32x16 sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = Load(c + r * c_row + v * kLanes);
  }
  for (int64_t k = 0; k < depth; ++k) {
    F32x16 column[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) column[v] = Load(b + k * b_row + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F32x16 factor = F32x16::Broadcast(a[r * a_row + k * a_k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Fma(factor, column[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) Store(c + r * c_row + v * kLanes, sum[r][v]);
  }
}

template <int kVectors>
DFLASH_SIMD_INLINE void TileProductColumns(const float* a, int64_t a_row, int64_t a_k, const float* b,
                                           int64_t b_row, int64_t rows, int64_t depth, float* c,
                                           int64_t c_row) {
  if constexpr (kVectors < kTileVectors) {
    constexpr int kMany = kVectors == 1 ? kTileRowsOfOne : 8;
    for (; rows >= kMany; rows -= kMany, a += kMany * a_row, c += kMany * c_row) {
      TileProductBlock<kMany, kVectors>(a, a_row, a_k, b, b_row, depth, c, c_row);
    }
  }
  for (; rows >= 4; rows -= 4, a += 4 * a_row, c += 4 * c_row) {
    TileProductBlock<4, kVectors>(a, a_row, a_k, b, b_row, depth, c, c_row);
  }
  if (rows == 3) TileProductBlock<3, kVectors>(a, a_row, a_k, b, b_row, depth, c, c_row);
  if (rows == 2) TileProductBlock<2, kVectors>(a, a_row, a_k, b, b_row, depth, c, c_row);
  if (rows == 1) TileProductBlock<1, kVectors>(a, a_row, a_k, b, b_row, depth, c, c_row);
}

// c[r c_row + n] += sum_k a[r a_row + k a_k] b[k b_row + n] for r in [0, rows), n in [0, cols): k in [0,
// depth) ascending, one fma a step, so the bits of an element do not depend on rows, cols or the instruction
// set. cols is a multiple of 16. c overlaps neither a nor b.
static void TileProduct(const float* a, int64_t a_row, int64_t a_k, const float* b, int64_t b_row,
                        int64_t rows, int64_t depth, int64_t cols, float* c, int64_t c_row) {
  if (depth <= 0) return;
  int64_t n = 0;
  for (; n + kTileVectors * kLanes <= cols; n += kTileVectors * kLanes) {
    TileProductColumns<kTileVectors>(a, a_row, a_k, b + n, b_row, rows, depth, c + n, c_row);
  }
  if constexpr (kTileVectors > 2) {
    for (; n + 2 * kLanes <= cols; n += 2 * kLanes) {
      TileProductColumns<2>(a, a_row, a_k, b + n, b_row, rows, depth, c + n, c_row);
    }
  }
  for (; n < cols; n += kLanes) {
    TileProductColumns<1>(a, a_row, a_k, b + n, b_row, rows, depth, c + n, c_row);
  }
}

}  // namespace dflash::DFLASH_SIMD_NAMESPACE
