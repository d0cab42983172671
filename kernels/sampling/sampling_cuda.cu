// Sampling on the GPU: the arithmetic of sampling.h, element by element the same as on the CPU, and sums of
// integers only, so the order in which blocks and threads work changes nothing.
//
// Four kernels for all rows, each row cut into chunks of blocks; what happens to a row is decided on the
// device from its parameters.
//   Best     the highest logit. Rows of temperature 0 end here.
//   Survey   unfiltered rows (no top-k, no top-p): the draw. Others: how many logits lie how far below the
//            best, in steps of 1/64, and from it the distance that holds the candidates.
//   Gather   lists the candidates; the block that finishes a row sorts them, filters and draws.
//   Select   rows whose filters keep more than a list holds (flat distributions): exact selection by digits.
#include <cuda_runtime.h>

#include <algorithm>

#include "base/status.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/sampling/gumbel.h"
#include "kernels/sampling/philox.h"
#include "kernels/sampling/sampling_backend.h"
#include "kernels/sampling/sampling_cuda.cuh"

namespace dflash::backend {
namespace {

constexpr int kThreads = 256;
constexpr int kSelectThreads = 1024;
constexpr int kMaxChunks = 64;
constexpr int64_t kChunkLogits = 4096;  // about as many per block
constexpr int kBins = 2048;
constexpr float kBinsPerUnit = 64;
constexpr int kListed = 2048;            // candidates that a list holds
constexpr int32_t kPrefixTarget = 1024;  // candidates for top-p alone: most nuclei are smaller
constexpr int32_t kEverything = -1;      // Scratch::last_bin: no list, Select works on the row itself

// One row's scratch, in the workspace. Best clears it.
struct Scratch {
  uint64_t partial[kMaxChunks];
  uint64_t best;  // key
  uint64_t total_mass;
  uint32_t bins[kBins];
  uint32_t listed;
  int32_t last_bin;  // candidates lie in [0, last_bin], or kEverything
  uint64_t list[kListed];
};

struct SamplingTask {
  const float* logits;
  int64_t stride;
  int64_t vocabulary;
  const SamplingParams* params;
  const int64_t* positions;
  int32_t* tokens;
  Scratch* scratch;
  int32_t* arrived;  // blocks of each row
};

__device__ __forceinline__ int Bin(float logit, float best) {
  return min(__float2int_rz((best - logit) * kBinsPerUnit), kBins - 1);  // the conversion saturates
}

struct Chunk {
  int64_t begin, end;
};
// Chunks begin at multiples of 4 ids: a Philox block serves four.
__device__ __forceinline__ Chunk ChunkOf(const SamplingTask& task) {
  const int64_t size = ((task.vocabulary + gridDim.x - 1) / gridDim.x + 3) / 4 * 4;
  const int64_t begin = min(blockIdx.x * size, task.vocabulary);
  return {begin, min(begin + size, task.vocabulary)};
}

__device__ __forceinline__ bool IsUnfiltered(const SamplingParams& params) {
  return params.top_k <= 0 && !(params.top_p < 1);
}

// ---- The kernels. Grid (chunks, rows).

__global__ void __launch_bounds__(kThreads) BestKernel(const SamplingTask task) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const float* logits = task.logits + blockIdx.y * task.stride;
  Scratch& scratch = task.scratch[blockIdx.y];
  for (unsigned bin = blockIdx.x * kThreads + threadIdx.x; bin < kBins; bin += gridDim.x * kThreads) {
    scratch.bins[bin] = 0;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    scratch.total_mass = 0;
    scratch.listed = 0;
    scratch.last_bin = 0;
  }
  const Chunk chunk = ChunkOf(task);
  uint64_t key = kNone;
  for (int64_t v = chunk.begin + threadIdx.x; v < chunk.end; v += kThreads) {
    const float logit = logits[v];
    if (!(logit < -kMinusInfinity)) {
      key = kUnusable;
    } else if (logit > kMinusInfinity) {
      key = min(key, SortKey(logit, v));
    }
  }
  key = BlockReduce<true>(key);
  if (threadIdx.x == 0) scratch.partial[blockIdx.x] = key;
  if (!ArrivesLast(task.arrived + blockIdx.y)) return;
  key = BlockReduce<true>(threadIdx.x < gridDim.x ? __ldcg(&scratch.partial[threadIdx.x]) : kNone);
  if (threadIdx.x == 0) {
    scratch.best = key;
    task.tokens[blockIdx.y] = key == kUnusable || key == kNone ? -1 : IdOf(key);
  }
}

__device__ __forceinline__ void DrawUnfiltered(const SamplingTask& task, const float* logits,
                                               Scratch& scratch, const SamplingParams& params) {
  const Chunk chunk = ChunkOf(task);
  const int64_t position = task.positions[blockIdx.y];
  uint64_t key = kNone;
  for (int64_t v = chunk.begin + 4 * threadIdx.x; v < chunk.end; v += 4 * kThreads) {
    const PhiloxBlock block = Philox4x32(
        NoiseCounter(position, static_cast<uint32_t>(v / 4), NoiseStream::kTargetChoice), params.seed);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (v + i >= chunk.end) continue;
      key =
          min(key, ScoreKey(logits[v + i], static_cast<int32_t>(v + i), block.word[i], params, scratch.best));
    }
  }
  key = BlockReduce<true>(key);
  if (threadIdx.x == 0) scratch.partial[blockIdx.x] = key;
  if (!ArrivesLast(task.arrived + blockIdx.y)) return;
  key = BlockReduce<true>(threadIdx.x < gridDim.x ? __ldcg(&scratch.partial[threadIdx.x]) : kNone);
  if (threadIdx.x == 0) task.tokens[blockIdx.y] = IdOf(key);
}

__global__ void __launch_bounds__(kThreads) SurveyKernel(const SamplingTask task) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  __shared__ uint32_t bins[kBins];
  const float* logits = task.logits + blockIdx.y * task.stride;
  Scratch& scratch = task.scratch[blockIdx.y];
  const SamplingParams params = task.params[blockIdx.y];
  if (!IsDrawn(params, scratch.best)) return;
  if (IsUnfiltered(params)) return DrawUnfiltered(task, logits, scratch, params);

  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kThreads) bins[bin] = 0;
  __syncthreads();
  const float best = ValueOf(scratch.best);
  const bool needs_total = params.top_k <= 0;
  const Chunk chunk = ChunkOf(task);
  uint64_t mass = 0;
  for (int64_t v = chunk.begin + threadIdx.x; v < chunk.end; v += kThreads) {
    const float logit = logits[v];
    if (logit == kMinusInfinity) continue;
    atomicAdd(&bins[Bin(logit, best)], 1u);
    if (needs_total) mass += Mass(logit, best, params.temperature);
  }
  if (needs_total) {
    mass = BlockReduce<false>(mass);
    if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long*>(&scratch.total_mass), mass);
  }
  __syncthreads();
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kThreads) {
    if (bins[bin] != 0) atomicAdd(&scratch.bins[bin], bins[bin]);
  }
  if (!ArrivesLast(task.arrived + blockIdx.y)) return;

  // The first bin at which enough candidates are in. Thread i counts bins [8 i, 8 i + 8).
  constexpr int kOwn = kBins / kThreads;
  __shared__ uint32_t before[kThreads];
  uint32_t own[kOwn], sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sum += own[i] = __ldcg(&scratch.bins[threadIdx.x * kOwn + i]);
  before[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t total = 0;
    for (uint32_t& value : before) {
      const uint32_t count = value;
      value = total;
      total += count;
    }
    // Fewer than wanted, all of them near or far: the list must hold all.
    scratch.last_bin = total <= kListed ? kBins - 1 : kEverything;
  }
  __syncthreads();
  const auto wanted = static_cast<uint32_t>(params.top_k > 0 ? params.top_k : kPrefixTarget);
  uint32_t count = before[threadIdx.x];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const bool was_enough = count >= wanted;
    count += own[i];
    if (!was_enough && count >= wanted) {  // true for one bin of the row at most
      scratch.last_bin = count <= kListed ? static_cast<int32_t>(threadIdx.x * kOwn) + i : kEverything;
    }
  }
}

__global__ void __launch_bounds__(kThreads) GatherKernel(const SamplingTask task) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  __shared__ uint64_t keys[kListed];
  const float* logits = task.logits + blockIdx.y * task.stride;
  Scratch& scratch = task.scratch[blockIdx.y];
  const SamplingParams params = task.params[blockIdx.y];
  if (!IsDrawn(params, scratch.best) || IsUnfiltered(params) || scratch.last_bin == kEverything) return;
  const float best = ValueOf(scratch.best);
  const int last_bin = scratch.last_bin;
  const Chunk chunk = ChunkOf(task);
  for (int64_t v = chunk.begin + threadIdx.x; v < chunk.end; v += kThreads) {
    const float logit = logits[v];
    if (logit == kMinusInfinity || Bin(logit, best) > last_bin) continue;
    scratch.list[atomicAdd(&scratch.listed, 1u)] = SortKey(logit, v);  // Survey has counted: there is room
  }
  if (!ArrivesLast(task.arrived + blockIdx.y)) return;

  const int listed = static_cast<int>(__ldcg(&scratch.listed));
  int size = 2;
  while (size < listed) size *= 2;
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) {
    keys[i] = i < listed ? __ldcg(&scratch.list[i]) : kNone;
  }
  __syncthreads();
  SortBlock(keys, size);
  if (threadIdx.x >= 32) return;
  const uint64_t key = DrawFromSorted(keys, listed, params, __ldcg(&scratch.total_mass), scratch.best,
                                      task.positions[blockIdx.y]);
  if (threadIdx.x != 0) return;
  if (key == kNone) {  // the nucleus is larger than the list
    scratch.last_bin = kEverything;
  } else {
    task.tokens[blockIdx.y] = IdOf(key);
  }
}

// Grid (rows).
__global__ void __launch_bounds__(kSelectThreads) SelectKernel(const SamplingTask task) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  __shared__ unsigned long long sums[256];
  const int64_t row = blockIdx.x;
  const float* logits = task.logits + row * task.stride;
  const Scratch& scratch = task.scratch[row];
  const SamplingParams params = task.params[row];
  if (!IsDrawn(params, scratch.best) || IsUnfiltered(params) || scratch.last_bin != kEverything) return;
  const float best = ValueOf(scratch.best);
  const auto mass = [&](uint64_t key) { return Mass(ValueOf(key), best, params.temperature); };
  const auto key_at = [&](int64_t v) { return CandidateKeyOf(logits[v], v); };
  uint64_t limit = kNone;
  uint64_t total = scratch.total_mass;
  if (params.top_k > 0) {
    limit = SelectKey(
        task.vocabulary, key_at, limit, sums, [](uint64_t) { return uint64_t{1}; },
        [&](uint64_t count) { return count >= static_cast<uint64_t>(params.top_k); });
    total = 0;
    for (int64_t v = threadIdx.x; params.top_p < 1 && v < task.vocabulary; v += kSelectThreads) {
      if (const uint64_t key = key_at(v); key != kNone && key <= limit) total += mass(key);
    }
    total = BlockReduce<false>(total);
  }
  if (params.top_p < 1) {
    const double enough = static_cast<double>(params.top_p) * static_cast<double>(total);
    limit = SelectKey(task.vocabulary, key_at, limit, sums, mass,
                      [&](uint64_t sum) { return static_cast<double>(sum) >= enough; });
  }
  const int64_t position = task.positions[row];
  uint64_t key = kNone;
  for (int64_t v = threadIdx.x; v < task.vocabulary; v += kSelectThreads) {
    const float logit = logits[v];
    if (logit == kMinusInfinity || SortKey(logit, v) > limit) continue;
    const auto id = static_cast<int32_t>(v);
    const uint32_t word = NoiseWord(params.seed, position, id, NoiseStream::kTargetChoice);
    key = min(key, ScoreKey(logit, id, word, params, scratch.best));
  }
  key = BlockReduce<true>(key);
  if (threadIdx.x == 0) task.tokens[row] = IdOf(key);
}

// Rows of one round of launches: their scratch fits into the workspace, their counters into the flags.
constexpr int64_t kRowsTogether = std::min<int64_t>(kWorkspaceFlags, kWorkspaceBytes / sizeof(Scratch));

SamplingTask TaskOf(ConstMatrixView logits, int64_t vocabulary, int64_t row, int32_t* tokens,
                    const CudaContext& context) {
  SamplingTask task = {};
  task.logits = static_cast<const float*>(logits.data) + row * logits.row_stride;
  task.stride = logits.row_stride;
  task.vocabulary = vocabulary;
  task.tokens = tokens + row;
  task.scratch = static_cast<Scratch*>(context.workspace);
  task.arrived = context.flags;
  return task;
}

LaunchShape ChunksOfRows(int64_t vocabulary, int64_t rows) {
  return {.grid = Grid(std::min<int64_t>(CeilDiv(vocabulary, kChunkLogits), kMaxChunks), rows),
          .block = dim3(kThreads)};
}

cudaError_t LaunchSample(const SamplingTask& task, int64_t rows, const CudaContext& context) {
  const LaunchShape chunks = ChunksOfRows(task.vocabulary, rows);
  for (const auto kernel : {BestKernel, SurveyKernel, GatherKernel}) {
    if (const cudaError_t error = Launch(context, chunks, kernel, task); error != cudaSuccess) return error;
  }
  return Launch(context, {.grid = Grid(rows), .block = dim3(kSelectThreads)}, SelectKernel, task);
}

}  // namespace

absl::Status SampleRows(ConstMatrixView logits, const SamplingParams* params, const int64_t* positions,
                        int64_t vocabulary, int32_t* tokens, const Stream& stream) {
  const CudaContext& context = CudaOf(stream);
  for (int64_t row = 0; row < logits.rows; row += kRowsTogether) {
    SamplingTask task = TaskOf(logits, vocabulary, row, tokens, context);
    task.params = params + row;
    task.positions = positions + row;
    DFLASH_RETURN_IF_ERROR(
        CudaStatus(LaunchSample(task, std::min(kRowsTogether, logits.rows - row), context), "SampleRows"));
  }
  return absl::OkStatus();
}

}  // namespace dflash::backend
