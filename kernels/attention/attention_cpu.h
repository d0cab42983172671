// The inner loop of the CPU backend's attention: one group of queries that share a KV head, over blocks of 64
// keys. One function per instruction set, all with the same bits.
#pragma once

#include <cstdint>

#include "kernels/batch/segments.h"

namespace dflash {

inline constexpr int64_t kKeyBlock = kPageTokens;

// Values lie in rows of this many floats.
constexpr int64_t PaddedHeadDim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

// One block of keys and values of one KV head, as pages hold it: keys transposed [head_dim, 64], then values
// [64, PaddedHeadDim].
constexpr int64_t KeyBlockFloats(int64_t head_dim) {
  return kKeyBlock * (head_dim + PaddedHeadDim(head_dim));
}

// A query head of a row, in ascending order of position, and the half-open range of positions that it sees.
struct AttentionQuery {
  const float* q;
  float* out;
  int64_t first_key;
  int64_t end_key;
};

struct AttentionTask {
  int64_t head_dim;
  float scale;
  const AttentionQuery* queries;
  int64_t query_count;
  const float* const* blocks;  // block b of the position grid is blocks[b - first_block]
  int64_t first_block;
  float* scratch;  // query_count * AttentionScratchFloats(head_dim)
};

// Per query: q, running output, output of the block, scores, running maximum and sum.
constexpr int64_t AttentionScratchFloats(int64_t head_dim) {
  return 3 * PaddedHeadDim(head_dim) + kKeyBlock + 2;
}

void AttendScalar(const AttentionTask& task);
void AttendAvx2(const AttentionTask& task);
void AttendAvx512(const AttentionTask& task);

}  // namespace dflash
