// VERIFY rows: folds pending records into the state, then runs the recurrence token after token with the
// state in registers.
//
//   grid    (slices of 64 value columns, value heads, segments)
//   block   8 warps of 8 columns each. A thread holds 2 columns of S at 4 * kParts keys: keys 32 j + 4 p .. +
//   3,
//           p = lane mod 8. Sums over keys: ascending in the thread, then over the 8 threads of a column pair
//   shared  up to 16 rows at a time: normalized q and k, v, gates; the same of the records
//
// Bytes: S once in and, with records pending, once out: 2 x 64 KiB per head of 128 x 128.
#include "kernels/device/cuda/launch.cuh"
#include "kernels/gated_delta_net/gated_delta_net_gates.cuh"

namespace dflash {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kSlice = 64;       // columns of a block
constexpr int kRowsAtOnce = 16;  // in shared memory

// A record, field by field.
struct Record {
  float* k;  // [key_heads, key_dim]
  float* c;  // [value_heads, value_dim]
  float* g;  // [value_heads]
};

__device__ __forceinline__ Record RecordAt(const DeltaTask& task, int64_t slot, int64_t buffer, int64_t row) {
  float* base = task.records + ((slot * 2 + buffer) * task.max_rows + row) * task.record_floats;
  float* c = base + task.KeyCols();
  return {base, c, c + int64_t{task.value_heads} * task.value_dim};
}

template <int kParts>
struct SharedRows {
  float k[kRowsAtOnce][32 * kParts];
  float q[kRowsAtOnce][32 * kParts];
  float v[kRowsAtOnce][kSlice];
  float beta[kRowsAtOnce], decay[kRowsAtOnce], key_query[kRowsAtOnce];
};
template <int kParts>
struct SharedRecords {
  float k[kRowsAtOnce][32 * kParts];
  float c[kRowsAtOnce][kSlice];
  float decay[kRowsAtOnce];
};

template <int kParts>
__device__ __forceinline__ void StageRecords(const DeltaTask& task, int64_t slot, int64_t buffer, int first,
                                             int count, int32_t head, int32_t key_head, int32_t first_column,
                                             SharedRecords<kParts>& shared) {
  for (int i = static_cast<int>(threadIdx.x); i < count * 32 * kParts; i += kThreads) {
    const int r = i / (32 * kParts), d = i % (32 * kParts);
    const Record record = RecordAt(task, slot, buffer, first + r);
    shared.k[r][d] = d < task.key_dim ? record.k[int64_t{key_head} * task.key_dim + d] : 0.0f;
  }
  for (int i = static_cast<int>(threadIdx.x); i < count * kSlice; i += kThreads) {
    const int r = i / kSlice, column = first_column + i % kSlice;
    const Record record = RecordAt(task, slot, buffer, first + r);
    shared.c[r][i % kSlice] =
        column < task.value_dim ? record.c[int64_t{head} * task.value_dim + column] : 0.0f;
  }
  if (static_cast<int>(threadIdx.x) < count) {
    shared.decay[threadIdx.x] =
        ExpF32(RecordAt(task, slot, buffer, first + static_cast<int>(threadIdx.x)).g[head]);
  }
}

// Normalizes, computes the gates, and writes what of the records does not depend on S.
template <int kParts>
__device__ __forceinline__ void StageRows(const DeltaTask& task, const Segment& segment, int64_t buffer,
                                          int first, int count, int32_t head, int32_t key_head,
                                          int32_t first_column, SharedRows<kParts>& shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int32_t group = task.value_heads / task.key_heads;
  for (int r = warp; r < count; r += kWarps) {
    const int64_t row = segment.first_row + first + r;
    const __nv_bfloat16* q_row = task.qkv.Row(row) + int64_t{key_head} * task.key_dim;
    const __nv_bfloat16* k_row = q_row + task.KeyCols();
    float q[kParts], k[kParts], q_sum = 0, k_sum = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int d = lane + 32 * i;
      q[i] = d < task.key_dim ? __bfloat162float(q_row[d]) : 0.0f;
      k[i] = d < task.key_dim ? __bfloat162float(k_row[d]) : 0.0f;
      q_sum = fmaf(q[i], q[i], q_sum);
      k_sum = fmaf(k[i], k[i], k_sum);
    }
    const float q_factor = task.query_scale / sqrtf(WarpSum(q_sum) + 1e-6f);
    const float k_factor = 1.0f / sqrtf(WarpSum(k_sum) + 1e-6f);
    const Record record = RecordAt(task, segment.slot, buffer, first + r);
    const bool writes_key = head % group == 0 && first_column == 0;
    float dot = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int d = lane + 32 * i;
      q[i] *= q_factor;
      k[i] *= k_factor;
      dot = fmaf(k[i], q[i], dot);
      shared.q[r][d] = q[i];
      shared.k[r][d] = k[i];
      if (writes_key && d < task.key_dim) record.k[int64_t{key_head} * task.key_dim + d] = k[i];
    }
    dot = WarpSum(dot);
    const Gates gates = GatesOf(task, row, head);
    if (lane == 0) {
      shared.key_query[r] = dot;
      shared.beta[r] = gates.beta;
      shared.decay[r] = ExpF32(gates.g);
      if (first_column == 0) record.g[head] = gates.g;
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < count * kSlice; i += kThreads) {
    const int r = i / kSlice, column = first_column + i % kSlice;
    const __nv_bfloat16* v_row =
        task.qkv.Row(segment.first_row + first + r) + 2 * task.KeyCols() + int64_t{head} * task.value_dim;
    shared.v[r][i % kSlice] = column < task.value_dim ? __bfloat162float(v_row[column]) : 0.0f;
  }
}

// The sum over the 8 threads that share columns, the same order in all of them.
__device__ __forceinline__ float SumOfColumn(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
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

// S <- decay S + k c'
template <int kParts>
__device__ __forceinline__ void Update(const float (&k)[4 * kParts], const float (&c)[2], float decay,
                                       float (&S)[2][4 * kParts]) {
#pragma unroll
  for (int i = 0; i < 4 * kParts; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) S[e][i] = fmaf(k[i], c[e], decay * S[e][i]);
  }
}

template <int kParts>
__global__ void __launch_bounds__(kThreads, 2) DeltaVerifyKernel(const DeltaTask task) {
  __shared__ __align__(16) SharedRows<kParts> rows;
  __shared__ __align__(16) SharedRecords<kParts> records;
  LetNextKernelStart();
  WaitForPreviousKernel();
  Segment segment;
  if (task.fold_slots != nullptr) {
    segment = {.slot = task.fold_slots[blockIdx.z]};
  } else {
    segment = task.segments[blockIdx.z];
  }
  const int row_count = min(segment.row_count, task.max_rows);
  const int record_count = min(task.pending_count[segment.slot], task.max_rows);
  const int64_t pending = task.pending_buffer[segment.slot], fresh = 1 - pending;
  if (row_count <= 0 && record_count <= 0) return;

  const auto head = static_cast<int32_t>(blockIdx.y);
  const int32_t key_head = head / (task.value_heads / task.key_heads);
  const auto first_column = static_cast<int32_t>(blockIdx.x) * kSlice;
  const int lane = static_cast<int>(threadIdx.x) % 32, part = lane % 8;
  const int own = static_cast<int>(threadIdx.x) / 32 * 8 + lane / 8 * 2;  // first of the thread's two columns
  const int32_t column = first_column + own;
  const bool has[2] = {column < task.value_dim, column + 1 < task.value_dim};
  const bool pairs = task.value_dim % 2 == 0;  // both columns exist or none, aligned to 8 bytes in S

  float* state =
      task.states + (int64_t{segment.slot} * task.value_heads + head) * task.key_dim * task.value_dim;
  float S[2][4 * kParts];
#pragma unroll
  for (int i = 0; i < 4 * kParts; ++i) {
    const int d = i / 4 * 32 + 4 * part + i % 4;
    const float* from = state + int64_t{d} * task.value_dim + column;
    float2 two = make_float2(0, 0);
    if (d < task.key_dim) {
      if (pairs) {
        if (has[0]) two = *reinterpret_cast<const float2*>(from);
      } else {
        if (has[0]) two.x = from[0];
        if (has[1]) two.y = from[1];
      }
    }
    S[0][i] = two.x;
    S[1][i] = two.y;
  }

  for (int first = 0; first < record_count; first += kRowsAtOnce) {
    const int count = min(record_count - first, kRowsAtOnce);
    if (first > 0) __syncthreads();
    StageRecords<kParts>(task, segment.slot, pending, first, count, head, key_head, first_column, records);
    // The first rows too: one barrier fewer.
    if (first == 0) {
      StageRows<kParts>(task, segment, fresh, 0, min(row_count, kRowsAtOnce), head, key_head, first_column,
                        rows);
    }
    __syncthreads();
    for (int r = 0; r < count; ++r) {
      float k[4 * kParts];
      ReadPart<kParts>(records.k[r], part, k);
      const float c[2] = {records.c[r][own], records.c[r][own + 1]};
      Update<kParts>(k, c, records.decay[r], S);
    }
  }
  if (record_count > 0) {
#pragma unroll
    for (int i = 0; i < 4 * kParts; ++i) {
      const int d = i / 4 * 32 + 4 * part + i % 4;
      float* to = state + int64_t{d} * task.value_dim + column;
      if (d >= task.key_dim) continue;
      if (pairs) {
        if (has[0]) *reinterpret_cast<float2*>(to) = make_float2(S[0][i], S[1][i]);
      } else {
        if (has[0]) to[0] = S[0][i];
        if (has[1]) to[1] = S[1][i];
      }
    }
  }

  for (int first = 0; first < row_count; first += kRowsAtOnce) {
    const int count = min(row_count - first, kRowsAtOnce);
    if (first > 0 || record_count <= 0) {
      if (first > 0) __syncthreads();
      StageRows<kParts>(task, segment, fresh, first, count, head, key_head, first_column, rows);
      __syncthreads();
    }
    for (int r = 0; r < count; ++r) {
      float k[4 * kParts], q[4 * kParts];
      ReadPart<kParts>(rows.k[r], part, k);
      ReadPart<kParts>(rows.q[r], part, q);
      float seen[2] = {}, out[2] = {};  // S'k, S'q
#pragma unroll
      for (int i = 0; i < 4 * kParts; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          seen[e] = fmaf(k[i], S[e][i], seen[e]);
          out[e] = fmaf(q[i], S[e][i], out[e]);
        }
      }
      const float decay = rows.decay[r], beta = rows.beta[r], key_query = rows.key_query[r];
      float c[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        c[e] = beta * fmaf(-decay, SumOfColumn(seen[e]), rows.v[r][own + e]);
        out[e] = fmaf(key_query, c[e], decay * SumOfColumn(out[e]));
      }
      if (part < 2 && (part == 0 ? has[0] : has[1])) {  // one of the two columns each
        const int64_t at = int64_t{head} * task.value_dim + column + part;
        RecordAt(task, segment.slot, fresh, first + r).c[at] = part == 0 ? c[0] : c[1];
        task.o.Row(segment.first_row + first + r)[at] = __float2bfloat16_rn(part == 0 ? out[0] : out[1]);
      }
      if (first + r + 1 < row_count) Update<kParts>(k, c, decay, S);
    }
  }
}

}  // namespace

cudaError_t LaunchDeltaVerify(const DeltaTask& task, int64_t count, const CudaContext& context) {
  if (count == 0) return cudaSuccess;
  const LaunchShape shape = {.grid = Grid(CeilDiv(task.value_dim, kSlice), task.value_heads, count),
                             .block = dim3(kThreads)};
  if (task.key_dim <= 32) return Launch(context, shape, DeltaVerifyKernel<1>, task);
  if (task.key_dim <= 64) return Launch(context, shape, DeltaVerifyKernel<2>, task);
  return Launch(context, shape, DeltaVerifyKernel<4>, task);
}

}  // namespace dflash
