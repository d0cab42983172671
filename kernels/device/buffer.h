// Owned device memory and the copies in and out of it.
#pragma once

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"

namespace dflash {

// Owns `bytes` bytes of device memory, aligned to 256, zeroed at allocation. Movable, not copyable.
class Buffer {
 public:
  Buffer() = default;
  // ResourceExhausted (with the byte count) when the device has no room; InvalidArgument for a negative size.
  static absl::StatusOr<Buffer> Allocate(int64_t bytes, const Stream& stream);
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer();

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  template <typename T>
  T* As() const {
    return static_cast<T*>(data_);
  }

 private:
  Buffer(void* data, int64_t bytes) : data_(data), bytes_(bytes) {}
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

// A buffer seen as a dense row-major matrix.
class Matrix {
 public:
  Matrix() = default;
  static absl::StatusOr<Matrix> Allocate(int64_t rows, int64_t cols, DType dtype, const Stream& stream);
  MatrixView view() const { return view_; }
  // The first `rows` rows.
  MatrixView Rows(int64_t rows) const { return view_.Rows(0, rows); }

 private:
  Buffer buffer_;
  MatrixView view_;
};

// Copies between host and device; on return of CopyToHost (and of CopyToDevice from pageable memory) the host
// side may be reused. On the CPU both are memcpy.
absl::Status CopyToDevice(void* device, const void* host, int64_t bytes, const Stream& stream);
absl::Status CopyToHost(void* host, const void* device, int64_t bytes, const Stream& stream);
// Copies rows of equal dtype and shape inside the device; the views may have different strides and must not
// overlap.
absl::Status CopyRows(ConstMatrixView from, MatrixView to, const Stream& stream);
absl::Status ZeroFill(void* device, int64_t bytes, const Stream& stream);

// Bytes in all Buffers of this process, over all devices.
int64_t AllocatedDeviceBytes();
// Bytes that Allocate may still get from the stream's device. The CPU backend does not know: zeroed memory
// takes no room until it is used; it answers INT64_MAX.
absl::StatusOr<int64_t> FreeDeviceBytes(const Stream& stream);

// The element type of activations, key/value pages and conv inputs in this backend: F32 on the CPU, BF16 on
// CUDA.
DType ActivationDType();

}  // namespace dflash
