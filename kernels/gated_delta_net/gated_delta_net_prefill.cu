// PREFILL rows: the chunk form. With the rows of one chunk as matrices K, Q (raw, bf16, exact operands), V
// and G_i = g_1 + .. + g_i, the norms of K and Q folded into factors:
//   A_ij = beta_i (k_i . k_j) e^(G_i - G_j), j < i         P_ij = (q_i . k_j) e^(G_i - G_j), j <= i
//   D = (I + A)^-1 diag(beta) (V - diag(e^G) K S)          O = diag(e^G) Q S + P D
//   S <- e^(G_C) S + K' diag(e^(G_C - G)) D
// Two kernels. PrepareKernel makes what does not depend on S, for all chunks at once: (I + A)^-1 diag(beta),
// P and the factors. ScanKernel goes through the chunks of a sequence with S in registers.
//
// Products run on the matrix units in bf16 with float32 sums. An operand that is no bf16 is split into two or
// three of them (16 or 24 bits of mantissa) and all products above the last part's rounding are summed. What
// goes into D and S is carried with three parts, what only goes into O, which is rounded to bf16, with two; S
// is float32, and read in two parts.
#include <algorithm>

#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/ptx.cuh"
#include "kernels/device/cuda/shared_tile.cuh"
#include "kernels/gated_delta_net/gated_delta_net_gates.cuh"

namespace dflash {
namespace {

constexpr int kChunkRows = 64;
constexpr int kThreads = 128;
constexpr int kSlice = 64;  // value columns of a block of ScanKernel, 16 a warp
constexpr int kSolveParts = 3, kAttendParts = 2, kStateParts = 2, kUpdateParts = 3;

// What PrepareKernel leaves for a chunk and value head: matrices in bf16, [64, 64].
struct Prepared {
  uint16_t solve[kSolveParts][kChunkRows * kChunkRows];    // (I + A)^-1 diag(beta)
  uint16_t attend[kAttendParts][kChunkRows * kChunkRows];  // P
  float key_in[kChunkRows];                                // e^G_i / |k_i|
  float query_in[kChunkRows];                              // e^G_i / |q_i| / sqrt(key_dim)
  float key_out[kChunkRows];                               // e^(G_C - G_i) / |k_i|
  float chunk_decay[kChunkRows];                           // [0]: e^G_C
};
static_assert(sizeof(Prepared) % 16 == 0);
constexpr int kMatrixBytes = kChunkRows * kChunkRows * 2;

// The part of a segment that lies in one cell of the grid.
struct Chunk {
  int32_t segment = -1;
  int32_t first_row, rows;  // of the step
};

__device__ __forceinline__ int32_t ChunksOf(const Segment& segment) {
  if (segment.row_count <= 0) return 0;
  return (segment.start_position % kChunkRows + segment.row_count + kChunkRows - 1) / kChunkRows;
}

__device__ __forceinline__ Chunk ChunkOf(const Segment& segment, int32_t index) {
  const int32_t before = segment.start_position % kChunkRows;
  const int32_t begin = max(index * kChunkRows - before, 0);
  const int32_t end = min((index + 1) * kChunkRows - before, segment.row_count);
  return {.segment = 0, .first_row = segment.first_row + begin, .rows = end - begin};
}

// Chunks are numbered through the segments. Segment -1: there is no such chunk.
__device__ __forceinline__ Chunk ChunkAt(const DeltaTask& task, int32_t index) {
  for (int32_t i = 0; i < task.segment_count; ++i) {
    const Segment segment = task.segments[i];
    const int32_t chunks = ChunksOf(segment);
    if (index < chunks) {
      Chunk chunk = ChunkOf(segment, index);
      chunk.segment = i;
      return chunk;
    }
    index -= chunks;
  }
  return {};
}

// Starts copying `cols` columns of a chunk's rows into a tile of kPieces pieces; the rest becomes zero.
template <int kPieces>
__device__ __forceinline__ void LoadRows(const DeltaTask& task, const Chunk& chunk, int64_t first_column,
                                         int cols, bool aligned, uint32_t to) {
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kChunkRows * kPieces; i += kThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    const uint32_t target = to + PieceOffset(row, piece, kPieces);
    const int count = row < chunk.rows ? cols - piece * 8 : 0;
    const __nv_bfloat16* from = task.qkv.Row(chunk.first_row + (row < chunk.rows ? row : 0)) + first_column +
                                (count > 0 ? piece * 8 : 0);
    if (aligned) {
      ptx::CopyAsync16(target, from, count > 0);
    } else {
      ptx::StoreShared16(target, GatherPiece(from, count));
    }
  }
}

// Sums of squares of row `row` of a tile of bf16, by a warp.
template <int kDim>
__device__ __forceinline__ float SumOfSquares(const uint8_t* tile, int row) {
  constexpr int kWords = kDim / 64;  // of 4 bytes, per thread
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const int word = static_cast<int>(threadIdx.x) % 32 + 32 * i;
    const uint32_t pair =
        *reinterpret_cast<const uint32_t*>(tile + PieceOffset(row, word / 4, kDim / 8) + word % 4 * 4);
    const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
    sum = fmaf(low, low, sum);
    sum = fmaf(high, high, sum);
  }
  return WarpSum(sum);
}

// d[8 n-tiles] += rows [16 * warp, + 16) of `a` times all 64 rows of `b` transposed.
template <int kDim>
__device__ __forceinline__ void MultiplyRows(uint32_t a_tile, uint32_t b_tile, float (&d)[8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[4];
    ptx::LoadMatrix4(a, a_tile + PieceOffset(16 * warp + lane % 16, 2 * k + lane / 16, kDim / 8));
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t b[4];
      ptx::LoadMatrix4(
          b, b_tile + PieceOffset(16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2, kDim / 8));
      ptx::Mma16x8x16(d[2 * n], a, b[0], b[1]);
      ptx::Mma16x8x16(d[2 * n + 1], a, b[2], b[3]);
    }
  }
}

constexpr int kSolveStride = kChunkRows + 4;

template <int kDim>
struct PrepareShared {
  uint8_t k[kChunkRows * kDim * 2], q[kChunkRows * kDim * 2];
  float lower[kChunkRows * kSolveStride];                  // A transposed: [j][i]
  float key_factor[kChunkRows], query_factor[kChunkRows];  // 1 / |k|, 1 / |q| / sqrt(key_dim)
  float decay_sum[kChunkRows], beta[kChunkRows];           // G
};

// Block (chunk, value head), 4 warps of 16 rows. Then (I + A)^-1 column by column, one thread each: column j
// follows from the columns of A before it by forward substitution.
template <int kDim>
__global__ void __launch_bounds__(kThreads)
    PrepareKernel(const DeltaTask task, int32_t first_chunk, bool aligned, Prepared* prepared) {
  extern __shared__ __align__(16) uint8_t shared_memory[];
  auto& shared = *reinterpret_cast<PrepareShared<kDim>*>(shared_memory);
  LetNextKernelStart();
  WaitForPreviousKernel();
  const Chunk chunk = ChunkAt(task, first_chunk + static_cast<int32_t>(blockIdx.x));
  if (chunk.segment < 0) return;
  const auto head = static_cast<int32_t>(blockIdx.y);
  const int32_t key_head = head / (task.value_heads / task.key_heads);
  Prepared& out = prepared[int64_t{blockIdx.x} * task.value_heads + head];
  const uint32_t k_tile = ptx::SharedAddress(shared.k), q_tile = ptx::SharedAddress(shared.q);
  LoadRows<kDim / 8>(task, chunk, task.KeyCols() + int64_t{key_head} * task.key_dim, task.key_dim, aligned,
                     k_tile);
  LoadRows<kDim / 8>(task, chunk, int64_t{key_head} * task.key_dim, task.key_dim, aligned, q_tile);
  ptx::CopyAsyncCommit();

  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  if (warp == 0) {  // rows 2 lane, 2 lane + 1
    float g[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 2 * lane + e;
      Gates gates = {0, 0};
      if (row < chunk.rows) gates = GatesOf(task, chunk.first_row + row, head);
      g[e] = gates.g;
      shared.beta[row] = gates.beta;
    }
    float sum = g[0] + g[1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float before = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += before;
    }
    float before = __shfl_up_sync(0xffffffffu, sum, 1);
    if (lane == 0) before = 0;
    shared.decay_sum[2 * lane] = before + g[0];
    shared.decay_sum[2 * lane + 1] = sum;
  }
  ptx::CopyAsyncWait<0>();
  __syncthreads();
  for (int row = warp; row < kChunkRows; row += kThreads / 32) {
    const float k_factor = 1.0f / sqrtf(SumOfSquares<kDim>(shared.k, row) + 1e-6f);
    const float q_factor = task.query_scale / sqrtf(SumOfSquares<kDim>(shared.q, row) + 1e-6f);
    const float sum = shared.decay_sum[row], last = shared.decay_sum[kChunkRows - 1];
    if (lane == 0) {
      shared.key_factor[row] = k_factor;
      shared.query_factor[row] = q_factor;
      const float decay = ExpF32(sum);
      out.key_in[row] = decay * k_factor;
      out.query_in[row] = decay * q_factor;
      out.key_out[row] = ExpF32(last - sum) * k_factor;
      out.chunk_decay[row] = ExpF32(last);
    }
  }
  __syncthreads();

  float kk[8][4] = {}, qk[8][4] = {};
  MultiplyRows<kDim>(k_tile, k_tile, kk);
  MultiplyRows<kDim>(q_tile, k_tile, qk);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = 16 * warp + lane / 4 + 8 * half;
    const float own = shared.decay_sum[i], beta = shared.beta[i];
    const float k_factor = shared.key_factor[i], q_factor = shared.query_factor[i];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float attend[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int j = 8 * n + lane % 4 * 2 + e;
        // For j > i the exponent may overflow; nothing is made of it.
        const float factor = j <= i ? ExpF32(own - shared.decay_sum[j]) * shared.key_factor[j] : 0.0f;
        attend[e] = j <= i ? qk[n][2 * half + e] * factor * q_factor : 0.0f;
        shared.lower[j * kSolveStride + i] = j < i ? kk[n][2 * half + e] * factor * k_factor * beta : 0.0f;
      }
      const int at = i * kChunkRows + 8 * n + lane % 4 * 2;
#pragma unroll
      for (int part = 0; part < kAttendParts; ++part) {
        *reinterpret_cast<uint32_t*>(out.attend[part] + at) = TakeBf16Pair(attend[0], attend[1]);
      }
    }
  }
  __syncthreads();

  if (threadIdx.x >= kChunkRows) return;
  const auto column = static_cast<int>(threadIdx.x);
  float x[kChunkRows];
#pragma unroll
  for (int i = 0; i < kChunkRows; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
  for (int m = 0; m < kChunkRows - 1; ++m) {  // x[m] is final
    const float minus = -x[m];
#pragma unroll
    for (int i = (m + 1) / 4 * 4; i < kChunkRows; i += 4) {
      const float4 a = *reinterpret_cast<const float4*>(shared.lower + m * kSolveStride + i);
      if (i > m) x[i] = fmaf(a.x, minus, x[i]);
      if (i + 1 > m) x[i + 1] = fmaf(a.y, minus, x[i + 1]);
      if (i + 2 > m) x[i + 2] = fmaf(a.z, minus, x[i + 2]);
      x[i + 3] = fmaf(a.w, minus, x[i + 3]);
    }
  }
  const float beta = shared.beta[column];
#pragma unroll
  for (int i = 0; i < kChunkRows; ++i) {
    float value = x[i] * beta, nothing = 0;
#pragma unroll
    for (int part = 0; part < kSolveParts; ++part) {
      out.solve[part][i * kChunkRows + column] = static_cast<uint16_t>(TakeBf16Pair(value, nothing));
    }
  }
}

template <int kDim>
struct ScanStage {
  uint8_t k[kChunkRows * kDim * 2], q[kChunkRows * kDim * 2];
  uint8_t solve[kSolveParts * kMatrixBytes], attend[kAttendParts * kMatrixBytes];
  uint8_t v[kChunkRows * kSlice * 2];  // then the outputs
  float key_in[kChunkRows], query_in[kChunkRows], key_out[kChunkRows], chunk_decay[kChunkRows];
};

// The operand of the 16 x 16 block at columns 16 k of a warp's result d, in kParts parts, the largest first.
template <int kParts>
struct SplitOperand {
  uint32_t parts[kParts][4];

  template <int kTiles>
  __device__ __forceinline__ SplitOperand(const float (&d)[kTiles][4], int k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float first = d[2 * k + i / 2][i % 2 * 2], second = d[2 * k + i / 2][i % 2 * 2 + 1];
#pragma unroll
      for (int part = 0; part < kParts; ++part) parts[part][i] = TakeBf16Pair(first, second);
    }
  }
  // d[0], d[1] += this times two exact operands; the smallest parts come first. `skip` parts are left out.
  __device__ __forceinline__ void Multiply(const uint32_t (&b)[4], int skip, float (&first)[4],
                                           float (&second)[4]) const {
#pragma unroll
    for (int part = kParts - 1; part >= 0; --part) {
      if (part >= kParts - skip) continue;
      ptx::Mma16x8x16(first, parts[part], b[0], b[1]);
      ptx::Mma16x8x16(second, parts[part], b[2], b[3]);
    }
  }
};

// d += x M' for a lower triangular 64 x 64 matrix M in kParts parts, one after the other.
template <int kParts>
__device__ __forceinline__ void MultiplyLower(const float (&x)[8][4], uint32_t matrix, float (&d)[8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const SplitOperand<kParts> a(x, k);
#pragma unroll
    for (int n = k; n < 4; ++n) {  // above the diagonal M is zero
      const uint32_t offset = PieceOffset(16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2, 8);
#pragma unroll
      for (int part = kParts - 1; part >= 0; --part) {
        uint32_t b[4];
        ptx::LoadMatrix4(b, matrix + static_cast<uint32_t>(part * kMatrixBytes) + offset);
        a.Multiply(b, part, d[2 * n], d[2 * n + 1]);
      }
    }
  }
}

// Block (slice of value columns, value head, segment). Everything is held transposed, [value columns, keys or
// rows], 16 columns a warp: a result then is the next product's left operand as it lies in registers.
template <int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    ScanKernel(const DeltaTask task, int32_t first_chunk, int32_t chunk_count, bool qkv_aligned,
               bool o_aligned, const Prepared* prepared) {
  using Stage = ScanStage<kDim>;
  extern __shared__ __align__(16) uint8_t shared_memory[];
  auto* stages = reinterpret_cast<Stage*>(shared_memory);
  LetNextKernelStart();
  WaitForPreviousKernel();
  const Segment segment = task.segments[blockIdx.z];
  int32_t number = 0;  // of the segment's first chunk
  for (int32_t i = 0; i < static_cast<int32_t>(blockIdx.z); ++i) number += ChunksOf(task.segments[i]);
  const int32_t begin = max(first_chunk - number, 0);
  const int32_t end = min(first_chunk + chunk_count - number, ChunksOf(segment));
  if (begin >= end) return;

  const auto head = static_cast<int32_t>(blockIdx.y);
  const int32_t key_head = head / (task.value_heads / task.key_heads);
  const auto slice = static_cast<int32_t>(blockIdx.x) * kSlice;
  const int slice_cols = min(task.value_dim - slice, kSlice);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t v_column = 2 * task.KeyCols() + int64_t{head} * task.value_dim + slice;

  const auto load = [&](int32_t index) {
    if (index < end) {
      Stage& stage = stages[(index - begin) & 1];
      const Chunk chunk = ChunkOf(segment, index);
      LoadRows<kDim / 8>(task, chunk, task.KeyCols() + int64_t{key_head} * task.key_dim, task.key_dim,
                         qkv_aligned, ptx::SharedAddress(stage.k));
      LoadRows<kDim / 8>(task, chunk, int64_t{key_head} * task.key_dim, task.key_dim, qkv_aligned,
                         ptx::SharedAddress(stage.q));
      LoadRows<kSlice / 8>(task, chunk, v_column, slice_cols, qkv_aligned, ptx::SharedAddress(stage.v));
      const Prepared& from = prepared[int64_t{number + index - first_chunk} * task.value_heads + head];
      const auto* matrices = reinterpret_cast<const uint8_t*>(&from);
      const uint32_t to = ptx::SharedAddress(stage.solve);
#pragma unroll
      for (int i = static_cast<int>(threadIdx.x); i < (kSolveParts + kAttendParts) * kMatrixBytes / 16;
           i += kThreads) {
        // All matrices as one tile.
        ptx::CopyAsync16(to + PieceOffset(i / 8, i % 8, 8), matrices + i * 16, true);
      }
      if (threadIdx.x < 4 * kChunkRows / 4) {
        ptx::CopyAsync16(ptx::SharedAddress(stage.key_in) + threadIdx.x * 16,
                         reinterpret_cast<const uint8_t*>(from.key_in) + threadIdx.x * 16, true);
      }
    }
    ptx::CopyAsyncCommit();
  };
  load(begin);

  // state[n][e]: value column lane / 4 + 8 (e / 2) of the warp's 16, key 8 n + 2 (lane mod 4) + e mod 2.
  float* states =
      task.states + (int64_t{segment.slot} * task.value_heads + head) * task.key_dim * task.value_dim;
  const auto for_state = [&](const auto& f) {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = slice + 16 * warp + lane / 4 + e / 2 * 8, d = 8 * n + lane % 4 * 2 + e % 2;
        if (column < task.value_dim && d < task.key_dim)
          f(n, e, states + int64_t{d} * task.value_dim + column);
      }
    }
  };
  float state[kDim / 8][4] = {};
  for_state([&](int n, int e, const float* from) { state[n][e] = *from; });

  for (int32_t index = begin; index < end; ++index) {
    ptx::CopyAsyncWait<0>();
    __syncthreads();  // this chunk is here; nobody reads the one before
    load(index + 1);
    Stage& stage = stages[(index - begin) & 1];
    const uint32_t k_tile = ptx::SharedAddress(stage.k), q_tile = ptx::SharedAddress(stage.q);
    const uint32_t v_tile = ptx::SharedAddress(stage.v);

    float x[8][4] = {}, y[8][4] = {};  // S'K', S'Q'
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const SplitOperand<kStateParts> a(state, k);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint32_t offset =
            PieceOffset(16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2, kDim / 8);
        uint32_t b[4];
        ptx::LoadMatrix4(b, k_tile + offset);
        a.Multiply(b, 0, x[2 * n], x[2 * n + 1]);
        ptx::LoadMatrix4(b, q_tile + offset);
        a.Multiply(b, 0, y[2 * n], y[2 * n + 1]);
      }
    }
    // x <- V' - x diag(key_in), y <- y diag(query_in)
    const int pair = lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t v[4];  // rows 16 n .., columns .. + 8; rows 16 n + 8 .. likewise
      ptx::LoadMatrix4Transposed(
          v, v_tile + PieceOffset(16 * n + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2, kSlice / 8));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 key_in = *reinterpret_cast<const float2*>(stage.key_in + 16 * n + 8 * i + pair);
        const float2 query_in = *reinterpret_cast<const float2*>(stage.query_in + 16 * n + 8 * i + pair);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* seen = &x[2 * n + i][2 * half];
          const uint32_t values = v[2 * i + half];
          seen[0] = fmaf(-key_in.x, seen[0], __uint_as_float(values << 16));
          seen[1] = fmaf(-key_in.y, seen[1], __uint_as_float(values & 0xffff0000u));
          y[2 * n + i][2 * half] *= query_in.x;
          y[2 * n + i][2 * half + 1] *= query_in.y;
        }
      }
    }
    float delta[8][4] = {};
    MultiplyLower<kSolveParts>(x, ptx::SharedAddress(stage.solve), delta);
    MultiplyLower<kAttendParts>(delta, ptx::SharedAddress(stage.attend), y);

    // Outputs take the place of the warp's columns of V.
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 8 * n + pair + e % 2, column = lane / 4;
        const uint32_t at =
            PieceOffset(row, 2 * warp + e / 2, kSlice / 8) + static_cast<uint32_t>(column) * 2;
        *reinterpret_cast<__nv_bfloat16*>(stage.v + at) = __float2bfloat16_rn(y[n][e]);
      }
    }
    __syncwarp();
    const Chunk chunk = ChunkOf(segment, index);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * i + lane / 2, piece = 2 * warp + lane % 2;
      const int count = slice_cols - 8 * piece;
      if (row >= chunk.rows || count <= 0) continue;
      const uint8_t* from = stage.v + PieceOffset(row, piece, kSlice / 8);
      __nv_bfloat16* to =
          task.o.Row(chunk.first_row + row) + int64_t{head} * task.value_dim + slice + 8 * piece;
      if (o_aligned) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int c = 0; c < min(count, 8); ++c) to[c] = reinterpret_cast<const __nv_bfloat16*>(from)[c];
      }
    }

    const float chunk_decay = stage.chunk_decay[0];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 key_out = *reinterpret_cast<const float2*>(stage.key_out + 8 * n + pair);
      delta[n][0] *= key_out.x, delta[n][1] *= key_out.y, delta[n][2] *= key_out.x, delta[n][3] *= key_out.y;
    }
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state[n][e] *= chunk_decay;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const SplitOperand<kUpdateParts> a(delta, k);
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        uint32_t b[4];
        ptx::LoadMatrix4Transposed(b, k_tile + PieceOffset(16 * k + lane % 16, 2 * n + lane / 16, kDim / 8));
        a.Multiply(b, 0, state[2 * n], state[2 * n + 1]);
      }
    }
  }
  for_state([&](int n, int e, float* to) { *to = state[n][e]; });
}

template <int kDim>
cudaError_t LaunchDim(const DeltaTask& task, int64_t rows, const CudaContext& context) {
  const auto prepare = PrepareKernel<kDim>;
  const auto scan = ScanKernel<kDim>;
  constexpr int kPrepareBytes = sizeof(PrepareShared<kDim>), kScanBytes = 2 * sizeof(ScanStage<kDim>);
  // Set at every call: it belongs to the device, and costs less than remembering where it has been set.
  cudaError_t error =
      cudaFuncSetAttribute(prepare, cudaFuncAttributeMaxDynamicSharedMemorySize, kPrepareBytes);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(scan, cudaFuncAttributeMaxDynamicSharedMemorySize, kScanBytes);
  if (error != cudaSuccess) return error;

  // Every piece that the copies read whole begins at a multiple of 16 bytes and ends inside its head.
  const auto is_aligned = [](const Bf16Rows& rows_of, int64_t cols) {
    return reinterpret_cast<uintptr_t>(rows_of.data) % 16 == 0 && rows_of.stride % 8 == 0 && cols % 8 == 0;
  };
  const bool qkv_aligned = is_aligned(task.qkv, task.key_dim) && task.value_dim % 8 == 0;
  const bool o_aligned = is_aligned(task.o, task.value_dim);
  auto* prepared = static_cast<Prepared*>(context.workspace);
  const int64_t at_once = kWorkspaceBytes / (static_cast<int64_t>(sizeof(Prepared)) * task.value_heads);
  if (at_once < 1) return cudaErrorNotSupported;
  // A segment that begins and ends inside cells has up to two chunks more than whole ones.
  const int64_t chunks = std::min(rows, rows / kChunkRows + 2 * int64_t{task.segment_count});
  for (int64_t first = 0; first < chunks; first += at_once) {
    const int64_t count = std::min(at_once, chunks - first);
    const LaunchShape prepare_shape = {
        .grid = Grid(count, task.value_heads), .block = dim3(kThreads), .shared_bytes = kPrepareBytes};
    error = Launch(context, prepare_shape, prepare, task, static_cast<int32_t>(first), qkv_aligned, prepared);
    if (error != cudaSuccess) return error;
    const LaunchShape scan_shape = {
        .grid = Grid(CeilDiv(task.value_dim, kSlice), task.value_heads, task.segment_count),
        .block = dim3(kThreads),
        .shared_bytes = kScanBytes};
    error = Launch(context, scan_shape, scan, task, static_cast<int32_t>(first), static_cast<int32_t>(count),
                   qkv_aligned, o_aligned, prepared);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t LaunchDeltaPrefill(const DeltaTask& task, int64_t rows, const CudaContext& context) {
  if (rows == 0 || task.segment_count == 0) return cudaSuccess;
  return task.key_dim <= 64 ? LaunchDim<64>(task, rows, context) : LaunchDim<128>(task, rows, context);
}

}  // namespace dflash
