#include <cuda_bf16.h>

#include <algorithm>

#include "base/status.h"
#include "kernels/bench/cuda/bench.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/ptx.cuh"
#include "kernels/device/cuda/stream_cuda.h"

namespace dflash::bench {
namespace {

constexpr int kThreads = 512;
constexpr int64_t kBytes = int64_t{4} << 30;

// Eight loads of a thread are on their way at a time.
template <bool kCopy>
__global__ void __launch_bounds__(kThreads) MoveKernel(const uint4* from, uint4* to, int64_t words) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  constexpr int kAtOnce = 8;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  uint32_t sum = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < words;
       i += kAtOnce * step) {
    uint4 held[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) held[j] = i + j * step < words ? __ldcs(from + i + j * step) : uint4{};
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if constexpr (kCopy) {
        if (i + j * step < words) __stcs(to + i + j * step, held[j]);
      } else {
        sum ^= held[j].x ^ held[j].y ^ held[j].z ^ held[j].w;
      }
    }
  }
  if (!kCopy && sum == 0x12345678u) to->x = sum;  // so that the loads stay
}

constexpr int kStages = 12, kStageBytes = 16 << 10;

// One thread of a block copies its share of `stages`, kStages of them on their way at a time.
__global__ void BulkCopyKernel(const uint8_t* from, int64_t stages) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ __align__(8) uint64_t arrived[kStages];
  LetNextKernelStart();
  WaitForPreviousKernel();
  for (int i = 0; i < kStages; ++i) ptx::BarrierInit(ptx::SharedAddress(arrived + i), 1);
  ptx::BarrierInitFence();
  const int64_t begin = stages * blockIdx.x / gridDim.x,
                count = stages * (blockIdx.x + 1) / gridDim.x - begin;
  const auto copy = [&](int64_t i) {
    const uint32_t barrier = ptx::SharedAddress(arrived + i % kStages);
    ptx::BarrierArriveExpecting(barrier, kStageBytes);
    ptx::CopyBulk(ptx::SharedAddress(ring + i % kStages * kStageBytes), from + (begin + i) * kStageBytes,
                  kStageBytes, barrier, ptx::kEvictFirst);
  };
  for (int64_t i = 0; i < kStages && i < count; ++i) copy(i);
  for (int64_t i = 0; i < count; ++i) {
    ptx::BarrierWait(ptx::SharedAddress(arrived + i % kStages), static_cast<uint32_t>(i / kStages % 2));
    if (i + kStages < count) copy(i + kStages);
  }
#else
  __trap();
#endif
}

__global__ void FillKernel(__nv_bfloat162* to, int64_t pairs, float deviation, uint64_t seed) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < pairs; i += step) {
    uint64_t z = (static_cast<uint64_t>(i) ^ (seed << 40)) + 0x9e3779b97f4a7c15ull;  // SplitMix64
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    const float u = (static_cast<float>(static_cast<uint32_t>(z) >> 8) + 1) * 0x1p-24f;
    const float angle = 6.2831853f * static_cast<float>(z >> 40) * 0x1p-24f;
    const float radius = deviation * sqrtf(-2 * __logf(u));
    to[i] = __floats2bfloat162_rn(radius * __cosf(angle), radius * __sinf(angle));
  }
}

}  // namespace

absl::Status FillNormal(void* data, int64_t bytes, float deviation, uint64_t seed, const Stream& stream) {
  const CudaContext& context = CudaOf(stream);
  const LaunchShape shape = {.grid = Grid(8 * context.multiprocessors), .block = dim3(kThreads)};
  return CudaStatus(
      Launch(context, shape, FillKernel, static_cast<__nv_bfloat162*>(data), bytes / 4, deviation, seed),
      "filling");
}

absl::Status BulkCopy(const void* from, int64_t bytes, const Stream& stream) {
  constexpr int kRingBytes = kStages * kStageBytes;
  const CudaContext& context = CudaOf(stream);
  DFLASH_RETURN_IF_ERROR(CudaStatus(
      cudaFuncSetAttribute(BulkCopyKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes),
      "shared memory of a bulk copy"));
  const LaunchShape shape = {
      .grid = Grid(context.multiprocessors), .block = dim3(1), .shared_bytes = kRingBytes};
  return CudaStatus(
      Launch(context, shape, BulkCopyKernel, static_cast<const uint8_t*>(from), bytes / kStageBytes),
      "bulk copy");
}

namespace {
template <bool kCopy>
double Ceiling(const Stream& stream) {
  const Buffer from = Value(Buffer::Allocate(kBytes, stream)), to = Value(Buffer::Allocate(kBytes, stream));
  Require(FillNormal(from.data(), kBytes, 1, 1, stream));
  const CudaContext& context = CudaOf(stream);
  double best = 0;
  for (int blocks : {2, 4}) {
    const LaunchShape shape = {.grid = Grid(blocks * context.multiprocessors), .block = dim3(kThreads)};
    const Microseconds time = TimeReplays(stream, [&] {
      return CudaStatus(
          Launch(context, shape, MoveKernel<kCopy>, from.As<uint4>(), to.As<uint4>(), kBytes / 16),
          "ceiling");
    });
    best = std::max(best, (kCopy ? 2e6 : 1e6) * static_cast<double>(kBytes) / time.median);
  }
  return best;
}
}  // namespace

double CopyCeiling(const Stream& stream) { return Ceiling<true>(stream); }
double ReadCeiling(const Stream& stream) { return Ceiling<false>(stream); }

}  // namespace dflash::bench
