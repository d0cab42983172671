// Test support: matrices in device memory that notice what an operation must not do. Works with every
// backend.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "base/check.h"
#include "gtest/gtest.h"
#include "kernels/device/buffer.h"
#include "kernels/device/stream.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {

// A matrix in device memory with guard bytes before and after it and between its rows. On the CPU it ends
// with its heap block when it is an input, so that the address sanitizer sees a read past its end.
class DeviceMatrix {
 public:
  // Rows are `cols + extra_stride` elements apart.
  template <typename T>
  static DeviceMatrix Input(const HostMatrix<T>& host, const Stream& stream, int64_t extra_stride = 0) {
    return DeviceMatrix(host.view(), /*tail_guard=*/0, extra_stride, stream);
  }
  // Activations: `host` rounded to the backend's activation dtype.
  static DeviceMatrix Activations(const HostMatrix<float>& host, const Stream& stream,
                                  int64_t extra_stride = 0) {
    if (ActivationDType() == DType::kF32) return Input(host, stream, extra_stride);
    return Input(Converted<bf16>(host), stream, extra_stride);
  }
  // For operations that write in place.
  static DeviceMatrix InOut(const HostMatrix<float>& host, const Stream& stream, int64_t extra_stride = 0) {
    if (ActivationDType() == DType::kF32) return DeviceMatrix(host.view(), kGuard, extra_stride, stream);
    return DeviceMatrix(Converted<bf16>(host).view(), kGuard, extra_stride, stream);
  }
  // Every element holds the guard pattern (a NaN) until it is written.
  static DeviceMatrix Output(int64_t rows, int64_t cols, DType dtype, const Stream& stream,
                             int64_t extra_stride = 0) {
    return DeviceMatrix(ConstMatrixView(nullptr, dtype, rows, cols, cols), kGuard, extra_stride, stream);
  }

  MatrixView view() const { return view_; }

  // Waits for the stream; widened to float32.
  HostMatrix<float> ToHost() const {
    const std::vector<uint8_t> bytes = Bytes();
    HostMatrix<float> host(view_.rows, view_.cols);
    for (int64_t row = 0; row < view_.rows; ++row) {
      for (int64_t col = 0; col < view_.cols; ++col) {
        const uint8_t* element = bytes.data() + kGuard + Offset(row, col);
        if (view_.dtype == DType::kF32) {
          std::memcpy(&host.At(row, col), element, sizeof(float));
        } else {
          bf16 value;
          std::memcpy(&value, element, sizeof(value));
          host.At(row, col) = static_cast<float>(value);
        }
      }
    }
    return host;
  }

  // That no byte around the elements has changed.
  ::testing::AssertionResult GuardsIntact() const {
    std::vector<uint8_t> bytes = Bytes();
    for (int64_t row = 0; row < view_.rows; ++row) {
      std::memset(bytes.data() + kGuard + Offset(row, 0), kPattern,
                  static_cast<size_t>(view_.cols * SizeOf(view_.dtype)));
    }
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (bytes[i] != kPattern) {
        return ::testing::AssertionFailure()
               << "byte " << static_cast<int64_t>(i) - kGuard << " (0 = start of the matrix) was overwritten";
      }
    }
    return ::testing::AssertionSuccess();
  }

 private:
  static constexpr int64_t kGuard = 256;
  static constexpr uint8_t kPattern = 0xff;

  DeviceMatrix(ConstMatrixView host, int64_t tail_guard, int64_t extra_stride, const Stream& stream)
      : stream_(&stream), view_(nullptr, host.dtype, host.rows, host.cols, host.cols + extra_stride) {
    const int64_t end = host.rows == 0 ? 0 : Offset(host.rows - 1, host.cols);
    std::vector<uint8_t> bytes(static_cast<size_t>(kGuard + end + tail_guard), kPattern);
    if (host.data != nullptr) {
      for (int64_t row = 0; row < host.rows; ++row) {
        std::memcpy(bytes.data() + kGuard + Offset(row, 0),
                    static_cast<const uint8_t*>(host.data) + row * host.row_stride * SizeOf(host.dtype),
                    static_cast<size_t>(host.cols * SizeOf(host.dtype)));
      }
    }
    size_ = static_cast<int64_t>(bytes.size());
    if (std::strcmp(BackendName(), "cpu") == 0) {
      heap_ = std::move(bytes);
      view_.data = heap_.data() + kGuard;
      return;
    }
    auto buffer = Buffer::Allocate(size_, stream);
    DFLASH_CHECK(buffer.ok());
    buffer_ = std::move(*buffer);
    DFLASH_CHECK(CopyToDevice(buffer_.data(), bytes.data(), size_, stream).ok());
    DFLASH_CHECK(stream.Synchronize().ok());
    view_.data = buffer_.As<uint8_t>() + kGuard;
  }

  int64_t Offset(int64_t row, int64_t col) const {
    return (row * view_.row_stride + col) * SizeOf(view_.dtype);
  }

  std::vector<uint8_t> Bytes() const {
    DFLASH_CHECK(stream_->Synchronize().ok());
    std::vector<uint8_t> bytes(static_cast<size_t>(size_));
    DFLASH_CHECK(CopyToHost(bytes.data(), static_cast<uint8_t*>(view_.data) - kGuard, size_, *stream_).ok());
    return bytes;
  }

  const Stream* stream_;
  MatrixView view_;
  int64_t size_ = 0;
  std::vector<uint8_t> heap_;
  Buffer buffer_;
};

// An array in device memory (ids, segments, tables, states). On the CPU it ends with its heap block;
// elsewhere guard bytes lie around it, and a test fails in which they have changed when it dies.
template <typename T>
class DeviceArray {
 public:
  DeviceArray(std::vector<T> values, const Stream& stream) : values_(std::move(values)), stream_(&stream) {
    if (std::strcmp(BackendName(), "cpu") == 0) return;
    auto buffer = Buffer::Allocate(Bytes() + 2 * kGuard, stream);
    DFLASH_CHECK(buffer.ok());
    buffer_ = std::move(*buffer);
    for (int64_t guard : {int64_t{0}, kGuard + Bytes()}) {
      DFLASH_CHECK(CopyToDevice(buffer_.template As<uint8_t>() + guard, Guard().data(), kGuard, stream).ok());
    }
    DFLASH_CHECK(CopyToDevice(data(), values_.data(), Bytes(), stream).ok());
    DFLASH_CHECK(stream.Synchronize().ok());
  }
  DeviceArray(DeviceArray&&) noexcept = default;
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(values_, other.values_);
    std::swap(stream_, other.stream_);
    std::swap(buffer_, other.buffer_);
    return *this;
  }
  ~DeviceArray() {
    if (buffer_.data() == nullptr || !stream_->Synchronize().ok()) return;
    for (int64_t guard : {int64_t{0}, kGuard + Bytes()}) {
      std::vector<uint8_t> bytes(kGuard);
      if (!CopyToHost(bytes.data(), buffer_.template As<uint8_t>() + guard, kGuard, *stream_).ok()) return;
      EXPECT_EQ(bytes, Guard()) << (guard == 0 ? "before" : "behind") << " an array of " << values_.size();
    }
  }
  T* data() {
    return buffer_.data() == nullptr ? values_.data()
                                     : reinterpret_cast<T*>(buffer_.template As<uint8_t>() + kGuard);
  }
  int64_t size() const { return static_cast<int64_t>(values_.size()); }
  // Waits for the stream.
  std::vector<T> ToHost() {
    DFLASH_CHECK(stream_->Synchronize().ok());
    std::vector<T> host(values_.size());
    DFLASH_CHECK(CopyToHost(host.data(), data(), Bytes(), *stream_).ok());
    return host;
  }

 private:
  static constexpr int64_t kGuard = 256;
  static std::vector<uint8_t> Guard() { return std::vector<uint8_t>(kGuard, 0xa5); }
  int64_t Bytes() const { return size() * static_cast<int64_t>(sizeof(T)); }

  std::vector<T> values_;
  const Stream* stream_;
  Buffer buffer_;
};

}  // namespace dflash
