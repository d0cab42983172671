// Device memory that other processes of this host can reach.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/stream.h"

namespace dflash {

// Says to another process where the memory is; goes there as bytes. Zero: no memory.
struct SharedBufferHandle {
  int64_t bytes = 0;
  uint64_t address = 0;  // in its process
  int32_t pid = 0;
  int32_t fd = -1;            // CPU: of the memory file
  uint8_t device[16] = {};    // CUDA: UUID of the device
  uint8_t exported[64] = {};  // CUDA: cudaIpcMemHandle_t
};

// Memory of this process for all. Zeroed by work that is enqueued on the stream. Movable. The CPU's comes
// from mmap, CUDA's from cudaMalloc; both aligned to 256.
class SharedBuffer {
 public:
  // ResourceExhausted: no room. Unavailable: the device cannot export memory.
  static absl::StatusOr<SharedBuffer> Allocate(int64_t bytes, const Stream& stream);
  SharedBuffer(SharedBuffer&&) noexcept;
  SharedBuffer& operator=(SharedBuffer&&) noexcept;
  ~SharedBuffer();

  void* data() const;
  const SharedBufferHandle& handle() const;

 private:
  struct Impl;  // defined by the backend
  explicit SharedBuffer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The memory behind a handle as this process and the stream's device reach it: another process's, or this
// one's own. Movable. Must go before the memory does; that of a process which is gone may still be read and
// written.
class MappedBuffer {
 public:
  // Unavailable: the process is gone, or the devices cannot reach each other.
  static absl::StatusOr<MappedBuffer> Map(const SharedBufferHandle& handle, const Stream& stream);
  MappedBuffer(MappedBuffer&&) noexcept;
  MappedBuffer& operator=(MappedBuffer&&) noexcept;
  ~MappedBuffer();

  void* data() const;

 private:
  struct Impl;  // defined by the backend
  explicit MappedBuffer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Whether both lie on one GPU, where kernels that wait for each other may not run at the same time. Never on
// the CPU.
bool ShareDevice(const SharedBufferHandle& a, const SharedBufferHandle& b);

}  // namespace dflash
