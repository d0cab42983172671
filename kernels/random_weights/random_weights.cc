#include "kernels/random_weights/random_weights.h"

#include "absl/strings/str_cat.h"
#include "kernels/device/describe.h"
#include "kernels/random_weights/random_weights_backend.h"

namespace dflash {

absl::Status FillRandom(const RandomTensor& tensor, int64_t tensor_cols, int64_t first_row, int64_t first_col,
                        MatrixView y, const Stream& stream) {
  if (!IsWellFormed(y) || first_row < 0 || first_col < 0 || first_col > tensor_cols - y.cols) {
    return absl::InvalidArgumentError(absl::StrCat("FillRandom: a block ", Describe(y), " at row ", first_row,
                                                   ", column ", first_col, " of ", tensor_cols, " columns"));
  }
  if (y.rows == 0 || y.cols == 0) return absl::OkStatus();
  return backend::FillRandom(tensor, tensor_cols, first_row, first_col, y, stream);
}

}  // namespace dflash
