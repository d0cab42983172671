// What a backend provides behind random_weights.h; the arguments have been checked.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"
#include "kernels/random_weights/random_element.h"

namespace dflash::backend {

absl::Status FillRandom(const RandomTensor& tensor, int64_t tensor_cols, int64_t first_row, int64_t first_col,
                        MatrixView y, const Stream& stream);

}  // namespace dflash::backend
