// Included by attention_cpu_{scalar,avx2,avx512}.cc.
#pragma once

#include <cstdint>

#include "kernels/attention/attention_cpu.h"
#include "kernels/device/cpu/simd.h"
#include "kernels/device/cpu/tile_product.h"
#include "kernels/elementary/elementary.h"

namespace dflash {
namespace DFLASH_SIMD_NAMESPACE {

// The part of a query's range that lies in a block, relative to the block.
struct KeyRange {
  int64_t first, end;
};

DFLASH_SIMD_INLINE int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }
DFLASH_SIMD_INLINE int64_t Larger(int64_t a, int64_t b) { return a > b ? a : b; }

DFLASH_SIMD_INLINE KeyRange RangeInBlock(const AttentionQuery& query, int64_t block) {
  return {Larger(query.first_key - block * kKeyBlock, 0),
          Smaller(query.end_key - block * kKeyBlock, kKeyBlock)};
}

// Turns the raw dot products of one query and block into exp(scale * dot - maximum), zero outside the range.
// Returns the maximum.
DFLASH_SIMD_INLINE float Exponentials(float* scores, KeyRange range, float scale) {
  constexpr float kMinusInfinity = -__builtin_inff();
  const int64_t begin = range.first / kLanes * kLanes;
  for (int64_t j = begin; j < range.first; ++j) scores[j] = kMinusInfinity;
  for (int64_t j = range.end; j % kLanes != 0; ++j) scores[j] = kMinusInfinity;
  F32x16 best = F32x16::Broadcast(kMinusInfinity);
  for (int64_t j = begin; j < range.end; j += kLanes) {
    const F32x16 score = Load(scores + j) * F32x16::Broadcast(scale);
    Store(scores + j, score);
    best = Max(best, score);
  }
  const float maximum = ReduceMax(best);
  for (int64_t j = begin; j < range.end; j += kLanes) {
    Store(scores + j, Exp(Load(scores + j) - F32x16::Broadcast(maximum)));
  }
  return maximum;
}

// Rows that go through a block together.
inline constexpr int64_t kRowsAtOnce = 8;

// The ranges of up to kRowsAtOnce queries in a block, and what all of them see (empty when first >= end).
struct KeyRanges {
  KeyRange of[kRowsAtOnce];
  KeyRange common;
};
DFLASH_SIMD_INLINE KeyRanges RangesInBlock(const AttentionQuery* queries, int64_t count, int64_t block) {
  KeyRanges ranges;
  ranges.common = {0, kKeyBlock};
  for (int64_t r = 0; r < count; ++r) {
    ranges.of[r] = RangeInBlock(queries[r], block);
    ranges.common = {Larger(ranges.common.first, ranges.of[r].first),
                     Smaller(ranges.common.end, ranges.of[r].end)};
  }
  return ranges;
}

DFLASH_SIMD_INLINE float AddRange(float sum, const float* weights, int64_t first, int64_t end) {
  for (int64_t j = first; j < end; ++j) sum += weights[j];
  return sum;
}

// sums[r] = the sum of weights[r] over the query's range, ascending. The common keys of kCount queries are
// added in turns: one sum alone waits for every addition.
template <int kCount>
DFLASH_SIMD_INLINE void SumsTogether(const KeyRange* ranges, KeyRange common, const float* weights,
                                     float* sums) {
  float sum[kCount];
#pragma GCC unroll 8
  for (int r = 0; r < kCount; ++r) {
    sum[r] = AddRange(0, weights + r * kKeyBlock, ranges[r].first, common.first);
  }
  for (int64_t j = common.first; j < common.end; ++j) {
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) sum[r] += weights[r * kKeyBlock + j];
  }
#pragma GCC unroll 8
  for (int r = 0; r < kCount; ++r) {
    sums[r] = AddRange(sum[r], weights + r * kKeyBlock, common.end, ranges[r].end);
  }
}

DFLASH_SIMD_INLINE void Sums(const KeyRanges& ranges, int64_t count, const float* weights, float* sums) {
  int64_t r = 0;
  if (ranges.common.first < ranges.common.end) {
    for (; r + 8 <= count; r += 8)
      SumsTogether<8>(ranges.of + r, ranges.common, weights + r * kKeyBlock, sums + r);
    for (; r + 4 <= count; r += 4)
      SumsTogether<4>(ranges.of + r, ranges.common, weights + r * kKeyBlock, sums + r);
    for (; r + 2 <= count; r += 2)
      SumsTogether<2>(ranges.of + r, ranges.common, weights + r * kKeyBlock, sums + r);
  }
  for (; r < count; ++r) sums[r] = AddRange(0, weights + r * kKeyBlock, ranges.of[r].first, ranges.of[r].end);
}

// out[r] += sum_j weights[r][j] values[j] over each query's own range: keys that a query does not see are not
// multiplied by zero but left out, since they may hold anything.
DFLASH_SIMD_INLINE void AddValues(const KeyRanges& ranges, int64_t count, const float* weights,
                                  const float* values, int64_t padded_dim, float* out) {
  const KeyRange common = ranges.common;
  const auto add = [&](int64_t r, int64_t rows, int64_t first, int64_t end) {
    TileProduct(weights + r * kKeyBlock + first, kKeyBlock, 1, values + first * padded_dim, padded_dim, rows,
                end - first, padded_dim, out + r * padded_dim, padded_dim);
  };
  if (common.first >= common.end) {
    for (int64_t r = 0; r < count; ++r) add(r, 1, ranges.of[r].first, ranges.of[r].end);
    return;
  }
  for (int64_t r = 0; r < count; ++r) add(r, 1, ranges.of[r].first, common.first);
  add(0, count, common.first, common.end);
  for (int64_t r = 0; r < count; ++r) add(r, 1, common.end, ranges.of[r].end);
}

// A whole number of vectors.
DFLASH_SIMD_INLINE void Clear(float* p, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) Store(p + i, F32x16::Broadcast(0));
}

static void Attend(const AttentionTask& task) {
  const int64_t dim = task.head_dim, padded_dim = PaddedHeadDim(dim), count = task.query_count;
  float* q = task.scratch;                 // [count, dim]
  float* out = q + count * padded_dim;     // [count, padded_dim]
  float* part = out + count * padded_dim;  // [count, padded_dim]: of one block
  float* scores = part + count * padded_dim;
  float* maximum = scores + count * kKeyBlock;
  float* sum = maximum + count;
  int64_t first_key = INT64_MAX, end_key = 0;
  for (int64_t i = 0; i < count; ++i) {
    const AttentionQuery& query = task.queries[i];
    for (int64_t d = 0; d < dim; d += kLanes) {
      const int lanes = static_cast<int>(Smaller(dim - d, kLanes));
      StorePartial(q + i * dim + d, LoadPartial(query.q + d, lanes), lanes);
    }
    Clear(out + i * padded_dim, padded_dim);
    maximum[i] = -__builtin_inff();
    sum[i] = 0;
    first_key = Smaller(first_key, query.first_key);
    end_key = Larger(end_key, query.end_key);
  }
  for (int64_t block = first_key / kKeyBlock; block * kKeyBlock < end_key; ++block) {
    const float* keys = task.blocks[block - task.first_block];
    const float* values = keys + dim * kKeyBlock;
    // Both ends of the ranges rise with the position, so the queries that see this block are neighbours.
    const auto sees = [&](int64_t i) {
      const KeyRange range = RangeInBlock(task.queries[i], block);
      return range.first < range.end;
    };
    int64_t begin = 0, end = count;
    while (begin < end && !sees(begin)) ++begin;
    while (end > begin && !sees(end - 1)) --end;
    if (begin == end) continue;
    int64_t first_column = kKeyBlock, end_column = 0;
    for (int64_t i = begin; i < end; ++i) {
      const KeyRange range = RangeInBlock(task.queries[i], block);
      first_column = Smaller(first_column, range.first / kLanes * kLanes);
      end_column = Larger(end_column, (range.end + kLanes - 1) / kLanes * kLanes);
    }
    Clear(scores + begin * kKeyBlock, (end - begin) * kKeyBlock);
    Clear(part + begin * padded_dim, (end - begin) * padded_dim);
    TileProduct(q + begin * dim, dim, 1, keys + first_column, kKeyBlock, end - begin, dim,
                end_column - first_column, scores + begin * kKeyBlock + first_column, kKeyBlock);
    for (int64_t i = begin; i < end; i += kRowsAtOnce) {
      const int64_t rows = Smaller(kRowsAtOnce, end - i);
      const KeyRanges ranges = RangesInBlock(task.queries + i, rows, block);
      float block_maximum[kRowsAtOnce], block_sum[kRowsAtOnce];
      float* const weights = scores + i * kKeyBlock;
      for (int64_t r = 0; r < rows; ++r) {
        block_maximum[r] = Exponentials(weights + r * kKeyBlock, ranges.of[r], task.scale);
      }
      Sums(ranges, rows, weights, block_sum);
      AddValues(ranges, rows, weights, values, padded_dim, part + i * padded_dim);
      for (int64_t r = 0; r < rows; ++r) {
        float* total = out + (i + r) * padded_dim;
        const float* added = part + (i + r) * padded_dim;
        if (sum[i + r] == 0) {  // the first block that it sees; afterwards the sum is at least 1 (or NaN)
          maximum[i + r] = block_maximum[r];
          sum[i + r] = block_sum[r];
          for (int64_t d = 0; d < padded_dim; d += kLanes) Store(total + d, Load(added + d));
          continue;
        }
        const float old = maximum[i + r];
        maximum[i + r] = old > block_maximum[r] ? old : block_maximum[r];
        const float keep = ExpF32(old - maximum[i + r]), take = ExpF32(block_maximum[r] - maximum[i + r]);
        sum[i + r] = __builtin_fmaf(block_sum[r], take, sum[i + r] * keep);
        for (int64_t d = 0; d < padded_dim; d += kLanes) {
          Store(total + d,
                Fma(Load(added + d), F32x16::Broadcast(take), Load(total + d) * F32x16::Broadcast(keep)));
        }
      }
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    float* result = task.queries[i].out;
    for (int64_t d = 0; d < dim; d += kLanes) {
      const int lanes = static_cast<int>(Smaller(dim - d, kLanes));
      const F32x16 value = Load(out + i * padded_dim + d) / F32x16::Broadcast(sum[i] == 0 ? 1 : sum[i]);
      StorePartial(result + d, value, lanes);
    }
  }
}

}  // namespace DFLASH_SIMD_NAMESPACE

void DFLASH_SIMD_NAME(Attend)(const AttentionTask& task) { DFLASH_SIMD_NAMESPACE::Attend(task); }

}  // namespace dflash
