// Weights that nobody trained, made where they are needed: for shapes without a checkpoint.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"
#include "kernels/random_weights/random_element.h"

namespace dflash {

// Fills y with a block of a tensor seen as a matrix with `tensor_cols` columns:
//   y[r, c] = element (first_row + r) * tensor_cols + first_col + c of `tensor` (random_element.h)
// y: bf16 or f32 [R, C], device memory; first_row, first_col >= 0, first_col + C <= tensor_cols. The same
// bits on every backend and for every cut into blocks. Errors: InvalidArgument when the block is not inside
// the tensor. Source: docs/spec/random-weights.md.
absl::Status FillRandom(const RandomTensor& tensor, int64_t tensor_cols, int64_t first_row, int64_t first_col,
                        MatrixView y, const Stream& stream);

}  // namespace dflash
