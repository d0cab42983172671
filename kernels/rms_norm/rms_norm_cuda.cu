#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/device/cuda/vector.cuh"
#include "kernels/elementary/elementary.h"
#include "kernels/rms_norm/rms_norm_backend.h"

namespace dflash::backend {
namespace {

// A team of threads works on one group of D columns: half a warp or a warp for heads, a block for hidden
// states; D alone decides. Thread i of the team holds chunks i, i + team, ... Both passes of a thread touch
// the same elements, so y may be x.
constexpr int kBlockThreads = 256;
constexpr int kMaxThreads = 1024;
constexpr int kBlockTeam = 0;                                   // kTeam of a whole block
constexpr int64_t kHalfWarpColumns = 128, kWarpColumns = 1024;  // the widest groups of smaller teams

enum class Gate { kNone, kSilu, kSigmoid };

struct NormTask {
  Bf16Rows x, y;
  Bf16Rows other;  // delta to add (then x is written too), or the gate z
  Parameters weight;
  int64_t rows, groups, dim;
  float offset, eps;
};

// The sum over the team, the same order in every thread.
template <int kTeam>
__device__ __forceinline__ float TeamSum(float value) {
#pragma unroll
  for (int distance = (kTeam == 16 ? 16 : 32) / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  if constexpr (kTeam == kBlockTeam) {
    __shared__ float of_warp[kMaxThreads / 32];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) value += of_warp[warp];
  }
  return value;
}

template <int kTeam, bool kVectorized, bool kAdd, Gate kGate>
__global__ void NormKernel(const NormTask task) {
  LetNextKernelStart();
  const int team_size = kTeam == kBlockTeam ? static_cast<int>(blockDim.x) : kTeam;
  const int64_t member = threadIdx.x % team_size;
  int64_t team = static_cast<int64_t>(blockIdx.x) * (blockDim.x / team_size) + threadIdx.x / team_size;
  const int64_t teams = task.rows * task.groups;
  const bool exists = team < teams;
  if (!exists) team = teams - 1;  // computes along, for the shuffles' sake, and stores nothing
  // Weights are constants: the first chunk's are here before the rows are.
  float first_weights[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const int64_t col = member * kChunk + i;
    first_weights[i] = col < task.dim ? task.weight.At(0, col) : 0.0f;
  }
  WaitForPreviousKernel();
  const int64_t row = team / task.groups, start = team % task.groups * task.dim;
  __nv_bfloat16* x = task.x.Row(row) + start;
  __nv_bfloat16* y = task.y.Row(row) + start;
  const __nv_bfloat16* other = task.other.Row(row) + start;

  const auto load = [&](int64_t col, int count, float(&values)[kChunk]) {
    Load<kVectorized>(x + col, count, values);
    if constexpr (kAdd) {
      float delta[kChunk];
      Load<kVectorized>(other + col, count, delta);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) values[i] = Rounded(values[i] + delta[i]);
      if (exists) Store<kVectorized>(x + col, count, values);
    }
  };
  const auto count_at = [&](int64_t col) {
    return static_cast<int>(max(min(task.dim - col, int64_t{kChunk}), int64_t{0}));
  };
  // The first chunk stays in registers; in all shapes of the models it is the only one.
  const int64_t first_col = member * kChunk, step = int64_t{team_size} * kChunk;
  const int first_count = count_at(first_col);
  float first[kChunk] = {};
  if (first_count > 0) load(first_col, first_count, first);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) sum = fmaf(first[i], first[i], sum);
  for (int64_t col = first_col + step; col < task.dim; col += step) {
    float values[kChunk];
    load(col, count_at(col), values);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum = fmaf(values[i], values[i], sum);
  }
  const float scale = 1.0f / sqrtf(TeamSum<kTeam>(sum) / static_cast<float>(task.dim) + task.eps);
  const auto finish = [&](int64_t col, int count, float(&values)[kChunk], const float(&weights)[kChunk]) {
    float gates[kChunk];
    if constexpr (kGate != Gate::kNone) Load<kVectorized>(other + col, count, gates);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      values[i] = values[i] * scale * (task.offset + weights[i]);
      if constexpr (kGate == Gate::kSilu) values[i] *= SiluF32(gates[i]);
      if constexpr (kGate == Gate::kSigmoid) values[i] *= SigmoidF32(gates[i]);
    }
    if (exists) Store<kVectorized>(y + col, count, values);
  };
  if (first_count > 0) finish(first_col, first_count, first, first_weights);
  for (int64_t col = first_col + step; col < task.dim; col += step) {
    float values[kChunk];
    float weights[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) weights[i] = col + i < task.dim ? task.weight.At(0, col + i) : 0.0f;
    Load<kVectorized>(x + col, count_at(col), values);
    finish(col, count_at(col), values, weights);
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
  const bool vectorized = IsVectorized(x) && IsVectorized(y) && IsVectorized(other) && task.dim % kChunk == 0;
  const auto launch = [&](auto kernel, int64_t threads, int64_t teams_per_block) {
    const LaunchShape shape = {.grid = Grid(CeilDiv(teams, teams_per_block)),
                               .block = dim3(static_cast<unsigned>(threads))};
    return Launch(CudaOf(stream), shape, kernel, task);
  };
  if (task.dim <= kHalfWarpColumns) {
    return launch(vectorized ? NormKernel<16, true, kAdd, kGate> : NormKernel<16, false, kAdd, kGate>,
                  kBlockThreads, kBlockThreads / 16);
  }
  if (task.dim <= kWarpColumns) {
    return launch(vectorized ? NormKernel<32, true, kAdd, kGate> : NormKernel<32, false, kAdd, kGate>,
                  kBlockThreads, kBlockThreads / 32);
  }
  return launch(
      vectorized ? NormKernel<kBlockTeam, true, kAdd, kGate> : NormKernel<kBlockTeam, false, kAdd, kGate>,
      std::min<int64_t>(CeilDiv(CeilDiv(task.dim, kChunk), 32) * 32, kMaxThreads), 1);
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
