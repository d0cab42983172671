#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/buffer.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/device/shared_buffer.h"

namespace dflash {
namespace {

// Whatever the reason is: this memory cannot be shared, and whoever asked goes on without.
absl::Status CannotShare(cudaError_t result, const char* what) {
  const absl::Status status = CudaStatus(result, what);
  return status.ok() ? status : absl::UnavailableError(std::string(status.message()));
}

}  // namespace

struct SharedBuffer::Impl {
  Buffer buffer;
  SharedBufferHandle handle;
};

struct MappedBuffer::Impl {
  void* data = nullptr;
  bool is_mapping = false;  // of another process's memory
  ~Impl() {
    if (is_mapping) (void)cudaIpcCloseMemHandle(data);  // nowhere to report to
  }
};

// An allocation of its own: of what shares a block of the driver's, the handle would name the block.
absl::StatusOr<SharedBuffer> SharedBuffer::Allocate(int64_t bytes, const Stream& stream) {
  auto impl = std::make_unique<Impl>();
  DFLASH_ASSIGN_OR_RETURN(impl->buffer, Buffer::Allocate(bytes, stream));
  SharedBufferHandle& handle = impl->handle;
  static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(handle.exported));
  static_assert(sizeof(cudaUUID_t) == sizeof(handle.device));
  cudaIpcMemHandle_t exported;
  DFLASH_RETURN_IF_ERROR(
      CannotShare(cudaIpcGetMemHandle(&exported, impl->buffer.data()), "cudaIpcGetMemHandle"));
  std::memcpy(handle.exported, &exported, sizeof(exported));
  cudaDeviceProp properties;
  DFLASH_RETURN_IF_ERROR(
      CudaStatus(cudaGetDeviceProperties(&properties, CudaOf(stream).device), "cudaGetDeviceProperties"));
  std::memcpy(handle.device, &properties.uuid, sizeof(handle.device));
  handle.bytes = bytes;
  handle.address = reinterpret_cast<uint64_t>(impl->buffer.data());
  handle.pid = getpid();
  return SharedBuffer(std::move(impl));
}

absl::StatusOr<MappedBuffer> MappedBuffer::Map(const SharedBufferHandle& handle, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(CudaOf(stream).device), "cudaSetDevice"));
  auto impl = std::make_unique<Impl>();
  if (handle.pid == getpid()) {
    // A process cannot open its own handles, and need not on the same device.
    cudaDeviceProp properties;
    DFLASH_RETURN_IF_ERROR(
        CudaStatus(cudaGetDeviceProperties(&properties, CudaOf(stream).device), "cudaGetDeviceProperties"));
    if (std::memcmp(handle.device, &properties.uuid, sizeof(handle.device)) != 0)
      return absl::UnavailableError("memory of one process on several devices is not mapped");
    impl->data = reinterpret_cast<void*>(handle.address);
    return MappedBuffer(std::move(impl));
  }
  cudaIpcMemHandle_t exported;
  std::memcpy(&exported, handle.exported, sizeof(exported));
  DFLASH_RETURN_IF_ERROR(CannotShare(
      cudaIpcOpenMemHandle(&impl->data, exported, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle"));
  impl->is_mapping = true;
  return MappedBuffer(std::move(impl));
}

bool ShareDevice(const SharedBufferHandle& a, const SharedBufferHandle& b) {
  return std::memcmp(a.device, b.device, sizeof(a.device)) == 0;
}

void* SharedBuffer::data() const { return impl_->buffer.data(); }
const SharedBufferHandle& SharedBuffer::handle() const { return impl_->handle; }
void* MappedBuffer::data() const { return impl_->data; }

SharedBuffer::SharedBuffer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SharedBuffer::SharedBuffer(SharedBuffer&&) noexcept = default;
SharedBuffer& SharedBuffer::operator=(SharedBuffer&&) noexcept = default;
SharedBuffer::~SharedBuffer() = default;
MappedBuffer::MappedBuffer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MappedBuffer::MappedBuffer(MappedBuffer&&) noexcept = default;
MappedBuffer& MappedBuffer::operator=(MappedBuffer&&) noexcept = default;
MappedBuffer::~MappedBuffer() = default;

}  // namespace dflash
