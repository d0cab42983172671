// The inner loops of the CPU backend's Gated DeltaNet: one table of functions per instruction set, all with
// the same bits. Every sum over key_dim or over rows runs upwards with one fma a step; lanes run over
// value_dim.
#pragma once

#include <cstdint>

#include "kernels/batch/segments.h"

namespace dflash {

inline constexpr int64_t kDeltaChunk = kPageTokens;

constexpr int64_t PaddedToLanes(int64_t size) { return (size + 15) / 16 * 16; }

// Gates of `count` pairs of row and value head: g = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b),
// decay = e^g.
struct DeltaGates {
  const float* a;
  const float* b;
  const float* a_log;
  const float* dt_bias;
  int64_t count;
  float* g;
  float* beta;
  float* decay;
};

// `count` pairs of q and k, of the heads of a row or of the rows of a head: y = x / sqrt(sum x^2 + 1e-6), q
// also times q_scale, and k . q of both.
struct DeltaKeys {
  const float* q;  // [count, dim], in_stride apart; k likewise
  const float* k;
  int64_t in_stride;
  int64_t count;
  int64_t dim;
  float q_scale;
  float* q_out;  // [count, dim], one after the other; k_out likewise
  float* k_out;
  float* key_query;  // [count]
};

// A block of up to kDeltaColumns columns of one value head's S, with what belongs to them. A pointer is that
// of the first row or record; the strides are in DeltaVerifyTask.
struct DeltaBlock {
  int64_t columns;
  float* S;               // [key_dim, columns], rows `state_stride` apart
  const float* record_c;  // of the pending records
  const float* record_g;
  const float* v;
  const float* beta;
  const float* decay;
  float* c;
  float* o;
};
inline constexpr int64_t kDeltaColumns = 32;

// Blocks of value heads that share a key head. Folds the pending records into S, row after row, then runs the
// rows from there without changing S: o = decay S'q + key_query c is written, and c, which with k and g is
// the row's record.
struct DeltaVerifyTask {
  int64_t key_dim;
  const DeltaBlock* blocks;
  int64_t block_count;  // at most kMaxDeltaBlocks
  int64_t state_stride;
  const float* record_k;  // [record_count, key_dim]
  int64_t record_count;
  int64_t record_stride;  // between records, pending ones and those that are written
  const float* q;         // [row_count, key_dim], rows `qk_stride` apart; k likewise
  const float* k;
  int64_t qk_stride;
  const float* key_query;
  int64_t key_query_stride;
  int64_t row_count;
  int64_t v_stride;
  int64_t o_stride;
  int64_t gate_stride;  // of beta and decay
  float* scratch;       // DeltaVerifyScratchFloats(key_dim, record_count)
};
inline constexpr int64_t kMaxDeltaBlocks = 3;
constexpr int64_t DeltaVerifyScratchFloats(int64_t key_dim, int64_t records) {
  return kMaxDeltaBlocks * ((key_dim + records) * kDeltaColumns + PaddedToLanes(records));
}

// The value heads of one key head over one chunk of rows; every S advances over all of them.
struct DeltaChunkTask {
  int64_t key_dim;
  int64_t value_dim;
  int64_t heads;      // value heads of this key head
  float* S;           // [heads, key_dim, value_dim]
  int64_t row_count;  // at most kDeltaChunk
  const float* q;     // [row_count, key_dim], rows `qk_stride` apart, normalized; k likewise
  const float* k;
  int64_t qk_stride;
  const float* v;  // [row_count, heads, value_dim], rows `v_stride` apart; o likewise
  int64_t v_stride;
  float* o;
  int64_t o_stride;
  const float* g;  // [row_count, heads], rows `gate_stride` apart; beta likewise
  const float* beta;
  int64_t gate_stride;
  float* scratch;  // DeltaChunkScratchFloats(key_dim, value_dim)
};
constexpr int64_t DeltaChunkScratchFloats(int64_t key_dim, int64_t value_dim) {
  return kDeltaChunk * (2 * kDeltaChunk + 2 * key_dim + 9) +
         (key_dim + 3 * kDeltaChunk) * PaddedToLanes(value_dim);
}

struct DeltaKernels {
  void (*gates)(const DeltaGates& gates);
  void (*keys)(const DeltaKeys& keys);
  void (*verify)(const DeltaVerifyTask& task);
  void (*chunk)(const DeltaChunkTask& task);
};
extern const DeltaKernels kDeltaKernelsScalar;
extern const DeltaKernels kDeltaKernelsAvx2;
extern const DeltaKernels kDeltaKernelsAvx512;

}  // namespace dflash
