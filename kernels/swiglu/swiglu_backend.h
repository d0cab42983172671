// What a backend provides behind swiglu.h; the arguments have been checked.
#pragma once

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"

namespace dflash::backend {

absl::Status SwiGlu(ConstMatrixView gate_up, MatrixView y, const Stream& stream);
absl::Status SigmoidGate(MatrixView x, ConstMatrixView gate, const Stream& stream);

}  // namespace dflash::backend
