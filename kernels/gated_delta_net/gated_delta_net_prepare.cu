// VERIFY rows, before the recurrence: convolution (where there is one), normalized q and k, gates, and what
// of the records does not depend on S.
//
//   grid    (parts, rows). Parts: 16 key heads each (q and k of a head together), then, when there is a
//           convolution, 2048 value channels each, then one for the gates
//   block   16 teams of 16 threads; a thread has 8 neighbouring channels
//
// Its blocks let the recurrence start only after their wait: that may then read states and old records at
// once.
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/segment_of_row.cuh"
#include "kernels/device/cuda/shared_tile.cuh"
#include "kernels/gated_delta_net/gated_delta_net_gates.cuh"
#include "kernels/gated_delta_net/gated_delta_net_records.cuh"

namespace dflash {
namespace {

constexpr int kThreads = 256;
constexpr int kTeam = 16, kTeams = kThreads / kTeam;
constexpr int kTeamChannels = kTeam * kChunk;
constexpr int kTaps = 4;
static_assert(kTeamChannels >= kMaxKeyDim);

// The dot product of two vectors that lie over a team, in every thread: ascending over four channels, then
// over these fours at distances 1, 2, 4, 8 and 16.
__device__ __forceinline__ float TeamDot(const float (&a)[kChunk], const float (&b)[kChunk]) {
  float halves[2] = {};
#pragma unroll
  for (int i = 0; i < kChunk; ++i) halves[i / 4] = fmaf(a[i], b[i], halves[i / 4]);
  float sum = halves[0] + halves[1];
#pragma unroll
  for (int distance = 1; distance < kTeam; distance *= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  return sum;
}

// Up to 8 channels of one row: convolved, or as they are.
template <bool kConvolve, bool kVectorized>
struct Channels {
  static constexpr int kInputs = kConvolve ? kTaps : 1;
  int64_t channel;
  int count;
  uint4 weights[kTaps];  // two channels each; vectorized only
  uint4 inputs[kInputs];

  // Weights are constants: read before the wait.
  __device__ __forceinline__ void LoadWeights(const DeltaTask& task) {
    if constexpr (kConvolve && kVectorized) {
      const auto* from = reinterpret_cast<const uint4*>(
          static_cast<const __nv_bfloat16*>(task.conv_weight.data) + (count > 0 ? channel : 0) * kTaps);
#pragma unroll
      for (int pair = 0; pair < kTaps; ++pair) weights[pair] = from[pair];
    }
  }

  __device__ __forceinline__ uint4 Piece(const __nv_bfloat16* row) const {
    if constexpr (kVectorized) {
      return *reinterpret_cast<const uint4*>(row + (count > 0 ? channel : 0));
    } else {
      return GatherPiece(row + channel, count);
    }
  }

  // The row's inputs as if all were rows of the step; so nobody has to know the segment yet.
  __device__ __forceinline__ void LoadInputs(const DeltaTask& task, int64_t row) {
#pragma unroll
    for (int j = 0; j < kInputs; ++j) {
      inputs[j] = Piece(task.qkv.Row(max(row - (kInputs - 1) + j, int64_t{0})));
    }
  }

  // Replaces inputs before the segment by those of the slot's state.
  __device__ __forceinline__ void LoadHistory(const DeltaTask& task, const Segment& segment, int64_t row) {
#pragma unroll
    for (int j = 0; j < kInputs - 1; ++j) {
      const int64_t inside = row - (kTaps - 1) + j - segment.first_row;
      if (inside < 0) {
        inputs[j] = Piece(task.conv_state.Row(int64_t{segment.slot} * (kTaps - 1) + inside + (kTaps - 1)));
      }
    }
  }

  __device__ __forceinline__ float Weight(const DeltaTask& task, int i, int j) const {
    if constexpr (kVectorized) {
      const uint32_t words[4] = {weights[i / 2].x, weights[i / 2].y, weights[i / 2].z, weights[i / 2].w};
      const uint32_t word = words[i % 2 * 2 + j / 2];
      return __uint_as_float(j % 2 == 0 ? word << 16 : word & 0xffff0000u);
    } else {
      return i < count ? task.conv_weight.At(channel + i, j) : 0.0f;
    }
  }

  // As CausalConv computes and rounds it; zeros beyond `count`.
  __device__ __forceinline__ void Compute(const DeltaTask& task, float (&values)[kChunk]) const {
    if constexpr (kConvolve) {
      float sums[kChunk] = {};
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        float input[kChunk];
        Unpack(inputs[j], input);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) sums[i] = fmaf(Weight(task, i, j), input[i], sums[i]);
      }
#pragma unroll
      for (int i = 0; i < kChunk; ++i) values[i] = i < count ? Rounded(SiluF32(sums[i])) : 0.0f;
    } else {
      Unpack(inputs[0], values);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) values[i] = i < count ? values[i] : 0.0f;
    }
  }
};

__device__ __forceinline__ void StoreFloats(float* to, int count, const float (&values)[kChunk],
                                            bool aligned) {
  if (aligned && count == kChunk) {
    reinterpret_cast<float4*>(to)[0] = make_float4(values[0], values[1], values[2], values[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(values[4], values[5], values[6], values[7]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (i < count) to[i] = values[i];
  }
}

template <bool kConvolve, bool kVectorized>
__global__ void __launch_bounds__(kThreads, 2) PrepareKernel(const DeltaTask task, int32_t key_parts) {
  const auto part = static_cast<int32_t>(blockIdx.x);
  const int64_t row = blockIdx.y;
  const int team = static_cast<int>(threadIdx.x) / kTeam, member = static_cast<int>(threadIdx.x) % kTeam;
  if (part == static_cast<int32_t>(gridDim.x) - 1) {  // gates
    WaitForPreviousKernel();
    LetNextKernelStart();
    const int32_t index = SegmentOfRow(task.segments, task.segment_count, row);
    if (index < 0) return;
    const Segment segment = task.segments[index];
    const int64_t inside = row - segment.first_row;
    if (inside >= task.max_rows) return;
    const int64_t fresh = 1 - task.pending_buffer[segment.slot];
    const Record record = RecordAt(task, segment.slot, fresh, inside);
    float* beta = task.gates + row * 2 * task.value_heads;
    for (auto head = static_cast<int32_t>(threadIdx.x); head < task.value_heads; head += kThreads) {
      const Gates gates = GatesOf(task, row, head);
      record.g[head] = gates.g;
      beta[head] = gates.beta;
      beta[task.value_heads + head] = ExpF32(gates.g);
    }
    return;
  }
  if (kConvolve && part >= key_parts) {  // values
    const int64_t first = (int64_t{part - key_parts} * kTeams + team) * kTeamChannels + member * kChunk;
    const int64_t value_cols = int64_t{task.value_heads} * task.value_dim;
    Channels<kConvolve, kVectorized> v;
    v.channel = 2 * task.KeyCols() + first;
    v.count = static_cast<int>(max(min(value_cols - first, int64_t{kChunk}), int64_t{0}));
    v.LoadWeights(task);
    WaitForPreviousKernel();
    LetNextKernelStart();
    v.LoadInputs(task, row);
    const int32_t index = SegmentOfRow(task.segments, task.segment_count, row);
    if (index < 0 || v.count == 0) return;
    v.LoadHistory(task, task.segments[index], row);
    float values[kChunk];
    v.Compute(task, values);
    Store<kVectorized>(task.v.Row(row) + first, v.count, values);
    return;
  }
  const int32_t head = part * kTeams + team;
  const bool exists = head < task.key_heads;
  const int count = exists ? max(min(task.key_dim - member * kChunk, kChunk), 0) : 0;
  const int64_t at = int64_t{head} * task.key_dim + member * kChunk;
  Channels<kConvolve, kVectorized> q, k;
  q.channel = at;
  k.channel = task.KeyCols() + at;
  q.count = k.count = count;
  q.LoadWeights(task);
  k.LoadWeights(task);
  WaitForPreviousKernel();
  LetNextKernelStart();
  q.LoadInputs(task, row);
  k.LoadInputs(task, row);
  const int32_t index = SegmentOfRow(task.segments, task.segment_count, row);
  if (index < 0) return;
  const Segment segment = task.segments[index];
  const int64_t inside = row - segment.first_row;
  if (inside >= task.max_rows) return;
  const int64_t fresh = 1 - task.pending_buffer[segment.slot];
  q.LoadHistory(task, segment, row);
  k.LoadHistory(task, segment, row);
  float q_values[kChunk], k_values[kChunk];
  q.Compute(task, q_values);
  k.Compute(task, k_values);
  const float q_factor = task.query_scale / sqrtf(TeamDot(q_values, q_values) + 1e-6f);
  const float k_factor = 1.0f / sqrtf(TeamDot(k_values, k_values) + 1e-6f);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    q_values[i] *= q_factor;
    k_values[i] *= k_factor;
  }
  const float dot = TeamDot(k_values, q_values);
  if (!exists) return;
  StoreFloats(task.q + row * task.KeyCols() + at, count, q_values, task.floats_aligned);
  StoreFloats(RecordAt(task, segment.slot, fresh, inside).k + at, count, k_values, task.floats_aligned);
  if (member == 0) task.key_query[row * task.key_heads + head] = dot;
}

}  // namespace

cudaError_t LaunchDeltaPrepare(const DeltaTask& task, int64_t rows, const CudaContext& context) {
  const bool convolve = task.conv_taps == kTaps;
  const int64_t key_parts = CeilDiv(task.key_heads, kTeams);
  const int64_t value_parts =
      convolve ? CeilDiv(int64_t{task.value_heads} * task.value_dim, kTeams * kTeamChannels) : 0;
  const LaunchShape shape = {.grid = Grid(key_parts + value_parts + 1, rows), .block = dim3(kThreads)};
  const auto kernel =
      convolve ? (task.inputs_vectorized ? PrepareKernel<true, true> : PrepareKernel<true, false>)
               : (task.inputs_vectorized ? PrepareKernel<false, true> : PrepareKernel<false, false>);
  return Launch(context, shape, kernel, task, key_parts);
}

}  // namespace dflash
