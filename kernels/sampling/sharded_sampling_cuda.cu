// The steps of sharded_sampling.h on the GPU. Lists are made in one launch: blocks of a row each select from
// their chunk of logits, the last to finish selects from what they found. Selection (top-p without top-k,
// long top-k) is rare; it takes one block a row.
#include <cuda_runtime.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/sampling/sampling_cuda.cuh"
#include "kernels/sampling/sharded_sampling_backend.h"

namespace dflash::backend {
namespace {

constexpr int kThreads = 256;
constexpr int kRowThreads = 1024;
constexpr int kMaxChunks = 64;
constexpr int64_t kChunkLogits = 4096;
constexpr int kMaxGathered = 2048;  // entries of all parts' lists of a row

struct Part {
  const float* logits;
  int64_t stride;
  int64_t count;  // tokens
  int64_t first_id;

  __device__ __forceinline__ uint64_t KeyAt(int64_t row, int64_t v) const {
    return CandidateKeyOf(logits[row * stride + v], first_id + v);
  }
};

// Up to kMaxListed least keys of key_at(0 .. count), sorted, padded with kNone, in `list`. The whole block.
template <typename KeyAt>
__device__ __forceinline__ void LeastKeys(int64_t count, const KeyAt& key_at, int wanted, uint64_t* list) {
  __shared__ unsigned long long sums[256];
  __shared__ int listed;
  const uint64_t limit = SelectKey(
      count, key_at, kNone, sums, [](uint64_t) { return uint64_t{1}; },
      [&](uint64_t sum) { return sum >= static_cast<uint64_t>(wanted); });
  if (threadIdx.x == 0) listed = 0;
  if (threadIdx.x < kMaxListed) list[threadIdx.x] = kNone;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    const uint64_t key = key_at(i);
    if (key != kNone && key <= limit) list[atomicAdd(&listed, 1)] = key;  // keys differ: at most `wanted`
  }
  __syncthreads();
  SortBlock(list, kMaxListed);
}

// Grid (chunks, rows). found: [rows, kMaxChunks, count].
__global__ void __launch_bounds__(kThreads)
    ListBestKernel(Part part, int count, uint64_t* found, int32_t* arrived, uint64_t* keys) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  __shared__ uint64_t list[kMaxListed];
  const int64_t row = blockIdx.y;
  const float* logits = part.logits + row * part.stride;
  const int64_t size = (part.count + gridDim.x - 1) / gridDim.x;
  const int64_t begin = min(blockIdx.x * size, part.count), end = min(begin + size, part.count);
  uint64_t least = kNone;
  for (int64_t v = begin + threadIdx.x; v < end; v += kThreads) {
    const float logit = logits[v];
    least = min(least, logit < -kMinusInfinity ? CandidateKeyOf(logit, part.first_id + v) : kUnusable);
  }
  least = BlockReduce<true>(least);
  if (count > 1 && least != kUnusable) {
    LeastKeys(
        end - begin, [&](int64_t i) { return part.KeyAt(row, begin + i); }, count, list);
  } else {
    if (threadIdx.x < kMaxListed) list[threadIdx.x] = threadIdx.x == 0 ? least : kNone;
    __syncthreads();
  }
  uint64_t* of_row = found + row * kMaxChunks * count;
  if (static_cast<int>(threadIdx.x) < count) of_row[blockIdx.x * count + threadIdx.x] = list[threadIdx.x];
  if (!ArrivesLast(arrived + row)) return;
  const int64_t candidates = static_cast<int64_t>(gridDim.x) * count;
  least = kNone;
  for (int64_t i = threadIdx.x; i < candidates; i += kThreads) least = min(least, __ldcg(&of_row[i]));
  least = BlockReduce<true>(least);
  if (count > 1 && least != kUnusable) {
    LeastKeys(
        candidates, [&](int64_t i) { return __ldcg(&of_row[i]); }, count, list);
  } else {
    if (threadIdx.x < kMaxListed) list[threadIdx.x] = threadIdx.x == 0 ? least : kNone;
    __syncthreads();
  }
  if (static_cast<int>(threadIdx.x) < count) keys[row * count + threadIdx.x] = list[threadIdx.x];
}

// Grid (rows).
__global__ void __launch_bounds__(kThreads)
    SampleFromListsKernel(const uint64_t* lists, int parts, int rows, int count, const SamplingParams* params,
                          const int64_t* positions, int32_t* tokens) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  __shared__ uint64_t keys[kMaxGathered];
  const int64_t row = blockIdx.x;
  const int gathered = parts * count;
  int size = 2;
  while (size < gathered) size *= 2;
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) {
    const int64_t part = i / count;
    keys[i] = i < gathered ? lists[(part * rows + row) * count + i % count] : kNone;
  }
  __syncthreads();
  SortBlock(keys, size);
  const uint64_t best = keys[0];
  if (threadIdx.x >= 32) return;
  if (params == nullptr || !IsDrawn(params[row], best)) {
    if (threadIdx.x == 0) tokens[row] = best == kUnusable || best == kNone ? -1 : IdOf(best);
    return;
  }
  int listed = 0;  // keys are sorted: candidates, then kNone
  for (int first = 0; first < size; first += 32) {
    const int i = first + static_cast<int>(threadIdx.x);
    listed += __popc(__ballot_sync(kAllLanes, i < size && keys[i] != kNone));
  }
  const uint64_t key = DrawFromSorted(keys, listed, params[row], 0, best, positions[row]);
  if (threadIdx.x == 0) tokens[row] = key == kNone ? -1 : IdOf(key);
}

// Grid (rows / kThreads).
__global__ void BeginSelectionKernel(const uint64_t* best, int64_t parts, int64_t rows,
                                     RowSelection* selections) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows) return;
  RowSelection selection;
  for (int64_t part = 0; part < parts; ++part) selection.best = min(selection.best, best[part * rows + row]);
  selections[row] = selection;
}

__device__ __forceinline__ bool HasFilter(const SamplingParams& params, SamplingFilter filter) {
  return filter == SamplingFilter::kTopK ? params.top_k > 0 : params.top_p < 1;
}

// Grid (rows).
__global__ void __launch_bounds__(kRowThreads)
    CountDigitsKernel(Part part, const SamplingParams* all_params, SamplingFilter filter, int shift,
                      const RowSelection* selections, uint64_t* all_sums) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  __shared__ unsigned long long sums[kDigits];
  const int64_t row = blockIdx.x;
  const SamplingParams params = all_params[row];
  const RowSelection selection = selections[row];
  if (threadIdx.x < kDigits) sums[threadIdx.x] = 0;
  __syncthreads();
  if (IsDrawn(params, selection.best) && HasFilter(params, filter)) {
    const float best = ValueOf(selection.best);
    for (int64_t first = 0; first < part.count; first += kRowThreads) {  // whole warps
      const int64_t v = first + threadIdx.x;
      const uint64_t key = v < part.count ? part.KeyAt(row, v) : kNone;
      const bool active =
          key != kNone && key <= selection.limit && (shift == 56 || key >> (shift + 8) == selection.digits);
      const uint64_t value = !active                           ? 0
                             : filter == SamplingFilter::kTopK ? 1
                                                               : Mass(ValueOf(key), best, params.temperature);
      AddByDigit(sums, static_cast<int>(key >> shift & (kDigits - 1)), active, value);
    }
  }
  __syncthreads();
  if (threadIdx.x < kDigits) all_sums[row * kDigits + threadIdx.x] = sums[threadIdx.x];
}

// Grid (rows), a thread per digit.
__global__ void __launch_bounds__(kDigits)
    ChooseDigitKernel(const uint64_t* all_sums, int64_t parts, int64_t rows, const SamplingParams* all_params,
                      SamplingFilter filter, int shift, RowSelection* selections) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  __shared__ uint64_t sums[kDigits];
  const int64_t row = blockIdx.x;
  const SamplingParams params = all_params[row];
  RowSelection selection = selections[row];
  if (!IsDrawn(params, selection.best) || !HasFilter(params, filter)) return;
  uint64_t own = 0;
  for (int64_t part = 0; part < parts; ++part) own += all_sums[(part * rows + row) * kDigits + threadIdx.x];
  sums[threadIdx.x] = own;
  const uint64_t total = BlockReduce<false>(own);  // waits for all
  if (threadIdx.x != 0) return;
  if (shift == 56) {
    selection.digits = 0;
    selection.before = 0;
    selection.enough = filter == SamplingFilter::kTopK
                           ? static_cast<double>(params.top_k)
                           : static_cast<double>(params.top_p) * static_cast<double>(total);
  } else if (selection.digits == kNone) {
    return;  // everything is not enough: all stay
  }
  uint64_t sum = selection.before;
  int64_t digit = 0;
  while (digit < kDigits && (sums[digit] == 0 || static_cast<double>(sum + sums[digit]) < selection.enough)) {
    sum += sums[digit++];
  }
  selection.digits = digit < kDigits ? selection.digits << 8 | static_cast<uint64_t>(digit) : kNone;
  selection.before = sum;
  if (shift == 0) selection.limit = min(selection.limit, selection.digits);
  selections[row] = selection;
}

// Grid (rows).
__global__ void __launch_bounds__(kRowThreads)
    DrawBelowLimitKernel(Part part, const SamplingParams* all_params, const int64_t* positions,
                         const RowSelection* selections, uint64_t* keys) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int64_t row = blockIdx.x;
  const SamplingParams params = all_params[row];
  const RowSelection selection = selections[row];
  uint64_t least = kNone;
  if (IsDrawn(params, selection.best)) {
    const int64_t position = positions[row];
    for (int64_t v = threadIdx.x; v < part.count; v += kRowThreads) {
      const uint64_t key = part.KeyAt(row, v);
      if (key == kNone || key > selection.limit) continue;
      const uint32_t word = NoiseWord(params.seed, position, IdOf(key), NoiseStream::kTargetChoice);
      least = min(least, ScoreKey(ValueOf(key), IdOf(key), word, params, selection.best));
    }
  }
  least = BlockReduce<true>(least);
  if (threadIdx.x == 0) keys[row] = least;
}

// Grid (rows / kThreads).
__global__ void ChooseTokensKernel(const uint64_t* draws, int64_t parts, int64_t rows,
                                   const SamplingParams* params, const RowSelection* selections,
                                   int32_t* tokens) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows) return;
  uint64_t key = selections[row].best;
  if (key == kUnusable || key == kNone) {
    tokens[row] = -1;
    return;
  }
  if (IsDrawn(params[row], key)) {
    key = kNone;
    for (int64_t part = 0; part < parts; ++part) key = min(key, draws[part * rows + row]);
  }
  tokens[row] = IdOf(key);
}

Part PartOf(ConstMatrixView logits, int64_t first_id, int64_t first_row = 0) {
  return {.logits = static_cast<const float*>(logits.data) + first_row * logits.row_stride,
          .stride = logits.row_stride,
          .count = logits.cols,
          .first_id = first_id};
}

LaunchShape PerRow(int64_t rows, int threads) { return {.grid = Grid(rows), .block = dim3(threads)}; }
LaunchShape ThreadPerRow(int64_t rows) {
  return {.grid = Grid(CeilDiv(rows, kThreads)), .block = dim3(kThreads)};
}

}  // namespace

absl::Status ListBest(ConstMatrixView logits, int64_t first_id, int64_t count, CandidateKey* keys,
                      const Stream& stream) {
  const CudaContext& context = CudaOf(stream);
  const int64_t row_bytes = kMaxChunks * count * int64_t{sizeof(uint64_t)};
  const int64_t together = std::min<int64_t>(kWorkspaceFlags, kWorkspaceBytes / row_bytes);
  const int64_t chunks = std::clamp<int64_t>(CeilDiv(logits.cols, kChunkLogits), 1, kMaxChunks);
  for (int64_t row = 0; row < logits.rows; row += together) {
    const LaunchShape shape = {.grid = Grid(chunks, std::min(together, logits.rows - row)),
                               .block = dim3(kThreads)};
    DFLASH_RETURN_IF_ERROR(CudaStatus(
        Launch(context, shape, ListBestKernel, PartOf(logits, first_id, row), static_cast<int>(count),
               static_cast<uint64_t*>(context.workspace), context.flags, keys + row * count),
        "ListBest"));
  }
  return absl::OkStatus();
}

absl::Status SampleFromLists(const CandidateKey* lists, int64_t parts, int64_t rows, int64_t count,
                             const SamplingParams* params, const int64_t* positions, int32_t* tokens,
                             const Stream& stream) {
  if (parts * count > kMaxGathered) {
    return absl::InvalidArgumentError(absl::StrCat("SampleFromLists: ", parts, " lists of ", count,
                                                   ", at most ", kMaxGathered, " entries"));
  }
  return CudaStatus(
      Launch(CudaOf(stream), PerRow(rows, kThreads), SampleFromListsKernel, lists, static_cast<int>(parts),
             static_cast<int>(rows), static_cast<int>(count), params, positions, tokens),
      "SampleFromLists");
}

absl::Status BeginSelection(const CandidateKey* best, int64_t parts, int64_t rows, RowSelection* selections,
                            const Stream& stream) {
  return CudaStatus(
      Launch(CudaOf(stream), ThreadPerRow(rows), BeginSelectionKernel, best, parts, rows, selections),
      "BeginSelection");
}

absl::Status CountDigits(ConstMatrixView logits, int64_t first_id, const SamplingParams* params,
                         SamplingFilter filter, int shift, const RowSelection* selections, uint64_t* sums,
                         const Stream& stream) {
  return CudaStatus(Launch(CudaOf(stream), PerRow(logits.rows, kRowThreads), CountDigitsKernel,
                           PartOf(logits, first_id), params, filter, shift, selections, sums),
                    "CountDigits");
}

absl::Status ChooseDigit(const uint64_t* sums, int64_t parts, int64_t rows, const SamplingParams* params,
                         SamplingFilter filter, int shift, RowSelection* selections, const Stream& stream) {
  return CudaStatus(Launch(CudaOf(stream), PerRow(rows, kDigits), ChooseDigitKernel, sums, parts, rows,
                           params, filter, shift, selections),
                    "ChooseDigit");
}

absl::Status DrawBelowLimit(ConstMatrixView logits, int64_t first_id, const SamplingParams* params,
                            const int64_t* positions, const RowSelection* selections, CandidateKey* keys,
                            const Stream& stream) {
  return CudaStatus(Launch(CudaOf(stream), PerRow(logits.rows, kRowThreads), DrawBelowLimitKernel,
                           PartOf(logits, first_id), params, positions, selections, keys),
                    "DrawBelowLimit");
}

absl::Status ChooseTokens(const CandidateKey* draws, int64_t parts, int64_t rows,
                          const SamplingParams* params, const RowSelection* selections, int32_t* tokens,
                          const Stream& stream) {
  return CudaStatus(Launch(CudaOf(stream), ThreadPerRow(rows), ChooseTokensKernel, draws, parts, rows, params,
                           selections, tokens),
                    "ChooseTokens");
}

}  // namespace dflash::backend
