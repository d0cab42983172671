#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/kernel_image.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/device/timestamp.h"

namespace dflash {
namespace {

__global__ void RecordTimeKernel(int64_t* time) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  *time = now;
}

}  // namespace

cudaError_t FindKernels() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, RecordTimeKernel);
}

absl::Status RecordTime(int64_t* time, const Stream& stream) {
  return CudaStatus(Launch(CudaOf(stream), {.grid = Grid(1), .block = dim3(1)}, RecordTimeKernel, time),
                    "RecordTime");
}

}  // namespace dflash
