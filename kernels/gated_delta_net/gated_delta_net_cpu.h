// The inner loops of the CPU backend's Gated DeltaNet: one table of functions per instruction set, all with
// the same bits. Every sum over key_dim or over rows runs upwards with one fma a step; lanes run over
// value_dim.
#pragma once

#include <cstdint>

#include "kernels/batch/segments.h"

namespace dflash {

inline constexpr int64_t kDeltaChunk = kPageTokens;

constexpr int64_t PaddedToLanes(int64_t size) { return (size + 15) / 16 * 16; }

// Gates of `heads` value heads of one row: g = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b), decay =
// e^g.
struct DeltaGates {
  const float* a;
  const float* b;
  const float* a_log;
  const float* dt_bias;
  int64_t heads;
  float* g;
  float* beta;
  float* decay;
};

// A delta record of one value head.
struct DeltaRecord {
  const float* k;
  const float* c;
  float decay;
};

// A row of one value head, q and k normalized. o = decay S'q + key_query c is written, and c, which with k
// and decay is the row's record.
struct DeltaRow {
  const float* q;
  const float* k;
  const float* v;
  float key_query;  // k . q
  float beta;
  float decay;
  float* c;
  float* o;
};

// Folds records into S, row after row, then runs the rows from there without changing S.
struct DeltaVerifyTask {
  int64_t key_dim;
  int64_t value_dim;
  float* S;  // [key_dim, value_dim]
  const DeltaRecord* records;
  int64_t record_count;
  const DeltaRow* rows;
  int64_t row_count;
  float* scratch;  // DeltaVerifyScratchFloats(key_dim)
};
inline constexpr int64_t kDeltaColumns = 32;  // of S at a time: with 128 keys 16 KiB, half of L1
constexpr int64_t DeltaVerifyScratchFloats(int64_t key_dim) { return (key_dim + 1) * kDeltaColumns; }

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
  return 2 * kDeltaChunk * (kDeltaChunk + key_dim + 2) +
         (key_dim + 3 * kDeltaChunk) * PaddedToLanes(value_dim);
}

struct DeltaKernels {
  void (*gates)(const DeltaGates& gates);
  // y = x / sqrt(sum x^2 + 1e-6) * scale
  void (*l2_norm)(const float* x, int64_t size, float scale, float* y);
  float (*dot)(const float* a, const float* b, int64_t size);
  void (*verify)(const DeltaVerifyTask& task);
  void (*chunk)(const DeltaChunkTask& task);
};
extern const DeltaKernels kDeltaKernelsScalar;
extern const DeltaKernels kDeltaKernelsAvx2;
extern const DeltaKernels kDeltaKernelsAvx512;

}  // namespace dflash
