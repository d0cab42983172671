// A tensor in host memory that somebody owns: what a checkpoint hands out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "absl/status/statusor.h"
#include "base/dtype.h"
#include "base/matrix_view.h"

namespace dflash {

// A dense row-major matrix, aligned to 64 bytes. Movable, not copyable.
class HostTensor {
 public:
  // ResourceExhausted, with the number of bytes, when there is no memory. rows, cols >= 0.
  static absl::StatusOr<HostTensor> Allocate(DType dtype, int64_t rows, int64_t cols);

  ConstMatrixView view() const { return ConstMatrixView(data_.get(), dtype_, rows_, cols_, cols_); }
  std::byte* data() { return data_.get(); }
  int64_t bytes() const { return rows_ * cols_ * SizeOf(dtype_); }
  DType dtype() const { return dtype_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(std::byte* data) const { operator delete[](data, kAlignment); }
  };
  HostTensor(DType dtype, int64_t rows, int64_t cols, std::byte* data)
      : dtype_(dtype), rows_(rows), cols_(cols), data_(data) {}

  DType dtype_;
  int64_t rows_;
  int64_t cols_;
  std::unique_ptr<std::byte[], Free> data_;
};

}  // namespace dflash
