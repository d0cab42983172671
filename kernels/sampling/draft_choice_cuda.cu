// The drafter's choice on the GPU. Blocks of a row take a chunk of its logits each, twice: for the best one,
// then, with the chunk in the cache, for the sum of exponentials; the last to finish puts the chunks
// together. Sums have one order, so the same logits always give the same bits.
#include <cuda_runtime.h>

#include <algorithm>

#include "base/status.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/sampling/draft_choice_backend.h"
#include "kernels/sampling/sampling_cuda.cuh"

namespace dflash::backend {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxChunks = 64;
constexpr int64_t kChunkLogits = 4096;

// The sum over the block, in every thread.
__device__ __forceinline__ float BlockSum(float value) {
  __shared__ float of_warp[kThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  __syncthreads();  // of_warp may still be read from the call before
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) sum += of_warp[warp];
  return sum;
}

__device__ __forceinline__ bool IsCandidate(uint64_t key) { return key != kUnusable && key != kNone; }

// Grid (chunks, rows). found: [rows, kMaxChunks].
__global__ void __launch_bounds__(kThreads)
    ListDraftsKernel(const float* all_logits, int64_t stride, int64_t count, int64_t first_id,
                     DraftCandidate* found, int32_t* arrived, DraftCandidate* candidates) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int64_t row = blockIdx.y;
  const float* logits = all_logits + row * stride;
  const int64_t size = (count + gridDim.x - 1) / gridDim.x;
  const int64_t begin = min(blockIdx.x * size, count), end = min(begin + size, count);
  uint64_t best = kNone;
  for (int64_t v = begin + threadIdx.x; v < end; v += kThreads) {
    const float logit = logits[v];
    best = min(best, logit < -kMinusInfinity ? CandidateKeyOf(logit, first_id + v) : kUnusable);
  }
  best = BlockReduce<true>(best);
  float mass = 0;
  if (IsCandidate(best)) {  // the same in all threads
    for (int64_t v = begin + threadIdx.x; v < end; v += kThreads) mass += ExpF32(logits[v] - ValueOf(best));
    mass = BlockSum(mass);
  }
  DraftCandidate* of_row = found + row * kMaxChunks;
  if (threadIdx.x == 0) {
    of_row[blockIdx.x].key = best;
    of_row[blockIdx.x].mass = mass;
  }
  if (!ArrivesLast(arrived + row)) return;
  const bool has_chunk = threadIdx.x < gridDim.x;
  const uint64_t own = has_chunk ? __ldcg(&of_row[threadIdx.x].key) : kNone;
  best = BlockReduce<true>(own);
  mass = 0;
  if (IsCandidate(best)) {
    if (own != kNone) mass = __ldcg(&of_row[threadIdx.x].mass) * ExpF32(ValueOf(own) - ValueOf(best));
    mass = BlockSum(mass);
  }
  if (threadIdx.x != 0) return;
  candidates[row].key = best;
  candidates[row].mass = mass;
  candidates[row].padding = 0;
}

// Grid (rows / kThreads).
__global__ void ChooseDraftsKernel(const DraftCandidate* candidates, int64_t parts, int64_t rows,
                                   int32_t* tokens, float* confidences) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows) return;
  uint64_t best = kNone;
  for (int64_t part = 0; part < parts; ++part) best = min(best, candidates[part * rows + row].key);
  tokens[row] = IsCandidate(best) ? IdOf(best) : -1;
  if (confidences == nullptr) return;
  float mass = 0;
  for (int64_t part = 0; part < parts && IsCandidate(best); ++part) {
    const DraftCandidate candidate = candidates[part * rows + row];
    if (candidate.key != kNone) mass += candidate.mass * ExpF32(ValueOf(candidate.key) - ValueOf(best));
  }
  confidences[row] = IsCandidate(best) ? 1 / mass : 0;
}

}  // namespace

absl::Status ListDrafts(ConstMatrixView logits, int64_t first_id, DraftCandidate* candidates,
                        const Stream& stream) {
  const CudaContext& context = CudaOf(stream);
  constexpr int64_t kRowsTogether = std::min<int64_t>(
      kWorkspaceFlags, kWorkspaceBytes / (kMaxChunks * static_cast<int64_t>(sizeof(DraftCandidate))));
  const int64_t chunks = std::clamp<int64_t>(CeilDiv(logits.cols, kChunkLogits), 1, kMaxChunks);
  for (int64_t row = 0; row < logits.rows; row += kRowsTogether) {
    const LaunchShape shape = {.grid = Grid(chunks, std::min(kRowsTogether, logits.rows - row)),
                               .block = dim3(kThreads)};
    DFLASH_RETURN_IF_ERROR(
        CudaStatus(Launch(context, shape, ListDraftsKernel,
                          static_cast<const float*>(logits.data) + row * logits.row_stride, logits.row_stride,
                          logits.cols, first_id, static_cast<DraftCandidate*>(context.workspace),
                          context.flags, candidates + row),
                   "ListDrafts"));
  }
  return absl::OkStatus();
}

absl::Status ChooseDrafts(const DraftCandidate* candidates, int64_t parts, int64_t rows, int32_t* tokens,
                          float* confidences, const Stream& stream) {
  if (rows == 0) return absl::OkStatus();
  const LaunchShape shape = {.grid = Grid(CeilDiv(rows, kThreads)), .block = dim3(kThreads)};
  return CudaStatus(
      Launch(CudaOf(stream), shape, ChooseDraftsKernel, candidates, parts, rows, tokens, confidences),
      "ChooseDrafts");
}

}  // namespace dflash::backend
