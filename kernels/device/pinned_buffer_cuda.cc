#include <cuda_runtime_api.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/device/pinned_buffer.h"

namespace dflash {

absl::StatusOr<PinnedBuffer> PinnedBuffer::Allocate(int64_t bytes, const Stream& stream) {
  if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("cannot allocate ", bytes, " bytes"));
  if (bytes == 0) return PinnedBuffer();
  DFLASH_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(CudaOf(stream).device), "cudaSetDevice"));
  void* data = nullptr;
  DFLASH_RETURN_IF_ERROR(CudaAllocationStatus(
      cudaHostAlloc(&data, static_cast<size_t>(bytes), cudaHostAllocDefault), "pinned host memory", bytes));
  std::memset(data, 0, static_cast<size_t>(bytes));
  return PinnedBuffer(data, bytes);
}

PinnedBuffer::~PinnedBuffer() {
  if (data_ != nullptr) (void)cudaFreeHost(data_);  // nowhere to report to
}

absl::Status CopyToPinned(const PinnedBuffer& to, const void* device, int64_t bytes, const Stream& stream) {
  if (bytes < 0 || bytes > to.bytes()) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot copy ", bytes, " bytes to a pinned buffer of ", to.bytes()));
  }
  if (bytes == 0) return absl::OkStatus();
  return CudaStatus(cudaMemcpyAsync(to.data(), device, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost,
                                    CudaOf(stream).stream),
                    "copy to pinned memory");
}

}  // namespace dflash
