// Rules and log probabilities on the GPU. Rows with rules are rare and wait for the host anyway, so these
// kernels are plain: edits by one block a row, then (where a row has one) masks over chunks of the row; sums
// by one block a row, in a fixed order.
#include <cuda_runtime.h>

#include <algorithm>

#include "base/status.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/sampling/logit_rules_backend.h"
#include "kernels/sampling/sampling_cuda.cuh"

namespace dflash::backend {
namespace {

constexpr int kThreads = 256;
constexpr int kRowThreads = 1024;
constexpr int64_t kChunkLogits = 4096;
constexpr int kMaxChunks = 64;

struct RulesTask {
  const RowRules* rows;
  const LogitEdit* edits;
  const uint32_t* masks;
  int64_t mask_words;
  int64_t first_id;
  float* logits;
  int64_t stride;
  int64_t columns;
};

__device__ __forceinline__ void Apply(const RulesTask& task, const LogitEdit& edit, float* row) {
  const int64_t column = edit.id - task.first_id;
  if (column < 0 || column >= task.columns) return;
  // Each step rounded, as on the CPU.
  float x = __fadd_rn(row[column], edit.bias);
  x = x > 0 ? __fdiv_rn(x, edit.repetition) : __fmul_rn(x, edit.repetition);
  row[column] = __fsub_rn(x, edit.penalty);
}

// Grid (rows).
__global__ void __launch_bounds__(kThreads) EditKernel(const RulesTask task) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const RowRules rule = task.rows[blockIdx.x];
  float* row = task.logits + blockIdx.x * task.stride;
  const auto is_own = [&](int32_t id) {
    int low = rule.own_begin, high = rule.own_end;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (task.edits[middle].id < id) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low < rule.own_end && task.edits[low].id == id;
  };
  // No token is edited twice, so the order does not matter.
  for (int i = rule.shared_begin + static_cast<int>(threadIdx.x); i < rule.shared_end; i += kThreads) {
    const LogitEdit edit = task.edits[i];
    if (!is_own(edit.id)) Apply(task, edit, row);
  }
  for (int i = rule.own_begin + static_cast<int>(threadIdx.x); i < rule.own_end; i += kThreads) {
    Apply(task, task.edits[i], row);
  }
}

// Grid (chunks, rows).
__global__ void __launch_bounds__(kThreads) MaskKernel(const RulesTask task) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const RowRules rule = task.rows[blockIdx.y];
  if (rule.mask < 0 && rule.only < 0) return;
  float* row = task.logits + blockIdx.y * task.stride;
  const uint32_t* mask = rule.mask < 0 ? nullptr : task.masks + rule.mask * task.mask_words;
  for (int64_t c = int64_t{blockIdx.x} * kThreads + threadIdx.x; c < task.columns;
       c += int64_t{gridDim.x} * kThreads) {
    const int64_t id = task.first_id + c;
    const bool allowed =
        (mask == nullptr || (mask[id / 32] >> (id % 32) & 1) != 0) && (rule.only < 0 || id == rule.only);
    if (!allowed && row[c] < -kMinusInfinity) row[c] = kMinusInfinity;
  }
}

__device__ __forceinline__ float BlockMax(float value) {
  __shared__ float of_warp[32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warp[threadIdx.x % 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
  return value;
}

__device__ __forceinline__ double BlockSum(double value) {
  __shared__ double of_warp[32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warp[threadIdx.x % 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

// Grid (rows).
__global__ void __launch_bounds__(kRowThreads)
    SumKernel(const float* logits, int64_t stride, int64_t columns, int64_t first_id, const int32_t* tokens,
              LogSum* sums) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const float* row = logits + blockIdx.x * stride;
  float best = kMinusInfinity;
  for (int64_t c = threadIdx.x; c < columns; c += kRowThreads) best = fmaxf(best, row[c]);
  best = BlockMax(best);
  double sum = 0;
  if (best > kMinusInfinity) {
    for (int64_t c = threadIdx.x; c < columns; c += kRowThreads)
      sum += static_cast<double>(ExpF32(row[c] - best));
  }
  sum = BlockSum(sum);
  if (threadIdx.x != 0) return;
  const int32_t token = tokens[blockIdx.x];
  const int64_t column = token - first_id;
  const bool is_here = token >= 0 && column >= 0 && column < columns;
  sums[blockIdx.x] = {.best = best, .token = is_here ? row[column] : kMinusInfinity, .sum = sum};
}

}  // namespace

absl::Status ProcessLogits(const LogitRules& rules, int64_t first_id, MatrixView logits,
                           const Stream& stream) {
  const CudaContext& context = CudaOf(stream);
  const RulesTask task = {.rows = rules.rows,
                          .edits = rules.edits,
                          .masks = rules.masks,
                          .mask_words = rules.mask_words,
                          .first_id = first_id,
                          .logits = static_cast<float*>(logits.data),
                          .stride = logits.row_stride,
                          .columns = logits.cols};
  DFLASH_RETURN_IF_ERROR(
      CudaStatus(Launch(context, {.grid = Grid(logits.rows), .block = dim3(kThreads)}, EditKernel, task),
                 "ProcessLogits"));
  if (!rules.restricts) return absl::OkStatus();
  const int64_t chunks = std::min<int64_t>(CeilDiv(logits.cols, kChunkLogits), kMaxChunks);
  return CudaStatus(
      Launch(context, {.grid = Grid(chunks, logits.rows), .block = dim3(kThreads)}, MaskKernel, task),
      "ProcessLogits");
}

absl::Status SumRows(ConstMatrixView logits, int64_t first_id, const int32_t* tokens, LogSum* sums,
                     const Stream& stream) {
  return CudaStatus(
      Launch(CudaOf(stream), {.grid = Grid(logits.rows), .block = dim3(kRowThreads)}, SumKernel,
             static_cast<const float*>(logits.data), logits.row_stride, logits.cols, first_id, tokens, sums),
      "SumRows");
}

}  // namespace dflash::backend
