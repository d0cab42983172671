// VERIFY rows of any shape, and the fold: folds pending records into the state, then runs the recurrence
// token after token with the state in registers. q, k and the gates come from gated_delta_net_prepare.cu.
// Heads of 128 x 128 in a layer have a kernel of their own, gated_delta_net_mixer.cu, with the same order of
// sums.
//
//   grid    (slices of 32 value columns, value heads, segments)
//   block   4 warps of 8 columns each. A thread holds 2 columns of S at 4 * kParts keys: keys 32 j + 4 p .. +
//   3
//           of part p = lane mod 8. Sums over keys: ascending in the thread, then over the 8 threads of a
//           column pair at distances 1, 2, 4
//   shared  up to 16 rows at a time: q, k, v, gates; k, c and decay of up to 16 records
//
// Bytes: S once in and, with records pending, once out: 2 x 64 KiB per head of 128 x 128. S and the records
// were there before the preparing kernel, so they are read, and folded, while that still runs.
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/ptx.cuh"
#include "kernels/device/cuda/shared_tile.cuh"
#include "kernels/gated_delta_net/gated_delta_net_gates.cuh"
#include "kernels/gated_delta_net/gated_delta_net_records.cuh"

namespace dflash {
namespace {

constexpr int kThreads = 128;
constexpr int kSlice = 32;       // columns of a block
constexpr int kRowsAtOnce = 16;  // in shared memory

template <int kParts>
struct SharedRows {
  float k[kRowsAtOnce][32 * kParts];
  float q[kRowsAtOnce][32 * kParts];
  __nv_bfloat16 v[kRowsAtOnce][kSlice];
  float beta[kRowsAtOnce], decay[kRowsAtOnce], key_query[kRowsAtOnce];
};
template <int kParts>
struct SharedRecords {
  float k[kRowsAtOnce][32 * kParts];
  float c[kRowsAtOnce][kSlice];
  float decay[kRowsAtOnce];
};

// Where a block works.
struct Place {
  int64_t slot, buffer;
  int32_t head, key_head, first_column;
};

// Starts copying `cols` floats of each of `count` rows into rows of kCols floats, zeros behind them.
template <bool kAligned, int kCols, typename RowAt>
__device__ __forceinline__ void StageFloats(int count, int cols, const RowAt& row_at, float* to) {
  if constexpr (kAligned) {
    constexpr int kPieces = kCols / 4;
#pragma unroll
    for (int i = 0; i < (kRowsAtOnce * kPieces + kThreads - 1) / kThreads; ++i) {
      const int index = static_cast<int>(threadIdx.x) + i * kThreads, r = index / kPieces;
      const int column = index % kPieces * 4;
      if (r >= count) break;
      const bool exists = column < cols;
      ptx::CopyAsync16(ptx::SharedAddress(to + r * kCols + column), row_at(r) + (exists ? column : 0),
                       exists);
    }
  } else {
    for (int index = static_cast<int>(threadIdx.x); index < count * kCols; index += kThreads) {
      const int r = index / kCols, column = index % kCols;
      to[index] = column < cols ? row_at(r)[column] : 0.0f;
    }
  }
}

// Starts copying records [first, first + count) of the place's pending buffer.
template <int kParts, bool kAligned>
__device__ __forceinline__ void StageRecords(const DeltaTask& task, const Place& place, int first, int count,
                                             SharedRecords<kParts>& shared) {
  const auto record = [&](int r) { return RecordAt(task, place.slot, place.buffer, first + r); };
  StageFloats<kAligned, 32 * kParts>(
      count, task.key_dim, [&](int r) { return record(r).k + int64_t{place.key_head} * task.key_dim; },
      &shared.k[0][0]);
  StageFloats<kAligned, kSlice>(
      count, min(kSlice, task.value_dim - place.first_column),
      [&](int r) { return record(r).c + int64_t{place.head} * task.value_dim + place.first_column; },
      &shared.c[0][0]);
  const auto r = static_cast<int>(threadIdx.x);
  if (r < count) shared.decay[r] = ExpF32(record(r).g[place.head]);
}

// Starts copying rows [first, first + count) of the segment. `place.buffer` is the one that is not pending.
template <int kParts, bool kAligned>
__device__ __forceinline__ void StageRows(const DeltaTask& task, const Segment& segment, const Place& place,
                                          int first, int count, SharedRows<kParts>& shared) {
  const int64_t row = segment.first_row + first;
  StageFloats<kAligned, 32 * kParts>(
      count, task.key_dim,
      [&](int r) {
        return RecordAt(task, place.slot, place.buffer, first + r).k + int64_t{place.key_head} * task.key_dim;
      },
      &shared.k[0][0]);
  StageFloats<kAligned, 32 * kParts>(
      count, task.key_dim,
      [&](int r) { return task.q + (row + r) * task.KeyCols() + int64_t{place.key_head} * task.key_dim; },
      &shared.q[0][0]);
  const int64_t first_value = int64_t{place.head} * task.value_dim + place.first_column;
  const auto t = static_cast<int>(threadIdx.x);
  if constexpr (kAligned) {
    constexpr int kPieces = kSlice / kChunk;
    const int r = t / kPieces, column = t % kPieces * kChunk;
    if (r < min(count, kRowsAtOnce)) {
      const bool exists = place.first_column + column < task.value_dim;
      ptx::CopyAsync16(ptx::SharedAddress(&shared.v[r][column]),
                       task.v.Row(row + r) + first_value + (exists ? column : 0), exists);
    }
  } else {
    for (int i = t; i < count * kSlice; i += kThreads) {
      const int r = i / kSlice, column = i % kSlice;
      shared.v[r][column] = place.first_column + column < task.value_dim
                                ? task.v.Row(row + r)[first_value + column]
                                : __float2bfloat16_rn(0.0f);
    }
  }
  if (t < count) {
    const float* gates = task.gates + (row + t) * 2 * task.value_heads + place.head;
    ptx::CopyAsync4(ptx::SharedAddress(&shared.beta[t]), gates);
    ptx::CopyAsync4(ptx::SharedAddress(&shared.decay[t]), gates + task.value_heads);
    ptx::CopyAsync4(ptx::SharedAddress(&shared.key_query[t]),
                    task.key_query + (row + t) * task.key_heads + place.key_head);
  }
}

// Of two columns' parts in each of 8 threads the sums: threads of even rank get the first column's, odd ones
// the second's. The same order for both.
__device__ __forceinline__ float SumOfOwnColumn(const float (&parts)[2], bool odd) {
  float value = odd ? parts[1] : parts[0];
  value += __shfl_xor_sync(0xffffffffu, odd ? parts[0] : parts[1], 1);
  value += __shfl_xor_sync(0xffffffffu, value, 2);
  return value + __shfl_xor_sync(0xffffffffu, value, 4);
}

// A thread's part of a vector over keys.
template <int kParts>
__device__ __forceinline__ void ReadPart(const float* vector, int part, float (&values)[4 * kParts]) {
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    const float4 four = *reinterpret_cast<const float4*>(vector + 32 * j + 4 * part);
    values[4 * j] = four.x, values[4 * j + 1] = four.y, values[4 * j + 2] = four.z,
               values[4 * j + 3] = four.w;
  }
}

// S <- decay S
template <int kKeys>
__device__ __forceinline__ void Decay(float decay, float (&S)[2][kKeys]) {
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) S[e][i] *= decay;
  }
}

// S <- S + k c'
template <int kKeys>
__device__ __forceinline__ void Add(const float (&k)[kKeys], const float (&c)[2], float (&S)[2][kKeys]) {
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) S[e][i] = fmaf(k[i], c[e], S[e][i]);
  }
}

// A thread's columns of S in memory.
template <int kParts, bool kAligned>
struct StateSlice {
  float* first;  // of column `column`
  int part;
  int32_t key_dim, value_dim;
  bool has[2];

  template <typename F>
  __device__ __forceinline__ void ForKeys(const F& f) const {
#pragma unroll
    for (int i = 0; i < 4 * kParts; ++i) {
      const int d = i / 4 * 32 + 4 * part + i % 4;
      if (d < key_dim) f(i, first + int64_t{d} * value_dim);
    }
  }
  __device__ __forceinline__ void Read(float (&S)[2][4 * kParts]) const {
#pragma unroll
    for (int i = 0; i < 4 * kParts; ++i) S[0][i] = S[1][i] = 0;
    ForKeys([&](int i, const float* from) {
      if constexpr (kAligned) {
        if (!has[0]) return;
        const float2 two = *reinterpret_cast<const float2*>(from);
        S[0][i] = two.x;
        S[1][i] = two.y;
      } else {
        if (has[0]) S[0][i] = from[0];
        if (has[1]) S[1][i] = from[1];
      }
    });
  }
  __device__ __forceinline__ void Write(const float (&S)[2][4 * kParts]) const {
    ForKeys([&](int i, float* to) {
      if constexpr (kAligned) {
        if (has[0]) *reinterpret_cast<float2*>(to) = make_float2(S[0][i], S[1][i]);
      } else {
        if (has[0]) to[0] = S[0][i];
        if (has[1]) to[1] = S[1][i];
      }
    });
  }
};

template <int kParts, bool kAligned>
__global__ void __launch_bounds__(kThreads, 4) DeltaVerifyKernel(const DeltaTask task) {
  __shared__ __align__(16) SharedRows<kParts> rows;
  __shared__ __align__(16) SharedRecords<kParts> records;
  LetNextKernelStart();
  if (!task.is_prepared) WaitForPreviousKernel();
  Segment segment = {};
  if (task.fold_slots != nullptr) {
    segment.slot = task.fold_slots[blockIdx.z];
  } else {
    segment = task.segments[blockIdx.z];
  }
  const int row_count = min(segment.row_count, task.max_rows);
  const int record_count = min(task.pending_count[segment.slot], task.max_rows);
  const int64_t pending = task.pending_buffer[segment.slot];
  if (row_count <= 0 && record_count <= 0) {
    if (task.is_prepared) WaitForPreviousKernel();  // who waits for this kernel waits for that one too
    return;
  }

  Place place;
  place.slot = segment.slot;
  place.buffer = pending;
  place.head = static_cast<int32_t>(blockIdx.y);
  place.key_head = place.head / (task.value_heads / task.key_heads);
  place.first_column = static_cast<int32_t>(blockIdx.x) * kSlice;
  const int lane = static_cast<int>(threadIdx.x) % 32, part = lane % 8;
  const int own = static_cast<int>(threadIdx.x) / 32 * 8 + lane / 8 * 2;  // first of the thread's two columns
  const int32_t column = place.first_column + own;
  const StateSlice<kParts, kAligned> slice = {
      task.states + (int64_t{segment.slot} * task.value_heads + place.head) * task.key_dim * task.value_dim +
          column,
      part,
      task.key_dim,
      task.value_dim,
      {column < task.value_dim, column + 1 < task.value_dim}};
  float S[2][4 * kParts];
  slice.Read(S);

  for (int first = 0; first < record_count; first += kRowsAtOnce) {
    const int count = min(record_count - first, kRowsAtOnce);
    if (first > 0) __syncthreads();
    StageRecords<kParts, kAligned>(task, place, first, count, records);
    ptx::CopyAsyncCommit();
    ptx::CopyAsyncWait<0>();
    __syncthreads();
    for (int r = 0; r < count; ++r) {
      float k[4 * kParts];
      ReadPart<kParts>(records.k[r], part, k);
      const float2 c_pair = *reinterpret_cast<const float2*>(&records.c[r][own]);
      const float c[2] = {c_pair.x, c_pair.y};
      Decay(records.decay[r], S);
      Add(k, c, S);
    }
  }
  if (record_count > 0) slice.Write(S);
  if (task.is_prepared) WaitForPreviousKernel();
  if (row_count <= 0) return;
  place.buffer = 1 - pending;
  for (int first = 0; first < row_count; first += kRowsAtOnce) {
    const int count = min(row_count - first, kRowsAtOnce);
    if (first > 0) __syncthreads();
    StageRows<kParts, kAligned>(task, segment, place, first, count, rows);
    ptx::CopyAsyncCommit();
    ptx::CopyAsyncWait<0>();
    __syncthreads();
    // Two of the eight threads of a column pair write, one column each.
    const bool odd = part % 2 != 0, writes = part < 2 && (odd ? slice.has[1] : slice.has[0]);
    const int64_t to = int64_t{place.head} * task.value_dim + column + part;
    float* c_to = RecordAt(task, place.slot, place.buffer, first).c + to;
    __nv_bfloat16* o_to = task.o.Row(segment.first_row + first) + to;
#pragma unroll 1
    for (int r = 0; r < count; ++r) {
      float k[4 * kParts], q[4 * kParts];
      ReadPart<kParts>(rows.k[r], part, k);
      ReadPart<kParts>(rows.q[r], part, q);
      Decay(rows.decay[r], S);
      float seen[2] = {}, out[2] = {};  // S'k, S'q, S after the decay
#pragma unroll
      for (int i = 0; i < 4 * kParts; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          seen[e] = fmaf(k[i], S[e][i], seen[e]);
          out[e] = fmaf(q[i], S[e][i], out[e]);
        }
      }
      const float own_c =
          rows.beta[r] * (__bfloat162float(rows.v[r][own + (odd ? 1 : 0)]) - SumOfOwnColumn(seen, odd));
      const float other_c = __shfl_xor_sync(0xffffffffu, own_c, 1);
      const float c[2] = {odd ? other_c : own_c, odd ? own_c : other_c};
      if (first + r + 1 < row_count) Add(k, c, S);
      const float own_out = fmaf(rows.key_query[r], own_c, SumOfOwnColumn(out, odd));
      if (writes) {
        *c_to = own_c;
        *o_to = __float2bfloat16_rn(own_out);
      }
      c_to += task.record_floats;
      o_to += task.o.stride;
    }
  }
}

}  // namespace

cudaError_t LaunchDeltaVerify(const DeltaTask& task, int64_t count, const CudaContext& context) {
  if (count == 0) return cudaSuccess;
  const LaunchShape shape = {.grid = Grid(CeilDiv(task.value_dim, kSlice), task.value_heads, count),
                             .block = dim3(kThreads)};
  const bool aligned = task.is_prepared && task.floats_aligned;
  const int parts = task.key_dim <= 32 ? 1 : task.key_dim <= 64 ? 2 : 4;
  const auto kernel = parts == 1   ? (aligned ? DeltaVerifyKernel<1, true> : DeltaVerifyKernel<1, false>)
                      : parts == 2 ? (aligned ? DeltaVerifyKernel<2, true> : DeltaVerifyKernel<2, false>)
                                   : (aligned ? DeltaVerifyKernel<4, true> : DeltaVerifyKernel<4, false>);
  return Launch(context, shape, kernel, task);
}

}  // namespace dflash
