// gpu_bench [linear|operations|sequences|step]: tables of what the CUDA kernels reach.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>

#include "kernels/bench/cuda/bench.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/stream_cuda.h"

int main(int argc, char** argv) {
  using namespace dflash::bench;  // NOLINT
  const dflash::Stream stream = Value(dflash::Stream::Create({}));
  cudaDeviceProp properties;
  Require(dflash::CudaStatus(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties"));
  std::printf("%s, %d multiprocessors, L2 %.0f MB\n", properties.name, properties.multiProcessorCount,
              properties.l2CacheSize / 1e6);
  const Ceilings ceilings = {CopyCeiling(stream), ReadCeiling(stream)};
  std::printf("ceilings: copy %.2f TB/s (read + written), read %.2f TB/s\n", ceilings.copy * 1e-12,
              ceilings.read * 1e-12);
  std::fflush(stdout);
  const char* only = argc > 1 ? argv[1] : "";
  if (*only == 0 || std::strcmp(only, "linear") == 0) RunLinear(stream, ceilings);
  if (*only == 0 || std::strcmp(only, "operations") == 0) RunOperations(stream, ceilings);
  if (*only == 0 || std::strcmp(only, "sequences") == 0) RunSequences(stream, ceilings);
  if (*only == 0 || std::strcmp(only, "step") == 0) RunStep(stream);
  return 0;
}
