#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/segment_of_row.cuh"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/device/cuda/vector.cuh"
#include "kernels/rope/rope_backend.h"

namespace dflash::backend {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxPairs = 256;

struct Frequencies {
  float of_pair[kMaxPairs];
};

// The float32 product's cosine and sine, in double, rounded once: as on the CPU.
__device__ __forceinline__ void RotationOf(int32_t position, float frequency, float& cosine, float& sine) {
  double sine_of_angle, cosine_of_angle;
  sincos(static_cast<double>(static_cast<float>(position) * frequency), &sine_of_angle, &cosine_of_angle);
  cosine = static_cast<float>(cosine_of_angle);
  sine = static_cast<float>(sine_of_angle);
}

// Block = row: the row's cosines and sines once, then all its heads.
__global__ void RopeKernel(Bf16Rows x, int64_t heads, int64_t head_dim, int pairs, Frequencies frequencies,
                           const Segment* segments, int64_t segment_count) {
  WaitForPreviousKernel();
  LetNextKernelStart();  // what was before this kernel is complete: attention relies on it
  const int32_t index = SegmentOfRow(segments, segment_count, blockIdx.x);
  if (index < 0) return;
  const int32_t position =
      segments[index].start_position + (static_cast<int32_t>(blockIdx.x) - segments[index].first_row);
  __shared__ float cosines[kMaxPairs], sines[kMaxPairs];
  for (int j = static_cast<int>(threadIdx.x); j < pairs; j += kThreads) {
    RotationOf(position, frequencies.of_pair[j], cosines[j], sines[j]);
  }
  __syncthreads();
  __nv_bfloat16* row = x.Row(blockIdx.x);
  for (int64_t i = threadIdx.x; i < heads * pairs; i += kThreads) {
    const auto j = static_cast<int>(i % pairs);
    __nv_bfloat16* head = row + i / pairs * head_dim;
    const float first = __bfloat162float(head[j]), second = __bfloat162float(head[j + pairs]);
    head[j] = __float2bfloat16_rn(fmaf(first, cosines[j], -second * sines[j]));
    head[j + pairs] = __float2bfloat16_rn(fmaf(second, cosines[j], first * sines[j]));
  }
}

// Norm and rotation of heads of 8 * kTeam columns; the norm's order is that of RmsNorm.
struct NormRopeTask {
  Bf16Rows q, k;
  Parameters q_weight, k_weight;
  int32_t q_heads, k_heads;
  int pairs;  // a multiple of 8
  float offset, eps;
  Frequencies frequencies;
  const Segment* segments;
  int64_t segment_count;
};

// Block (heads, row): a team of threads per head, 8 neighbouring columns each. Partners of a rotation are
// pairs / 8 threads apart.
constexpr int kHeadThreads = 128;
template <int kTeam>
__global__ void __launch_bounds__(kHeadThreads) NormRopeKernel(const NormRopeTask task) {
  constexpr int kTeams = kHeadThreads / kTeam;
  __shared__ float cosines[kMaxPairs], sines[kMaxPairs];
  const int member = static_cast<int>(threadIdx.x) % kTeam;
  const int32_t heads = task.q_heads + task.k_heads;
  int32_t head = static_cast<int32_t>(blockIdx.x) * kTeams + static_cast<int32_t>(threadIdx.x) / kTeam;
  const bool exists = head < heads;
  if (!exists) head = heads - 1;  // computes along, for the shuffles' sake
  const bool is_q = head < task.q_heads;
  const Parameters& w = is_q ? task.q_weight : task.k_weight;
  float weights[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) weights[i] = w.At(0, member * kChunk + i);
  WaitForPreviousKernel();
  LetNextKernelStart();  // as above
  __nv_bfloat16* x = (is_q ? task.q.Row(blockIdx.y) + int64_t{head} * (kTeam * kChunk)
                           : task.k.Row(blockIdx.y) + int64_t{head - task.q_heads} * (kTeam * kChunk)) +
                     member * kChunk;
  float values[kChunk], sum = 0;
  Load<true>(x, kChunk, values);
  const int32_t index = SegmentOfRow(task.segments, task.segment_count, blockIdx.y);
  if (index >= 0) {
    const int32_t position = task.segments[index].start_position +
                             (static_cast<int32_t>(blockIdx.y) - task.segments[index].first_row);
    for (int j = static_cast<int>(threadIdx.x); j < task.pairs; j += kHeadThreads) {
      RotationOf(position, task.frequencies.of_pair[j], cosines[j], sines[j]);
    }
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) sum = fmaf(values[i], values[i], sum);
#pragma unroll
  for (int distance = kTeam / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(kTeam * kChunk) + task.eps);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) values[i] = Rounded(values[i] * scale * (task.offset + weights[i]));
  __syncthreads();
  const int apart = task.pairs / kChunk;
  const bool is_first = member < apart, rotates = index >= 0 && member < 2 * apart;
  const int partner = is_first ? member + apart : rotates ? member - apart : member;
  float rotated[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const float other = __shfl_sync(0xffffffffu, values[i], partner, kTeam);
    rotated[i] = values[i];
    if (rotates) {
      const int j = (is_first ? member : partner) * kChunk + i;
      rotated[i] = is_first ? fmaf(values[i], cosines[j], -other * sines[j])
                            : fmaf(values[i], cosines[j], other * sines[j]);
    }
  }
  if (exists) Store<true>(x, kChunk, rotated);
}

absl::StatusOr<Frequencies> FrequenciesOf(const RopeShape& shape) {
  const int64_t pairs = shape.rotary_dim / 2;
  if (pairs > kMaxPairs) {
    return absl::UnimplementedError(
        absl::StrCat("ApplyRope: rotary_dim ", shape.rotary_dim, " is above ", 2 * kMaxPairs));
  }
  Frequencies frequencies = {};
  for (int64_t j = 0; j < pairs; ++j) {
    frequencies.of_pair[j] = static_cast<float>(
        std::pow(shape.theta, -2.0 * static_cast<double>(j) / static_cast<double>(shape.rotary_dim)));
  }
  return frequencies;
}

}  // namespace

absl::Status ApplyRope(MatrixView x, const RopeShape& shape, SegmentList segments, const Stream& stream) {
  DFLASH_ASSIGN_OR_RETURN(const Frequencies frequencies, FrequenciesOf(shape));
  const LaunchShape launch = {.grid = Grid(x.rows), .block = dim3(kThreads)};
  return CudaStatus(
      Launch(CudaOf(stream), launch, RopeKernel, Bf16RowsOf(x), x.cols / shape.head_dim, shape.head_dim,
             static_cast<int>(shape.rotary_dim / 2), frequencies, segments.data, segments.count),
      "ApplyRope");
}

absl::StatusOr<bool> NormAndRope(MatrixView q, ConstMatrixView q_weight, MatrixView k,
                                 ConstMatrixView k_weight, NormWeight weight, float eps,
                                 const RopeShape& shape, SegmentList segments, const Stream& stream) {
  const int64_t pairs = shape.rotary_dim / 2, dim = shape.head_dim;
  // RmsNorm has teams of these sizes for these widths.
  const bool fits = (dim == 16 * kChunk || dim == 32 * kChunk) && pairs % kChunk == 0 && q.rows <= 65535;
  if (!fits || !IsVectorized(k) || (q.cols > 0 && !IsVectorized(q))) return false;
  NormRopeTask task = {};
  task.q = Bf16RowsOf(q);
  task.k = Bf16RowsOf(k);
  task.q_weight = ParametersOf(q_weight);
  task.k_weight = ParametersOf(k_weight);
  task.q_heads = static_cast<int32_t>(q.cols / dim);
  task.k_heads = static_cast<int32_t>(k.cols / dim);
  task.pairs = static_cast<int>(pairs);
  task.offset = weight == NormWeight::kOnePlus ? 1.0f : 0.0f;
  task.eps = eps;
  DFLASH_ASSIGN_OR_RETURN(task.frequencies, FrequenciesOf(shape));
  task.segments = segments.data;
  task.segment_count = segments.count;
  const int64_t teams = kHeadThreads * kChunk / dim;
  const LaunchShape launch = {.grid = Grid(CeilDiv(task.q_heads + task.k_heads, teams), k.rows),
                              .block = dim3(kHeadThreads)};
  DFLASH_RETURN_IF_ERROR(CudaStatus(
      Launch(CudaOf(stream), launch, dim == 16 * kChunk ? NormRopeKernel<16> : NormRopeKernel<32>, task),
      "NormAndRope"));
  return true;
}

}  // namespace dflash::backend
