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
  for (int64_t h = 0; h < gates.count; h += kLanes) {
    const int n = LanesAt(h, gates.count);
    const F32x16 step = Softplus(LoadPartial(gates.a + h, n) + LoadPartial(gates.dt_bias + h, n));
    const F32x16 g = F32x16::Broadcast(0) - Exp(LoadPartial(gates.a_log + h, n)) * step;
    StorePartial(gates.g + h, g, n);
    StorePartial(gates.decay + h, Exp(g), n);
    StorePartial(gates.beta + h, Sigmoid(LoadPartial(gates.b + h, n)), n);
  }
}

// Sums of products, each in ascending order; several at once, since one alone waits for every fma.
template <int kCount>
DFLASH_SIMD_INLINE void Dots(const float* const* a, const float* const* b, int64_t size, float* sums) {
  float sum[kCount] = {};
  for (int64_t d = 0; d < size; ++d) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) sum[i] = __builtin_fmaf(a[i][d], b[i][d], sum[i]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) sums[i] = sum[i];
}

DFLASH_SIMD_INLINE void Normalize(const float* x, float square, float scale, int64_t size, float* y) {
  const F32x16 factor = F32x16::Broadcast(scale / __builtin_sqrtf(square + 1e-6f));
  for (int64_t d = 0; d < size; d += kLanes) {
    const int lanes = LanesAt(d, size);
    StorePartial(y + d, LoadPartial(x + d, lanes) * factor, lanes);
  }
}

template <int kPairs>
DFLASH_SIMD_INLINE void KeysOfPairs(const DeltaKeys& keys, int64_t first) {
  const float* x[2 * kPairs];
  const float *q[kPairs], *k[kPairs];
  float squares[2 * kPairs];
  for (int i = 0; i < kPairs; ++i) {
    x[2 * i] = keys.q + (first + i) * keys.in_stride;
    x[2 * i + 1] = keys.k + (first + i) * keys.in_stride;
    q[i] = keys.q_out + (first + i) * keys.dim;
    k[i] = keys.k_out + (first + i) * keys.dim;
  }
  Dots<2 * kPairs>(x, x, keys.dim, squares);
  for (int i = 0; i < kPairs; ++i) {
    const int64_t to = (first + i) * keys.dim;
    Normalize(x[2 * i], squares[2 * i], keys.q_scale, keys.dim, keys.q_out + to);
    Normalize(x[2 * i + 1], squares[2 * i + 1], 1, keys.dim, keys.k_out + to);
  }
  Dots<kPairs>(k, q, keys.dim, keys.key_query + first);
}

static void Keys(const DeltaKeys& keys) {
  int64_t pair = 0;
  for (; pair + 4 <= keys.count; pair += 4) KeysOfPairs<4>(keys, pair);
  for (; pair < keys.count; ++pair) KeysOfPairs<1>(keys, pair);
}

// Vectors of a block of columns.
inline constexpr int kBlockVectors = kDeltaColumns / kLanes;

// Blocks at a time: they share k and q, and while one waits for its sums the others go on.
#if defined(__AVX512F__)
inline constexpr int kBlocksAtOnce = 3;
#else
inline constexpr int kBlocksAtOnce = 1;
#endif
static_assert(kBlocksAtOnce <= kMaxDeltaBlocks);

DFLASH_SIMD_INLINE F32x16 LoadUpTo(const float* p, int lanes) {
  return lanes == kLanes ? Load(p) : LoadPartial(p, lanes);
}
DFLASH_SIMD_INLINE void StoreUpTo(float* p, F32x16 a, int lanes) {
  if (lanes == kLanes) return Store(p, a);
  if (lanes > 0) StorePartial(p, a, lanes);
}

template <int kBlocks>
static void VerifyBlocks(const DeltaVerifyTask& task, const DeltaBlock* blocks) {
  constexpr int kVectors = kBlocks * kBlockVectors;
  constexpr int64_t kColumns = kBlocks * kDeltaColumns;
  const int64_t key_dim = task.key_dim, records = task.record_count;
  float* const S = task.scratch;                              // [key_dim, kColumns]
  float* const record_c = S + key_dim * kColumns;             // [records, kColumns]
  float* const record_decay = record_c + records * kColumns;  // [kBlocks, padded records]
  const int64_t padded_records = PaddedToLanes(records);
  int lanes[kVectors];
#pragma GCC unroll 6
  for (int v = 0; v < kVectors; ++v) {
    lanes[v] = LanesAt(v % kBlockVectors * kLanes, blocks[v / kBlockVectors].columns);
  }
  const auto at = [](int v) { return v % kBlockVectors * kLanes; };

  for (int b = 0; b < kBlocks; ++b) {
    float* decay = record_decay + b * padded_records;
    for (int64_t r = 0; r < padded_records; ++r) {
      decay[r] = r < records ? blocks[b].record_g[r * task.record_stride] : 0;
    }
    for (int64_t r = 0; r < padded_records; r += kLanes) Store(decay + r, Exp(Load(decay + r)));
  }
  for (int64_t r = 0; r < records; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      Store(record_c + r * kColumns + v * kLanes,
            LoadUpTo(blocks[v / kBlockVectors].record_c + r * task.record_stride + at(v), lanes[v]));
    }
  }
  for (int64_t d = 0; d < key_dim; ++d) {
    F32x16 s[kVectors];
#pragma GCC unroll 6
    for (int v = 0; v < kVectors; ++v) {
      s[v] = LoadUpTo(blocks[v / kBlockVectors].S + d * task.state_stride + at(v), lanes[v]);
    }
    for (int64_t r = 0; r < records; ++r) {
      const F32x16 key = F32x16::Broadcast(task.record_k[r * task.record_stride + d]);
#pragma GCC unroll 6
      for (int v = 0; v < kVectors; ++v) {
        const F32x16 decay = F32x16::Broadcast(record_decay[v / kBlockVectors * padded_records + r]);
        s[v] = Fma(key, Load(record_c + r * kColumns + v * kLanes), decay * s[v]);
      }
    }
#pragma GCC unroll 6
    for (int v = 0; v < kVectors; ++v) {
      Store(S + d * kColumns + v * kLanes, s[v]);
      if (records > 0) StoreUpTo(blocks[v / kBlockVectors].S + d * task.state_stride + at(v), s[v], lanes[v]);
    }
  }

  F32x16 c[kVectors];  // of the row before
  for (int64_t t = 0; t < task.row_count; ++t) {
    const float *k = task.k + t * task.qk_stride, *q = task.q + t * task.qk_stride;
    F32x16 seen[kVectors], out[kVectors];  // S'k, S'q
#pragma GCC unroll 6
    for (int v = 0; v < kVectors; ++v) seen[v] = out[v] = F32x16::Broadcast(0);
    const auto read = [&](int64_t d, int v, F32x16 s) __attribute__((always_inline)) {
      seen[v] = Fma(F32x16::Broadcast(k[d]), s, seen[v]);
      out[v] = Fma(F32x16::Broadcast(q[d]), s, out[v]);
    };
    if (t == 0) {
      for (int64_t d = 0; d < key_dim; ++d) {
#pragma GCC unroll 6
        for (int v = 0; v < kVectors; ++v) read(d, v, Load(S + d * kColumns + v * kLanes));
      }
    } else {
      // S <- decay S + k c' of the row before, on the way.
      const float* before = k - task.qk_stride;
      F32x16 decay[kBlocks];
#pragma GCC unroll 3
      for (int b = 0; b < kBlocks; ++b) {
        decay[b] = F32x16::Broadcast(blocks[b].decay[(t - 1) * task.gate_stride]);
      }
      for (int64_t d = 0; d < key_dim; ++d) {
        const F32x16 key = F32x16::Broadcast(before[d]);
#pragma GCC unroll 6
        for (int v = 0; v < kVectors; ++v) {
          float* p = S + d * kColumns + v * kLanes;
          const F32x16 s = Fma(key, c[v], decay[v / kBlockVectors] * Load(p));
          Store(p, s);
          read(d, v, s);
        }
      }
    }
    const F32x16 key_query = F32x16::Broadcast(task.key_query[t * task.key_query_stride]);
#pragma GCC unroll 6
    for (int v = 0; v < kVectors; ++v) {
      const DeltaBlock& block = blocks[v / kBlockVectors];
      const float decay = block.decay[t * task.gate_stride];
      const F32x16 value = LoadUpTo(block.v + t * task.v_stride + at(v), lanes[v]);
      c[v] = F32x16::Broadcast(block.beta[t * task.gate_stride]) *
             Fma(F32x16::Broadcast(-decay), seen[v], value);
      StoreUpTo(block.c + t * task.record_stride + at(v), c[v], lanes[v]);
      StoreUpTo(block.o + t * task.o_stride + at(v), Fma(key_query, c[v], F32x16::Broadcast(decay) * out[v]),
                lanes[v]);
    }
  }
}

static void Verify(const DeltaVerifyTask& task) {
  int64_t block = 0;
  for (; block + kBlocksAtOnce <= task.block_count; block += kBlocksAtOnce) {
    VerifyBlocks<kBlocksAtOnce>(task, task.blocks + block);
  }
  for (; block < task.block_count; ++block) VerifyBlocks<1>(task, task.blocks + block);
}

DFLASH_SIMD_INLINE void Clear(float* p, int64_t count) {
  for (int64_t i = 0; i < count; ++i) p[i] = 0;
}

// to[n] = from[n] * factor over whole vectors.
DFLASH_SIMD_INLINE void Scale(const float* from, float factor, int64_t count, float* to) {
  for (int64_t n = 0; n < count; n += kLanes) Store(to + n, Load(from + n) * F32x16::Broadcast(factor));
}

inline constexpr int64_t kRowsAtOnce = 4;

static void Chunk(const DeltaChunkTask& task) {
  constexpr int64_t kC = kDeltaChunk;
  const int64_t rows = task.row_count, key_dim = task.key_dim, value_dim = task.value_dim;
  const int64_t padded = PaddedToLanes(value_dim);
  float* transposed = task.scratch;               // [key_dim, kC]: k'
  float* kk = transposed + key_dim * kC;          // [kC, kC]: k_i . k_j
  float* qk = kk + kC * kC;                       // [kC, kC]: q_i . k_j
  float* kk_rows = qk + kC * kC;                  // [kRowsAtOnce, kC]: -e^(G_i - G_j) k_i . k_j
  float* qk_rows = kk_rows + kRowsAtOnce * kC;    // [kRowsAtOnce, kC]: e^(G_i - G_j) q_i . k_j
  float* decay_sum = qk_rows + kRowsAtOnce * kC;  // [kC]: G
  float* late_k = decay_sum + kC;                 // [kC, key_dim]: e^(G_C - G_i) k_i
  float* S = late_k + kC * key_dim;               // [key_dim, padded]
  float* seen = S + key_dim * padded;             // [kC, padded]: K S
  float* read = seen + kC * padded;               // [kC, padded]: Q S, then O
  float* delta = read + kC * padded;              // [kC, padded]

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
    // Forward substitution: the correction of a row needs those of all rows before it. Four rows at a time
    // read the rows before the four together, then each other.
    for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
      const int64_t count = Smaller(kRowsAtOnce, rows - first);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t i = first + r;
        const F32x16 own = F32x16::Broadcast(decay_sum[i]);
        for (int64_t j = 0; j <= i; j += kLanes) {  // beyond i the factors may overflow; nothing reads them
          const F32x16 factor = Exp(own - Load(decay_sum + j));
          Store(kk_rows + r * kC + j, F32x16::Broadcast(0) - factor * Load(kk + i * kC + j));
          Store(qk_rows + r * kC + j, factor * Load(qk + i * kC + j));
        }
        const float decay = ExpF32(decay_sum[i]);
        const float* v = task.v + i * task.v_stride + head * value_dim;
        for (int64_t n = 0; n < padded; n += kLanes) {
          Store(delta + i * padded + n, Fma(F32x16::Broadcast(-decay), Load(seen + i * padded + n),
                                            LoadPartial(v + n, LanesAt(n, value_dim))));
        }
        Scale(read + i * padded, decay, padded, read + i * padded);
      }
      float* const corrections = delta + first * padded;
      float* const outputs = read + first * padded;
      TileProduct(kk_rows, kC, 1, delta, padded, count, first, padded, corrections, padded);
      TileProduct(qk_rows, kC, 1, delta, padded, count, first, padded, outputs, padded);
      for (int64_t r = 0; r < count; ++r) {
        float* const row = corrections + r * padded;
        TileProduct(kk_rows + r * kC + first, 0, 1, corrections, padded, 1, r, padded, row, padded);
        Scale(row, task.beta[(first + r) * task.gate_stride + head], padded, row);
      }
      for (int64_t r = 0; r < count; ++r) {
        float* const out = outputs + r * padded;
        TileProduct(qk_rows + r * kC + first, 0, 1, corrections, padded, 1, r + 1, padded, out, padded);
        for (int64_t n = 0; n < padded; n += kLanes) {
          StorePartial(task.o + (first + r) * task.o_stride + head * value_dim + n, Load(out + n),
                       LanesAt(n, value_dim));
        }
      }
    }
    const float last = decay_sum[rows - 1];
    for (int64_t i = 0; i < rows; ++i) {
      const float rest = ExpF32(last - decay_sum[i]);
      const float* k = task.k + i * task.qk_stride;
      for (int64_t d = 0; d < key_dim; d += kLanes) {
        const int lanes = LanesAt(d, key_dim);
        StorePartial(late_k + i * key_dim + d, F32x16::Broadcast(rest) * LoadPartial(k + d, lanes), lanes);
      }
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

inline constexpr DeltaKernels kTable = {Gates, Keys, Verify, Chunk};

}  // namespace DFLASH_SIMD_NAMESPACE

const DeltaKernels DFLASH_SIMD_NAME(kDeltaKernels) = DFLASH_SIMD_NAMESPACE::kTable;

}  // namespace dflash
