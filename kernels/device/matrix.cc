#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/buffer.h"

namespace dflash {

absl::StatusOr<Matrix> Matrix::Allocate(int64_t rows, int64_t cols, DType dtype, const Stream& stream) {
  if (rows < 0 || cols < 0 || (cols > 0 && rows > INT64_MAX / SizeOf(dtype) / cols)) {
    return absl::InvalidArgumentError(absl::StrCat("illegal matrix shape ", rows, "x", cols));
  }
  Matrix matrix;
  DFLASH_ASSIGN_OR_RETURN(matrix.buffer_, Buffer::Allocate(rows * cols * SizeOf(dtype), stream));
  matrix.view_ = MatrixView(matrix.buffer_.data(), dtype, rows, cols, cols);
  return matrix;
}

}  // namespace dflash
