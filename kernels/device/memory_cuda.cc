#include <cuda_runtime_api.h>

#include "base/status.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/device/memory.h"

namespace dflash {

absl::StatusOr<DeviceMemory> GetDeviceMemory(const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(CudaOf(stream).device), "cudaSetDevice"));
  size_t free = 0, total = 0;
  DFLASH_RETURN_IF_ERROR(CudaStatus(cudaMemGetInfo(&free, &total), "cudaMemGetInfo"));
  return DeviceMemory{.total = static_cast<int64_t>(total), .free = static_cast<int64_t>(free)};
}

}  // namespace dflash
