#include <cuda_bf16.h>

#include "base/status.h"
#include "kernels/bench/cuda/bench.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/stream_cuda.h"

namespace dflash::bench {
namespace {

constexpr int kThreads = 512;
constexpr int64_t kBytes = int64_t{4} << 30;

__global__ void ReadKernel(const uint4* from, int64_t words, uint32_t* sink) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  uint32_t sum = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
#pragma unroll 8
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < words; i += step) {
    const uint4 word = __ldcs(from + i);
    sum ^= word.x ^ word.y ^ word.z ^ word.w;
  }
  if (sum == 0x12345678u) *sink = sum;  // so that the loads stay
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

double CopyCeiling(const Stream& stream) {
  const Buffer from = Value(Buffer::Allocate(kBytes, stream)), to = Value(Buffer::Allocate(kBytes, stream));
  const Microseconds time = TimeReplays(stream, [&] {
    return CudaStatus(
        cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, CudaOf(stream).stream),
        "copy");
  });
  return 2e6 * static_cast<double>(kBytes) / time.median;
}

double ReadCeiling(const Stream& stream) {
  const Buffer from = Value(Buffer::Allocate(kBytes, stream)), sink = Value(Buffer::Allocate(4, stream));
  const CudaContext& context = CudaOf(stream);
  const LaunchShape shape = {.grid = Grid(4 * context.multiprocessors), .block = dim3(kThreads)};
  const Microseconds time = TimeReplays(stream, [&] {
    return CudaStatus(Launch(context, shape, ReadKernel, from.As<uint4>(), kBytes / 16, sink.As<uint32_t>()),
                      "read");
  });
  return 1e6 * static_cast<double>(kBytes) / time.median;
}

}  // namespace dflash::bench
