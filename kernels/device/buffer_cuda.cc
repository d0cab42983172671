#include <cuda_runtime_api.h>

#include <atomic>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/buffer.h"
#include "kernels/device/cuda/copy_rows.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/stream_cuda.h"

namespace dflash {
namespace {

std::atomic<int64_t> allocated_bytes{0};

}  // namespace

absl::StatusOr<Buffer> Buffer::Allocate(int64_t bytes, const Stream& stream) {
  if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("cannot allocate ", bytes, " bytes"));
  if (bytes == 0) return Buffer();
  const CudaContext& context = CudaOf(stream);
  DFLASH_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(context.device), "cudaSetDevice"));
  void* data = nullptr;
  DFLASH_RETURN_IF_ERROR(
      CudaAllocationStatus(cudaMalloc(&data, static_cast<size_t>(bytes)), "device memory", bytes));
  Buffer buffer(data, bytes);
  allocated_bytes += bytes;
  DFLASH_RETURN_IF_ERROR(ZeroFill(data, bytes, stream));
  return buffer;
}

Buffer::~Buffer() {
  if (data_ == nullptr) return;
  allocated_bytes -= bytes_;
  (void)cudaFree(data_);  // nowhere to report to
}

absl::Status CopyToDevice(void* device, const void* host, int64_t bytes, const Stream& stream) {
  if (bytes <= 0) return absl::OkStatus();
  return CudaStatus(cudaMemcpyAsync(device, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice,
                                    CudaOf(stream).stream),
                    "copy to the device");
}

absl::Status CopyToHost(void* host, const void* device, int64_t bytes, const Stream& stream) {
  if (bytes <= 0) return absl::OkStatus();
  DFLASH_RETURN_IF_ERROR(CudaStatus(cudaMemcpyAsync(host, device, static_cast<size_t>(bytes),
                                                    cudaMemcpyDeviceToHost, CudaOf(stream).stream),
                                    "copy to the host"));
  return stream.Synchronize();
}

absl::Status CopyRows(ConstMatrixView from, MatrixView to, const Stream& stream) {
  if (from.rows != to.rows || from.cols != to.cols || from.dtype != to.dtype) {
    return absl::InvalidArgumentError(absl::StrCat("CopyRows: ", from.rows, "x", from.cols, " ",
                                                   Name(from.dtype), " into ", to.rows, "x", to.cols, " ",
                                                   Name(to.dtype)));
  }
  if (from.rows == 0 || from.cols == 0) return absl::OkStatus();
  return CudaStatus(LaunchCopyRows(from, to, CudaOf(stream)), "CopyRows");
}

absl::Status ZeroFill(void* device, int64_t bytes, const Stream& stream) {
  if (bytes <= 0) return absl::OkStatus();
  return CudaStatus(cudaMemsetAsync(device, 0, static_cast<size_t>(bytes), CudaOf(stream).stream),
                    "filling with zeros");
}

int64_t AllocatedDeviceBytes() { return allocated_bytes; }

absl::StatusOr<int64_t> FreeDeviceBytes(const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(CudaOf(stream).device), "cudaSetDevice"));
  size_t free = 0, total = 0;
  DFLASH_RETURN_IF_ERROR(CudaStatus(cudaMemGetInfo(&free, &total), "cudaMemGetInfo"));
  return static_cast<int64_t>(free);
}

DType ActivationDType() { return DType::kBf16; }

}  // namespace dflash
