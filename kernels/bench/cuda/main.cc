// gpu_bench [--json FILE] [linear|energy|operations|sequences|step]: tables of what the CUDA kernels reach.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/bench/cuda/bench.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/stream_cuda.h"

namespace dflash::bench {
namespace {

// All figures in microseconds a call; names hold nothing that JSON must escape.
void WriteJson(const char* path, const cudaDeviceProp& device, const Ceilings& ceilings) {
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) Require(absl::PermissionDeniedError(path));
  std::fprintf(
      file,
      "{\"device\": \"%s\", \"multiprocessors\": %d,\n \"ceilings\": {\"copy_bytes_per_second\": %.4g, "
      "\"read_bytes_per_second\": %.4g, \"gemm_flop_per_second\": %.4g},\n \"figures\": [",
      device.name, device.multiProcessorCount, ceilings.copy, ceilings.read, ceilings.gemm);
  const char* separator = "\n";
  for (const Figure& figure : Figures()) {
    std::fprintf(file, "%s  {\"name\": \"%s\", \"us\": %.3f, \"low\": %.3f, \"high\": %.3f}", separator,
                 figure.name.c_str(), figure.time.median, figure.time.low, figure.time.high);
    separator = ",\n";
  }
  std::fprintf(file, "\n]}\n");
  if (std::fclose(file) != 0) Require(absl::DataLossError(path));
}

int Main(int argc, char** argv) {
  const char* only = "";
  const char* json = nullptr;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
      json = argv[++i];
    } else {
      only = argv[i];
    }
  }
  const auto wanted = [&](const char* part) { return *only == 0 || std::strcmp(only, part) == 0; };
  if (!wanted("linear") && !wanted("energy") && !wanted("operations") && !wanted("sequences") &&
      !wanted("step")) {
    std::fprintf(stderr, "usage: gpu_bench [--json FILE] [linear|energy|operations|sequences|step]\n");
    return 64;
  }
  const Stream stream = Value(Stream::Create({}));
  cudaDeviceProp properties;
  Require(CudaStatus(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties"));
  std::printf("%s, %d multiprocessors, L2 %.0f MB\n", properties.name, properties.multiProcessorCount,
              properties.l2CacheSize / 1e6);
  const Ceilings ceilings = {CopyCeiling(stream), ReadCeiling(stream), GemmCeiling(stream)};
  std::printf("ceilings: copy %.2f TB/s (read + written), read %.2f TB/s, bfloat16 product %.0f TFLOP/s\n",
              ceilings.copy * 1e-12, ceilings.read * 1e-12, ceilings.gemm * 1e-12);
  std::fflush(stdout);
  if (wanted("linear")) RunLinear(stream, ceilings);
  if (wanted("energy")) RunEnergy(stream);
  if (wanted("operations")) RunOperations(stream, ceilings);
  if (wanted("sequences")) RunSequences(stream, ceilings);
  if (wanted("step")) RunStep(stream);
  if (json != nullptr) WriteJson(json, properties, ceilings);
  return 0;
}

}  // namespace
}  // namespace dflash::bench

int main(int argc, char** argv) { return dflash::bench::Main(argc, argv); }
