// VERIFY rows of heads of 128 x 128: all that stands between the two projections of a layer in one kernel.
// Convolution, q, k and gates, fold of the pending records, recurrence token after token, norm. Other shapes
// take gated_delta_net_prepare.cu and gated_delta_net_verify.cu; the order of every sum is the same there.
//
//   grid     (2 slices of 64 value columns x value heads, 1, segments). A cluster is the slices of up to four
//            heads that share a key head: its q and k are prepared once, a row a warp, and copied to all its
//            blocks. The two blocks of a head also exchange sums of squares
//   block    4 warps of 16 columns. A thread holds S at 4 neighbouring columns and 16 keys, 64 registers:
//            columns 4 (lane mod 4) + 0 .. 3, keys 32 j + 4 p + 0 .. 3 of part p = lane / 4. Sums over keys:
//            ascending in the thread, then over the 8 parts at distances 1, 2, 4
//   shared   16 rows at a time (k, q, v, gates), 16 records, inputs and weights of the convolution: 52 KiB.
//            4 blocks fit on a multiprocessor, by registers too
//   waits    A token has none: a warp owns its columns, 8 lanes share a sum by shuffles. Per 16 rows a block
//            waits for the rows of the other blocks and for the sums of squares, both with a barrier that
//            counts bytes. Barriers of the whole cluster release memory, which waits for every store under
//            way: they only say that blocks run, and that no copy is under way when a block ends
//
// Floors. Bytes: S once in and, with records pending, once out. Arithmetic: 4 float32 operations an element
// of S and row, 2 an element and record, so 2048 and 1024 warp instructions a head: 8 sequences of 16 rows
// with 7 records, 48 heads, take 50 MB (13 us) or 17 us of 132 multiprocessors at 1.75 GHz. All instructions
// of such a block are 1.5 times as many. What is above that is waiting: blocks that start together load S
// together, and compute together (docs/performance.md, "CUDA operations").
#include <atomic>

#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/ptx.cuh"
#include "kernels/device/cuda/shared_tile.cuh"
#include "kernels/elementary/sigmoid.cuh"
#include "kernels/gated_delta_net/gated_delta_net_gates.cuh"
#include "kernels/gated_delta_net/gated_delta_net_records.cuh"

namespace dflash {
namespace {

constexpr int kDim = kMaxKeyDim;  // keys and values of a head
constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kSlices = 2, kColumns = kDim / kSlices;  // of a block
constexpr int kOwn = 4;                                // columns of a thread
constexpr int kParts = 8, kKeys = kDim / kParts;       // threads of a sum over keys, keys of one of them
constexpr int kRowsAtOnce = 16;
constexpr int kTaps = 4;
constexpr int kResident = 4;                      // blocks of a multiprocessor
constexpr int kMostBlocks = 8;                    // of a cluster
constexpr int kMultiprocessorBytes = 228 * 1024;  // of shared memory, 1 KiB a block included
constexpr int kSums = kDim / kChunk;  // the norm adds up eight columns at a time, as GatedRmsNorm does
static_assert(kColumns / kOwn * kParts == kThreads && kRowsAtOnce * kColumns == kThreads * kChunk);

// A row of the step, as all heads of the cluster see it.
struct alignas(16) Row {
  float k[kDim], q[kDim];
  float key_query, unused[3];
};

struct Shared {
  Row rows[kRowsAtOnce];                // the same in all blocks of the cluster
  float2 gates[kRowsAtOnce];            // beta, e^g
  float values[kRowsAtOnce][kColumns];  // v, then o in its place; both rounded to bf16
  float squares[kRowsAtOnce][kSums];    // of all columns of the head
  float norm_weight[kColumns];
  float record_k[kRowsAtOnce][kDim], record_c[kRowsAtOnce][kColumns], record_decay[kRowsAtOnce];
  uint64_t rows_there, squares_there;  // barriers of what the cluster writes here
  uint2 weights[2 * kDim + kColumns];  // four taps of the channels of q, k and the block's part of v
  // Inputs of the convolution, four channels of q, of k, and twice of v. A thread reads what it has copied.
  uint2 inputs[4][kTaps][kThreads];
};
static_assert(kResident * (sizeof(Shared) + 1024) <= kMultiprocessorBytes);

// Where a block works.
struct Place {
  Segment segment;
  int32_t head, key_head, first_column;
  int blocks, rank;  // of the cluster
  int warp, lane;
};

// ---- Convolution, q, k, v, gates

// Starts copying taps of `channels` channels (an even number).
__device__ __forceinline__ void StageWeights(const DeltaTask& task, int64_t channel, int channels,
                                             uint2* to) {
  const auto* from = reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(task.conv_weight.data) +
                                                    channel * kTaps);
  for (int i = static_cast<int>(threadIdx.x); i < channels / 2; i += kThreads) {
    ptx::CopyAsync16(ptx::SharedAddress(to + 2 * i), from + i, true);
  }
}

// Starts copying what the convolution needs for four neighbouring channels of the segment's row `row`.
__device__ __forceinline__ void StageInputs(const DeltaTask& task, const Segment& segment, int row,
                                            int64_t channel, uint2 (&to)[kTaps][kThreads]) {
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) {
    const int at = row - (kTaps - 1) + tap;
    const __nv_bfloat16* from =
        at >= 0 ? task.qkv.Row(segment.first_row + at)
                : task.conv_state.Row(int64_t{segment.slot} * (kTaps - 1) + at + kTaps - 1);
    ptx::CopyAsync8(ptx::SharedAddress(&to[tap][threadIdx.x]), from + channel);
  }
}

// Four neighbouring channels of one row, as CausalConv computes and rounds them.
__device__ __forceinline__ float4 Convolve(const uint2 (&inputs)[kTaps][kThreads], const uint2* weights) {
  const auto low = [](uint32_t pair) { return __uint_as_float(pair << 16); };
  const auto high = [](uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); };
  float sums[4] = {};
  const uint4 first = reinterpret_cast<const uint4*>(weights)[0],
              last = reinterpret_cast<const uint4*>(weights)[1];
  const uint32_t taps[4][2] = {{first.x, first.y}, {first.z, first.w}, {last.x, last.y}, {last.z, last.w}};
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) {
    const uint2 input = inputs[tap][threadIdx.x];
    const float in[4] = {low(input.x), high(input.x), low(input.y), high(input.y)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = taps[i][tap / 2];
      sums[i] = fmaf(tap % 2 == 0 ? low(pair) : high(pair), in[i], sums[i]);
    }
  }
  return make_float4(Rounded(SiluBranchless(sums[0])), Rounded(SiluBranchless(sums[1])),
                     Rounded(SiluBranchless(sums[2])), Rounded(SiluBranchless(sums[3])));
}

__device__ __forceinline__ float Dot(float4 a, float4 b) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, 0.0f))));
}
__device__ __forceinline__ float4 Scaled(float4 a, float factor) {
  return make_float4(a.x * factor, a.y * factor, a.z * factor, a.w * factor);
}

// The sum over a warp, the same order in every lane.
__device__ __forceinline__ float SumOverWarp(float value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

// Which of the batch's rows a warp prepares q and k for: this one, and those a whole round further.
__device__ __forceinline__ int FirstPreparedRow(const Place& place) {
  return (kWarps - 1 - place.warp) * place.blocks + place.rank;
}

__device__ __forceinline__ void StageQueryAndKey(const DeltaTask& task, const Place& place, int row,
                                                 Shared& shared) {
  const int64_t channel = int64_t{place.key_head} * kDim + 4 * place.lane;
  StageInputs(task, place.segment, row, channel, shared.inputs[0]);
  StageInputs(task, place.segment, row, task.KeyCols() + channel, shared.inputs[1]);
}

// Starts copying the inputs of rows [first, first + count) of the segment.
__device__ __forceinline__ void StageRows(const DeltaTask& task, const Place& place, int first, int count,
                                          Shared& shared) {
  if (const int r = FirstPreparedRow(place); r < count) StageQueryAndKey(task, place, first + r, shared);
  const auto t = static_cast<int>(threadIdx.x);
  if (const int r = t / (kColumns / kChunk); r < count) {
    const int64_t channel = 2 * task.KeyCols() + int64_t{place.head} * kDim + place.first_column +
                            t % (kColumns / kChunk) * kChunk;
    StageInputs(task, place.segment, first + r, channel, shared.inputs[2]);
    StageInputs(task, place.segment, first + r, channel + 4, shared.inputs[3]);
  }
  ptx::CopyAsyncCommit();
}

// Beta and e^g of rows [first, first + count), one thread a row; g to the records.
__device__ __forceinline__ void PrepareGates(const DeltaTask& task, const Place& place, int64_t fresh,
                                             int first, int count, Shared& shared) {
  if (place.warp != 1 || place.lane >= count) return;
  const Gates gates = GatesOf(task, place.segment.first_row + first + place.lane, place.head);
  shared.gates[place.lane] = make_float2(gates.beta, ExpF32(gates.g));
  if (place.first_column == 0) {
    RecordAt(task, place.segment.slot, fresh, first + place.lane).g[place.head] = gates.g;
  }
}

// From the staged inputs: v of the block, and this warp's share of the cluster's q and k, which every block
// of the cluster gets. k goes to the records, too.
__device__ __forceinline__ void PrepareRows(const DeltaTask& task, const Place& place, int64_t fresh,
                                            int first, int count, Shared& shared) {
  const auto t = static_cast<int>(threadIdx.x);
  if (const int r = t / (kColumns / kChunk); r < count) {
    const int column = t % (kColumns / kChunk) * kChunk;
    const uint2* weights = shared.weights + 2 * kDim + column;
    auto* to = reinterpret_cast<float4*>(&shared.values[r][column]);
    to[0] = Convolve(shared.inputs[2], weights);
    to[1] = Convolve(shared.inputs[3], weights + 4);
  }
  const int stride = kWarps * place.blocks;
  const bool keeps_record = (place.head - place.rank / kSlices) % (task.value_heads / task.key_heads) == 0;
  for (int r = FirstPreparedRow(place); r < count; r += stride) {
    float4 q = Convolve(shared.inputs[0], shared.weights + 4 * place.lane);
    float4 k = Convolve(shared.inputs[1], shared.weights + kDim + 4 * place.lane);
    if (r + stride < count) {
      StageQueryAndKey(task, place, first + r + stride, shared);
      ptx::CopyAsyncCommit();
    }
    q = Scaled(q, task.query_scale / sqrtf(SumOverWarp(Dot(q, q)) + 1e-6f));
    k = Scaled(k, 1.0f / sqrtf(SumOverWarp(Dot(k, k)) + 1e-6f));
    const float key_query = SumOverWarp(Dot(k, q));
    Row& own_row = shared.rows[r];
    *reinterpret_cast<float4*>(&own_row.q[4 * place.lane]) = q;
    *reinterpret_cast<float4*>(&own_row.k[4 * place.lane]) = k;
    if (place.lane == 0) own_row.key_query = key_query;
    ptx::FenceForCopies();
    __syncwarp();
    if (place.lane < place.blocks && place.lane != place.rank) {
      ptx::CopyToRank(ptx::SharedAddress(&own_row), sizeof(Row), static_cast<uint32_t>(place.lane),
                      ptx::SharedAddress(&shared.rows_there));
    }
    if (keeps_record) {
      float* to = RecordAt(task, place.segment.slot, fresh, first + r).k + int64_t{place.key_head} * kDim;
      *reinterpret_cast<float4*>(to + 4 * place.lane) = k;
    }
    if (r + stride < count) ptx::CopyAsyncWait<0>();
  }
}

// ---- Records and state

// Starts copying records [first, first + count). Returns g of record threadIdx.x.
__device__ __forceinline__ float StageRecords(const DeltaTask& task, const Place& place, int64_t pending,
                                              int first, int count, Shared& shared) {
  constexpr int kKeyPieces = kDim / 4, kPieces = kKeyPieces + kColumns / 4;
  for (int i = static_cast<int>(threadIdx.x); i < count * kPieces; i += kThreads) {
    const int r = i / kPieces, piece = i % kPieces;
    const Record record = RecordAt(task, place.segment.slot, pending, first + r);
    if (piece < kKeyPieces) {
      ptx::CopyAsync16(ptx::SharedAddress(&shared.record_k[r][4 * piece]),
                       record.k + int64_t{place.key_head} * kDim + 4 * piece, true);
    } else {
      const int column = 4 * (piece - kKeyPieces);
      ptx::CopyAsync16(ptx::SharedAddress(&shared.record_c[r][column]),
                       record.c + int64_t{place.head} * kDim + place.first_column + column, true);
    }
  }
  ptx::CopyAsyncCommit();
  const auto r = static_cast<int>(threadIdx.x);
  return r < count ? RecordAt(task, place.segment.slot, pending, first + r).g[place.head] : 0.0f;
}

// A thread's part of a vector over keys.
__device__ __forceinline__ void ReadPart(const float* vector, int part, float (&values)[kKeys]) {
#pragma unroll
  for (int j = 0; j < kKeys / 4; ++j) {
    const float4 four = *reinterpret_cast<const float4*>(vector + 32 * j + 4 * part);
    values[4 * j] = four.x, values[4 * j + 1] = four.y, values[4 * j + 2] = four.z,
               values[4 * j + 3] = four.w;
  }
}

// A thread's part of S.
struct StatePart {
  float at[kKeys][kOwn];

  // `memory`: S of the head at the thread's first column.
  template <typename F>
  __device__ __forceinline__ static void ForKeys(float* memory, int part, const F& f) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      f(i, reinterpret_cast<float4*>(memory + int64_t{i / 4 * 32 + 4 * part + i % 4} * kDim));
    }
  }
  __device__ __forceinline__ void Read(float* memory, int part) {
    ForKeys(memory, part, [&](int i, const float4* from) {
      const float4 four = *from;
      at[i][0] = four.x, at[i][1] = four.y, at[i][2] = four.z, at[i][3] = four.w;
    });
  }
  __device__ __forceinline__ void Write(float* memory, int part) const {
    ForKeys(memory, part,
            [&](int i, float4* to) { *to = make_float4(at[i][0], at[i][1], at[i][2], at[i][3]); });
  }

  // S <- decay S
  __device__ __forceinline__ void Decay(float decay) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
#pragma unroll
      for (int e = 0; e < kOwn; ++e) at[i][e] *= decay;
    }
  }

  // S <- S + k c'
  __device__ __forceinline__ void Add(const float (&k)[kKeys], const float (&c)[kOwn]) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
#pragma unroll
      for (int e = 0; e < kOwn; ++e) at[i][e] = fmaf(k[i], c[e], at[i][e]);
    }
  }

  // The part's share of S'x.
  __device__ __forceinline__ void Product(const float (&x)[kKeys], float (&sums)[kOwn]) const {
#pragma unroll
    for (int e = 0; e < kOwn; ++e) sums[e] = 0;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
#pragma unroll
      for (int e = 0; e < kOwn; ++e) sums[e] = fmaf(x[i], at[i][e], sums[e]);
    }
  }
};

// Sums over parts, in every thread. Part p is lanes 4 p .. 4 p + 3.
__device__ __forceinline__ void SumOverParts(float (&values)[kOwn]) {
#pragma unroll
  for (int distance = 1; distance < kParts; distance *= 2) {
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      values[e] += __shfl_xor_sync(0xffffffffu, values[e], distance * kOwn);
    }
  }
}

// Of a thread's four columns the one that it writes: the four values one each to parts 0 to 3, and again.
__device__ __forceinline__ int WrittenColumn(int part) { return part % 2 * 2 + part / 2 % 2; }
__device__ __forceinline__ float OfWrittenColumn(const float (&values)[kOwn], int part) {
  const bool odd = part % 2 != 0;
  const float first = odd ? values[2] : values[0], second = odd ? values[3] : values[1];
  return part / 2 % 2 != 0 ? second : first;
}

// The sum over parts of the written column alone, in the order of SumOverParts.
__device__ __forceinline__ float SumOfWrittenColumn(const float (&values)[kOwn], int part) {
  const bool odd = part % 2 != 0, second = part / 2 % 2 != 0;
  float kept[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    kept[e] = odd ? values[2 + e] : values[e];
    kept[e] += __shfl_xor_sync(0xffffffffu, odd ? values[e] : values[2 + e], kOwn);
  }
  float sum = second ? kept[1] : kept[0];
  sum += __shfl_xor_sync(0xffffffffu, second ? kept[0] : kept[1], 2 * kOwn);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 4 * kOwn);
}

// ---- Norm

// What this thread normalizes: 8 columns of one of the 16 rows.
struct NormPlace {
  int row, column;
};
__device__ __forceinline__ NormPlace NormPlaceOf() {
  const auto t = static_cast<int>(threadIdx.x);
  return {t / (kColumns / kChunk), t % (kColumns / kChunk) * kChunk};
}

// Starts copying z to where the thread's inputs were.
__device__ __forceinline__ void StageNorm(const DeltaTask& task, const Place& place, int first, int count,
                                          Shared& shared) {
  const NormPlace at = NormPlaceOf();
  if (at.row < count) {
    const __nv_bfloat16* z = task.z.Row(place.segment.first_row + first + at.row) +
                             int64_t{place.head} * kDim + place.first_column + at.column;
    ptx::CopyAsync8(ptx::SharedAddress(&shared.inputs[0][0][threadIdx.x]), z);
    ptx::CopyAsync8(ptx::SharedAddress(&shared.inputs[0][1][threadIdx.x]), z + 4);
  }
  ptx::CopyAsyncCommit();
}

// The thread's sum of squares, to both blocks of the head.
__device__ __forceinline__ void ShareSquares(const Place& place, int count, Shared& shared) {
  const NormPlace at = NormPlaceOf();
  if (at.row >= count) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const float value = shared.values[at.row][at.column + i];
    sum = fmaf(value, value, sum);
  }
  const uint32_t to = ptx::SharedAddress(&shared.squares[at.row][(place.first_column + at.column) / kChunk]);
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    ptx::StoreToRank(to, static_cast<uint32_t>(place.rank / kSlices * kSlices + slice), sum,
                     ptx::SharedAddress(&shared.squares_there));
  }
}

// The gates of what this thread normalizes.
__device__ __forceinline__ void NormGates(const DeltaTask& task, const Shared& shared,
                                          float (&gates)[kChunk]) {
  const uint2 low = shared.inputs[0][0][threadIdx.x], high = shared.inputs[0][1][threadIdx.x];
  float z[kChunk];
  Unpack(make_uint4(low.x, low.y, high.x, high.y), z);
#pragma unroll
  for (int i = 0; i < kChunk; ++i)
    gates[i] = task.norm_is_silu ? SiluBranchless(z[i]) : SigmoidBranchless(z[i]);
}

__device__ __forceinline__ void Normalize(const DeltaTask& task, const Place& place, int first, int count,
                                          const float (&gates)[kChunk], const Shared& shared) {
  const NormPlace at = NormPlaceOf();
  if (at.row >= count) return;
  // The order of GatedRmsNorm: over 16 threads, at distances 8, 4, 2, 1.
  float sums[kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = shared.squares[at.row][i];
#pragma unroll
  for (int distance = kSums / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) {
      if (i < distance) sums[i] += sums[i + distance];
    }
  }
  const float scale = 1.0f / sqrtf(sums[0] / static_cast<float>(kDim) + task.norm_eps);
  float values[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    values[i] = shared.values[at.row][at.column + i] * scale * shared.norm_weight[at.column + i] * gates[i];
  }
  auto* to = reinterpret_cast<uint2*>(task.o.Row(place.segment.first_row + first + at.row) +
                                      int64_t{place.head} * kDim + place.first_column + at.column);
  to[0] = make_uint2(PackBf16(values[0], values[1]), PackBf16(values[2], values[3]));
  to[1] = make_uint2(PackBf16(values[4], values[5]), PackBf16(values[6], values[7]));
}

__global__ void __launch_bounds__(kThreads, kResident)
    DeltaMixerKernel(const DeltaTask task, int32_t blocks) {
  extern __shared__ __align__(16) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  LetNextKernelStart();
  const uint32_t rows_there = ptx::SharedAddress(&shared.rows_there),
                 squares_there = ptx::SharedAddress(&shared.squares_there);
  if (threadIdx.x == 0) {
    ptx::BarrierInit(rows_there, 1);
    ptx::BarrierInit(squares_there, 1);
    ptx::BarrierInitFence();
  }
  ptx::ClusterArriveRelaxed();
  Place place;
  place.head = static_cast<int32_t>(blockIdx.x) / kSlices;
  place.key_head = place.head / (task.value_heads / task.key_heads);
  place.first_column = static_cast<int32_t>(blockIdx.x) % kSlices * kColumns;
  place.blocks = blocks;
  place.rank = static_cast<int>(blockIdx.x) % blocks;
  place.warp = static_cast<int>(threadIdx.x) / 32;
  place.lane = static_cast<int>(threadIdx.x) % 32;
  const auto t = static_cast<int>(threadIdx.x);
  const int64_t key_channel = int64_t{place.key_head} * kDim,
                value_column = int64_t{place.head} * kDim + place.first_column;
  StageWeights(task, key_channel, kDim, shared.weights);
  StageWeights(task, task.KeyCols() + key_channel, kDim, shared.weights + kDim);
  StageWeights(task, 2 * task.KeyCols() + value_column, kColumns, shared.weights + 2 * kDim);
  if (t < kColumns) shared.norm_weight[t] = 0.0f + task.norm_weight.At(0, place.first_column + t);
  WaitForPreviousKernel();

  place.segment = task.segments[blockIdx.z];
  const int64_t slot = place.segment.slot;
  float* state = task.states + (slot * task.value_heads + place.head) * kDim * kDim;
  if (t == 0) {  // the half of S that lies together, not the block's own
    ptx::PrefetchBulk(state + place.first_column * kDim, kDim * kColumns * sizeof(float));
  }
  const int row_count = min(place.segment.row_count, task.max_rows);
  const int record_count = min(task.pending_count[slot], task.max_rows);
  const int64_t pending = task.pending_buffer[slot];
  if (row_count <= 0 && record_count <= 0) return;
  StageRows(task, place, 0, min(row_count, kRowsAtOnce), shared);
  float record_g = StageRecords(task, place, pending, 0, min(record_count, kRowsAtOnce), shared);
  const int part = place.lane / kOwn, own = place.warp * (kColumns / kWarps) + place.lane % kOwn * kOwn;
  state += place.first_column + own;
  StatePart S;
  S.Read(state, part);
  const int64_t fresh = 1 - pending;
  for (int first = 0;; first += kRowsAtOnce) {
    const int count = min(row_count - first, kRowsAtOnce);
    if (first > 0) StageRows(task, place, first, count, shared);
    PrepareGates(task, place, fresh, first, count, shared);
    if (t == 0 && count > 0) {
      const int own_rows = (count - place.rank + place.blocks - 1) / place.blocks;  // 0 from rank count on
      ptx::BarrierArriveExpecting(rows_there, static_cast<uint32_t>((count - own_rows) * sizeof(Row)));
      ptx::BarrierArriveExpecting(squares_there, static_cast<uint32_t>(count) * kSums * sizeof(float));
    }
    if (first == 0) {
      ptx::CopyAsyncWait<1>();  // all but the records
      ptx::ClusterWait();       // all blocks run
    } else {
      ptx::CopyAsyncWait<0>();
    }
    __syncthreads();  // weights; values of the rows before have been read
    PrepareRows(task, place, fresh, first, count, shared);
    StageNorm(task, place, first, count, shared);
    if (first == 0) {
      for (int folded = 0; folded < record_count; folded += kRowsAtOnce) {
        const int records = min(record_count - folded, kRowsAtOnce);
        if (folded > 0) {
          __syncthreads();
          record_g = StageRecords(task, place, pending, folded, records, shared);
        }
        if (t < records) shared.record_decay[t] = ExpF32(record_g);
        ptx::CopyAsyncWait<0>();
        __syncthreads();
#pragma unroll 1
        for (int r = 0; r < records; ++r) {
          float k[kKeys];
          ReadPart(shared.record_k[r], part, k);
          const float4 four = *reinterpret_cast<const float4*>(&shared.record_c[r][own]);
          S.Decay(shared.record_decay[r]);
          S.Add(k, {four.x, four.y, four.z, four.w});
        }
      }
      if (record_count > 0) S.Write(state, part);
    }
    if (row_count <= 0) return;
    __syncthreads();  // v and gates
    ptx::BarrierWait(rows_there, static_cast<uint32_t>(first / kRowsAtOnce % 2));
    ptx::ClusterArriveRelaxed();  // the other blocks' copies have come

    float* c_to =
        RecordAt(task, slot, fresh, first).c + int64_t{place.head} * kDim + place.first_column + own;
    float k[kKeys];
    ReadPart(shared.rows[0].k, part, k);
    float2 gates = shared.gates[0];
#pragma unroll 1
    for (int r = 0; r < count; ++r, c_to += task.record_floats) {
      const float beta = gates.x, decay = gates.y, key_query = shared.rows[r].key_query;
      float q[kKeys], seen[kOwn], out[kOwn], c[kOwn];
      S.Decay(decay);
      S.Product(k, seen);
      SumOverParts(seen);
      ReadPart(shared.rows[r].q, part, q);
      S.Product(q, out);
      const float4 v = *reinterpret_cast<const float4*>(&shared.values[r][own]);
      const float values[kOwn] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int e = 0; e < kOwn; ++e) c[e] = beta * (values[e] - seen[e]);
      S.Add(k, c);
      const int next = min(r + 1, kRowsAtOnce - 1);
      gates = shared.gates[next];
      ReadPart(shared.rows[next].k, part, k);
      const float o = fmaf(key_query, OfWrittenColumn(c, part), SumOfWrittenColumn(out, part));
      if (part == 0) *reinterpret_cast<float4*>(c_to) = make_float4(c[0], c[1], c[2], c[3]);
      __syncwarp();  // all parts have read v
      if (part < kOwn) shared.values[r][own + WrittenColumn(part)] = Rounded(o);
    }
    __syncthreads();
    ShareSquares(place, count, shared);
    ptx::CopyAsyncWait<0>();
    float norm_gates[kChunk];
    NormGates(task, shared, norm_gates);
    ptx::BarrierWait(squares_there, static_cast<uint32_t>(first / kRowsAtOnce % 2));
    Normalize(task, place, first, count, norm_gates, shared);
    ptx::ClusterWait();
    if (first + count >= row_count) return;
    ptx::ClusterArrive();  // before anything of these rows is overwritten
    ptx::ClusterWait();
  }
}

// Heads whose blocks are a cluster: as many as share a key head, if that fits.
int64_t HeadsOfCluster(int64_t sharing) {
  for (int64_t heads = kMostBlocks / kSlices; heads > 1; --heads) {
    if (sharing % heads == 0) return heads;
  }
  return 1;
}

// Shared memory of a block. Blocks of a cluster come to lie on the same multiprocessor if they fit, while
// others stand idle: unused memory keeps them apart as long as all of them run at once all the same.
int SharedBytes(LaunchShape shape, int64_t clusters) {
  static std::atomic<int> most_clusters[kMostBlocks + 1][3] = {};  // that run at once; 0: not asked yet
  for (int resident : {1, 2}) {
    shape.shared_bytes = kMultiprocessorBytes / (resident + 1);
    std::atomic<int>& most = most_clusters[shape.cluster][resident];
    if (most == 0) {
      int found = 0;
      if (MostClusters(shape, DeltaMixerKernel, &found) != cudaSuccess) found = 0;
      most = found > 0 ? found : -1;
    }
    if (clusters <= most) return shape.shared_bytes;
  }
  return static_cast<int>(sizeof(Shared));
}

}  // namespace

cudaError_t LaunchDeltaMixer(const DeltaTask& task, int64_t count, const CudaContext& context) {
  if (count == 0) return cudaSuccess;
  if (const cudaError_t error = cudaSetDevice(context.device); error != cudaSuccess) return error;
  const cudaError_t error = cudaFuncSetAttribute(
      DeltaMixerKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMultiprocessorBytes / 2);
  if (error != cudaSuccess) return error;
  const int64_t blocks = kSlices * HeadsOfCluster(task.value_heads / task.key_heads);
  LaunchShape shape = {.grid = Grid(int64_t{kSlices} * task.value_heads, 1, count),
                       .block = dim3(kThreads),
                       .cluster = static_cast<unsigned>(blocks)};
  shape.shared_bytes = SharedBytes(shape, kSlices * task.value_heads / blocks * count);
  return Launch(context, shape, DeltaMixerKernel, task, blocks);
}

}  // namespace dflash
