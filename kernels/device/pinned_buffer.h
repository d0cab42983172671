// Host memory that the device writes to while the host goes on.
#pragma once

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/stream.h"

namespace dflash {

// Owns host memory that a GPU copies to and from without staging. Zeroed, aligned to 64. Movable. On the CPU
// it is memory like any other.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  // ResourceExhausted with the byte count, InvalidArgument for a negative size.
  static absl::StatusOr<PinnedBuffer> Allocate(int64_t bytes, const Stream& stream);
  PinnedBuffer(PinnedBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~PinnedBuffer();

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  template <typename T>
  T* As() const {
    return static_cast<T*>(data_);
  }

 private:
  PinnedBuffer(void* data, int64_t bytes) : data_(data), bytes_(bytes) {}
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Enqueues a copy from device to pinned memory and returns; the bytes are there once an event recorded
// afterwards is reached.
absl::Status CopyToPinned(const PinnedBuffer& to, const void* device, int64_t bytes, const Stream& stream);

}  // namespace dflash
