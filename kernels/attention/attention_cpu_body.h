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
// Returns maximum and sum (ascending) through the pointers.
DFLASH_SIMD_INLINE void Softmax(float* scores, KeyRange range, float scale, float* maximum, float* sum) {
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
  *maximum = ReduceMax(best);
  for (int64_t j = begin; j < range.end; j += kLanes) {
    Store(scores + j, Exp(Load(scores + j) - F32x16::Broadcast(*maximum)));
  }
  float total = 0;
  for (int64_t j = range.first; j < range.end; ++j) total += scores[j];
  *sum = total;
}

// out[r] += sum_j weights[r][j] values[j] over each query's own range: keys that a query does not see are not
// multiplied by zero but left out, since they may hold anything.
DFLASH_SIMD_INLINE void AddValues(const AttentionQuery* queries, int64_t count, int64_t block,
                                  const float* weights, const float* values, int64_t padded_dim, float* out) {
  KeyRange range[4];
  KeyRange common = {0, kKeyBlock};
  for (int64_t r = 0; r < count; ++r) {
    range[r] = RangeInBlock(queries[r], block);
    common = {Larger(common.first, range[r].first), Smaller(common.end, range[r].end)};
  }
  const auto add = [&](int64_t r, int64_t rows, int64_t first, int64_t end) {
    TileProduct(weights + r * kKeyBlock + first, kKeyBlock, 1, values + first * padded_dim, padded_dim, rows,
                end - first, padded_dim, out + r * padded_dim, padded_dim);
  };
  if (common.first >= common.end) {
    for (int64_t r = 0; r < count; ++r) add(r, 1, range[r].first, range[r].end);
    return;
  }
  for (int64_t r = 0; r < count; ++r) add(r, 1, range[r].first, common.first);
  add(0, count, common.first, common.end);
  for (int64_t r = 0; r < count; ++r) add(r, 1, common.end, range[r].end);
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
    for (int64_t d = 0; d < dim; ++d) q[i * dim + d] = query.q[d];
    for (int64_t d = 0; d < padded_dim; ++d) out[i * padded_dim + d] = 0;
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
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < kKeyBlock; ++j) scores[i * kKeyBlock + j] = 0;
      for (int64_t d = 0; d < padded_dim; ++d) part[i * padded_dim + d] = 0;
    }
    TileProduct(q + begin * dim, dim, 1, keys + first_column, kKeyBlock, end - begin, dim,
                end_column - first_column, scores + begin * kKeyBlock + first_column, kKeyBlock);
    for (int64_t i = begin; i < end; i += 4) {
      const int64_t rows = Smaller(4, end - i);
      float block_maximum[4], block_sum[4];
      for (int64_t r = 0; r < rows; ++r) {
        Softmax(scores + (i + r) * kKeyBlock, RangeInBlock(task.queries[i + r], block), task.scale,
                block_maximum + r, block_sum + r);
      }
      AddValues(task.queries + i, rows, block, scores + i * kKeyBlock, values, padded_dim,
                part + i * padded_dim);
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
