// Linear of bf16 weights on CUDA, for Linear and for operations that do more with its sums. Private to
// kernels.
#pragma once

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "base/phase.h"
#include "kernels/device/stream.h"
#include "kernels/linear/linear_cuda.h"

namespace dflash {

// The kernel of the phase, with x laid out anew where it does not begin at multiples of 16 bytes. Shapes have
// been checked; T > 0.
absl::Status CallLinear(ConstMatrixView x, const PackedWeight& weight, Phase phase, MatrixView y,
                        LinearResult result, const Stream& stream);

}  // namespace dflash
