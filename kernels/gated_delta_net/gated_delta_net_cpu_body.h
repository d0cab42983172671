// Included by gated_delta_net_cpu_{scalar,avx2,avx512}.cc.
#pragma once

#include <cstdint>

#include "kernels/device/cpu/simd.h"
#include "kernels/device/cpu/tile_product.h"
#include "kernels/elementary/elementary.h"
#include "kernels/gated_delta_net/gated_delta_net_cpu.h"

namespace dflash {
namespace DFLASH_SIMD_NAMESPACE {

DFLASH_SIMD_INLINE int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Lanes that a vector beginning at column n of `size` may touch.
DFLASH_SIMD_INLINE int LanesAt(int64_t n, int64_t size) {
  return n >= size ? 0 : static_cast<int>(Smaller(size - n, kLanes));
}

static void Gates(const DeltaGates& gates) {
  for (int64_t h = 0; h < gates.heads; h += kLanes) {
    const int n = LanesAt(h, gates.heads);
    const F32x16 step = Softplus(LoadPartial(gates.a + h, n) + LoadPartial(gates.dt_bias + h, n));
    const F32x16 g = F32x16::Broadcast(0) - Exp(LoadPartial(gates.a_log + h, n)) * step;
    StorePartial(gates.g + h, g, n);
    StorePartial(gates.decay + h, Exp(g), n);
    StorePartial(gates.beta + h, Sigmoid(LoadPartial(gates.b + h, n)), n);
  }
}

static float Dot(const float* a, const float* b, int64_t size) {
  float sum = 0;
  for (int64_t d = 0; d < size; ++d) sum = __builtin_fmaf(a[d], b[d], sum);
  return sum;
}

static void L2Norm(const float* x, int64_t size, float scale, float* y) {
  const float factor = scale / __builtin_sqrtf(Dot(x, x, size) + 1e-6f);
  for (int64_t d = 0; d < size; ++d) y[d] = x[d] * factor;
}

// Two vectors of columns of S, or of a row beside them.
struct Columns {
  F32x16 v[2];
};
static_assert(kDeltaColumns == 2 * kLanes);

DFLASH_SIMD_INLINE Columns LoadColumns(const float* p) { return {{Load(p), Load(p + kLanes)}}; }
DFLASH_SIMD_INLINE void StoreColumns(float* p, Columns a) {
  Store(p, a.v[0]);
  Store(p + kLanes, a.v[1]);
}
// The columns [n, n + 32) of a row of `size`, those beyond it zero.
DFLASH_SIMD_INLINE Columns LoadColumns(const float* row, int64_t n, int64_t size) {
  Columns a;
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const int lanes = LanesAt(n + i * kLanes, size);
    a.v[i] = lanes == 0 ? F32x16::Broadcast(0) : LoadPartial(row + n + i * kLanes, lanes);
  }
  return a;
}
DFLASH_SIMD_INLINE void StoreColumns(float* row, int64_t n, int64_t size, Columns a) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const int lanes = LanesAt(n + i * kLanes, size);
    if (lanes > 0) StorePartial(row + n + i * kLanes, a.v[i], lanes);
  }
}

// S <- decay S + k c', in the scratch block [key_dim, 32].
DFLASH_SIMD_INLINE void Update(const float* k, Columns c, float decay, int64_t key_dim, float* S) {
  const F32x16 factor = F32x16::Broadcast(decay);
  for (int64_t d = 0; d < key_dim; ++d, S += kDeltaColumns) {
    Columns s = LoadColumns(S);
    const F32x16 key = F32x16::Broadcast(k[d]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) s.v[i] = Fma(key, c.v[i], factor * s.v[i]);
    StoreColumns(S, s);
  }
}

static void Verify(const DeltaVerifyTask& task) {
  for (int64_t n = 0; n < task.value_dim; n += kDeltaColumns) {
    float* S = task.scratch;
    for (int64_t d = 0; d < task.key_dim; ++d) {
      StoreColumns(S + d * kDeltaColumns, LoadColumns(task.S + d * task.value_dim, n, task.value_dim));
    }
    for (int64_t r = 0; r < task.record_count; ++r) {
      const DeltaRecord& record = task.records[r];
      Update(record.k, LoadColumns(record.c, n, task.value_dim), record.decay, task.key_dim, S);
    }
    if (task.record_count > 0) {
      for (int64_t d = 0; d < task.key_dim; ++d) {
        StoreColumns(task.S + d * task.value_dim, n, task.value_dim, LoadColumns(S + d * kDeltaColumns));
      }
    }
    for (int64_t t = 0; t < task.row_count; ++t) {
      const DeltaRow& row = task.rows[t];
      const F32x16 zero = F32x16::Broadcast(0);
      Columns seen = {{zero, zero}}, out = {{zero, zero}};  // S'k, S'q
      for (int64_t d = 0; d < task.key_dim; ++d) {
        const Columns s = LoadColumns(S + d * kDeltaColumns);
        const F32x16 key = F32x16::Broadcast(row.k[d]), query = F32x16::Broadcast(row.q[d]);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          seen.v[i] = Fma(key, s.v[i], seen.v[i]);
          out.v[i] = Fma(query, s.v[i], out.v[i]);
        }
      }
      Columns c = LoadColumns(row.v, n, task.value_dim);
      const F32x16 decay = F32x16::Broadcast(row.decay), key_query = F32x16::Broadcast(row.key_query);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        c.v[i] = F32x16::Broadcast(row.beta) * Fma(F32x16::Broadcast(-row.decay), seen.v[i], c.v[i]);
        out.v[i] = Fma(key_query, c.v[i], decay * out.v[i]);
      }
      StoreColumns(row.c, n, task.value_dim, c);
      StoreColumns(row.o, n, task.value_dim, out);
      if (t + 1 < task.row_count) Update(row.k, c, row.decay, task.key_dim, S);
    }
  }
}

DFLASH_SIMD_INLINE void Clear(float* p, int64_t count) {
  for (int64_t i = 0; i < count; ++i) p[i] = 0;
}

// to[n] = from[n] * factor over whole vectors.
DFLASH_SIMD_INLINE void Scale(const float* from, float factor, int64_t count, float* to) {
  for (int64_t n = 0; n < count; n += kLanes) Store(to + n, Load(from + n) * F32x16::Broadcast(factor));
}

static void Chunk(const DeltaChunkTask& task) {
  constexpr int64_t kC = kDeltaChunk;
  const int64_t rows = task.row_count, key_dim = task.key_dim, value_dim = task.value_dim;
  const int64_t padded = PaddedToLanes(value_dim);
  float* transposed = task.scratch;       // [key_dim, kC]: k'
  float* kk = transposed + key_dim * kC;  // [kC, kC]: k_i . k_j
  float* qk = kk + kC * kC;               // [kC, kC]: q_i . k_j
  float* between = qk + kC * kC;          // [kC]: e^(G_i - G_j)
  float* kk_row = between + kC;           // [kC]
  float* qk_row = kk_row + kC;            // [kC]
  float* decay_sum = qk_row + kC;         // [kC]: G
  float* late_k = decay_sum + kC;         // [kC, key_dim]: e^(G_C - G_i) k_i
  float* S = late_k + kC * key_dim;       // [key_dim, padded]
  float* seen = S + key_dim * padded;     // [kC, padded]: K S
  float* read = seen + kC * padded;       // [kC, padded]: Q S, then O
  float* delta = read + kC * padded;      // [kC, padded]

  Clear(transposed, key_dim * kC);
  Clear(kk, kC * kC);
  Clear(qk, kC * kC);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t d = 0; d < key_dim; ++d) transposed[d * kC + i] = task.k[i * task.qk_stride + d];
  }
  TileProduct(task.k, task.qk_stride, 1, transposed, kC, rows, key_dim, kC, kk, kC);
  TileProduct(task.q, task.qk_stride, 1, transposed, kC, rows, key_dim, kC, qk, kC);

  for (int64_t head = 0; head < task.heads; ++head) {
    float* committed = task.S + head * key_dim * value_dim;
    for (int64_t d = 0; d < key_dim; ++d) {
      for (int64_t n = 0; n < padded; n += kLanes) {
        Store(S + d * padded + n, LoadPartial(committed + d * value_dim + n, LanesAt(n, value_dim)));
      }
    }
    float sum = 0;
    for (int64_t i = 0; i < rows; ++i) decay_sum[i] = sum += task.g[i * task.gate_stride + head];
    for (int64_t i = rows; i < kC; ++i) decay_sum[i] = sum;
    Clear(seen, rows * padded);
    Clear(read, rows * padded);
    TileProduct(task.k, task.qk_stride, 1, S, padded, rows, key_dim, padded, seen, padded);
    TileProduct(task.q, task.qk_stride, 1, S, padded, rows, key_dim, padded, read, padded);
    // Forward substitution: the correction of a row needs those of all rows before it.
    for (int64_t i = 0; i < rows; ++i) {
      const F32x16 own = F32x16::Broadcast(decay_sum[i]);
      for (int64_t j = 0; j <= i; j += kLanes) {  // beyond i the factors may overflow; nothing reads them
        const F32x16 factor = Exp(own - Load(decay_sum + j));
        Store(kk_row + j, F32x16::Broadcast(0) - factor * Load(kk + i * kC + j));
        Store(qk_row + j, factor * Load(qk + i * kC + j));
      }
      const float decay = ExpF32(decay_sum[i]);
      const float* v = task.v + i * task.v_stride + head * value_dim;
      float* row = delta + i * padded;
      for (int64_t n = 0; n < padded; n += kLanes) {
        Store(row + n, Fma(F32x16::Broadcast(-decay), Load(seen + i * padded + n),
                           LoadPartial(v + n, LanesAt(n, value_dim))));
      }
      TileProduct(kk_row, 0, 1, delta, padded, 1, i, padded, row, padded);
      Scale(row, task.beta[i * task.gate_stride + head], padded, row);
      float* out = read + i * padded;
      Scale(out, decay, padded, out);
      TileProduct(qk_row, 0, 1, delta, padded, 1, i + 1, padded, out, padded);
      for (int64_t n = 0; n < padded; n += kLanes) {
        StorePartial(task.o + i * task.o_stride + head * value_dim + n, Load(out + n), LanesAt(n, value_dim));
      }
    }
    const float last = decay_sum[rows - 1];
    for (int64_t i = 0; i < rows; ++i) {
      const float rest = ExpF32(last - decay_sum[i]);
      for (int64_t d = 0; d < key_dim; ++d) late_k[i * key_dim + d] = rest * task.k[i * task.qk_stride + d];
    }
    Scale(S, ExpF32(last), key_dim * padded, S);
    TileProduct(late_k, 1, key_dim, delta, padded, key_dim, rows, padded, S, padded);
    for (int64_t d = 0; d < key_dim; ++d) {
      for (int64_t n = 0; n < padded; n += kLanes) {
        StorePartial(committed + d * value_dim + n, Load(S + d * padded + n), LanesAt(n, value_dim));
      }
    }
  }
}

inline constexpr DeltaKernels kTable = {Gates, L2Norm, Dot, Verify, Chunk};

}  // namespace DFLASH_SIMD_NAMESPACE

const DeltaKernels DFLASH_SIMD_NAME(kDeltaKernels) = DFLASH_SIMD_NAMESPACE::kTable;

}  // namespace dflash
