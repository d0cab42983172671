#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/device/cuda/vector.cuh"
#include "kernels/elementary/elementary.h"
#include "kernels/rms_norm/rms_norm_backend.h"

namespace dflash::backend {
namespace {

// A team of threads works on one group of D columns: a warp for heads, a block for hidden states. Thread i of
// the team holds chunks i, i + team, ... Both passes of a thread touch the same elements, so y may be x.
constexpr int kBlockThreads = 256;
constexpr int kMaxThreads = 1024;
constexpr int64_t kWarpColumns = 1024;  // the widest group of a warp

enum class Gate { kNone, kSilu, kSigmoid };

struct NormTask {
  Bf16Rows x, y;
  Bf16Rows other;  // delta to add (then x is written too), or the gate z
  Parameters weight;
  int64_t rows, groups, dim;
  float offset, eps;
};

// The sum over the team, the same order in every thread.
template <bool kWarpTeam>
__device__ __forceinline__ float TeamSum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  if constexpr (!kWarpTeam) {
    __shared__ float of_warp[kMaxThreads / 32];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) value += of_warp[warp];
  }
  return value;
}

template <bool kWarpTeam, bool kVectorized, bool kAdd, Gate kGate>
__global__ void NormKernel(const NormTask task) {
  LetNextKernelStart();
  const int64_t team_size = kWarpTeam ? 32 : blockDim.x;
  const int64_t member = kWarpTeam ? threadIdx.x % 32 : threadIdx.x;
  const int64_t team = kWarpTeam ? static_cast<int64_t>(blockIdx.x) * (kBlockThreads / 32) + threadIdx.x / 32
                                 : static_cast<int64_t>(blockIdx.x);
  if (team >= task.rows * task.groups) return;  // a whole warp or block
  WaitForPreviousKernel();
  const int64_t row = team / task.groups, start = team % task.groups * task.dim;
  __nv_bfloat16* x = task.x.Row(row) + start;
  __nv_bfloat16* y = task.y.Row(row) + start;
  const __nv_bfloat16* other = task.other.Row(row) + start;

  float sum = 0;
  for (int64_t col = member * kChunk; col < task.dim; col += team_size * kChunk) {
    const int count = static_cast<int>(min(task.dim - col, int64_t{kChunk}));
    float values[kChunk];
    Load<kVectorized>(x + col, count, values);
    if constexpr (kAdd) {
      float delta[kChunk];
      Load<kVectorized>(other + col, count, delta);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) values[i] = Rounded(values[i] + delta[i]);
      Store<kVectorized>(x + col, count, values);
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum = fmaf(values[i], values[i], sum);
  }
  const float scale = 1.0f / sqrtf(TeamSum<kWarpTeam>(sum) / static_cast<float>(task.dim) + task.eps);
  for (int64_t col = member * kChunk; col < task.dim; col += team_size * kChunk) {
    const int count = static_cast<int>(min(task.dim - col, int64_t{kChunk}));
    float values[kChunk], gates[kChunk];
    Load<kVectorized>(x + col, count, values);
    if constexpr (kGate != Gate::kNone) Load<kVectorized>(other + col, count, gates);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float weight = kVectorized || i < count ? task.weight.At(0, col + i) : 0.0f;
      values[i] = values[i] * scale * (task.offset + weight);
      if constexpr (kGate == Gate::kSilu) values[i] *= SiluF32(gates[i]);
      if constexpr (kGate == Gate::kSigmoid) values[i] *= SigmoidF32(gates[i]);
    }
    Store<kVectorized>(y + col, count, values);
  }
}

template <bool kAdd, Gate kGate>
cudaError_t LaunchNorm(ConstMatrixView x, ConstMatrixView other, ConstMatrixView w, float offset, float eps,
                       MatrixView y, const Stream& stream) {
  NormTask task;
  task.x = Bf16RowsOf(x);
  task.y = Bf16RowsOf(y);
  task.other = Bf16RowsOf(other);
  task.weight = ParametersOf(w);
  task.rows = x.rows;
  task.dim = w.cols;
  task.groups = x.cols / w.cols;
  task.offset = offset;
  task.eps = eps;
  const int64_t teams = task.rows * task.groups;
  const bool warp_team = task.dim <= kWarpColumns;
  const bool vectorized = IsVectorized(x) && IsVectorized(y) && IsVectorized(other) && task.dim % kChunk == 0;
  LaunchShape shape;
  if (warp_team) {
    shape.grid = Grid(CeilDiv(teams, kBlockThreads / 32));
    shape.block = dim3(kBlockThreads);
  } else {
    const int64_t chunks = CeilDiv(task.dim, kChunk);
    shape.grid = Grid(teams);
    shape.block = dim3(static_cast<unsigned>(std::min<int64_t>(CeilDiv(chunks, 32) * 32, kMaxThreads)));
  }
  const auto kernel =
      warp_team ? (vectorized ? NormKernel<true, true, kAdd, kGate> : NormKernel<true, false, kAdd, kGate>)
                : (vectorized ? NormKernel<false, true, kAdd, kGate> : NormKernel<false, false, kAdd, kGate>);
  return Launch(CudaOf(stream), shape, kernel, task);
}

float OffsetOf(NormWeight weight) { return weight == NormWeight::kOnePlus ? 1.0f : 0.0f; }

}  // namespace

absl::Status RmsNorm(ConstMatrixView x, ConstMatrixView w, NormWeight weight, float eps, MatrixView y,
                     const Stream& stream) {
  return CudaStatus(LaunchNorm<false, Gate::kNone>(x, x, w, OffsetOf(weight), eps, y, stream), "RmsNorm");
}

absl::Status AddRmsNorm(MatrixView residual, ConstMatrixView delta, ConstMatrixView w, NormWeight weight,
                        float eps, MatrixView y, const Stream& stream) {
  return CudaStatus(LaunchNorm<true, Gate::kNone>(residual, delta, w, OffsetOf(weight), eps, y, stream),
                    "AddRmsNorm");
}

absl::Status GatedRmsNorm(ConstMatrixView x, ConstMatrixView w, ConstMatrixView z, GateActivation gate,
                          float eps, MatrixView y, const Stream& stream) {
  return CudaStatus(gate == GateActivation::kSilu
                        ? LaunchNorm<false, Gate::kSilu>(x, z, w, 0, eps, y, stream)
                        : LaunchNorm<false, Gate::kSigmoid>(x, z, w, 0, eps, y, stream),
                    "GatedRmsNorm");
}

}  // namespace dflash::backend
