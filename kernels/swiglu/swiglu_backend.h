// What a backend provides behind swiglu.h; the arguments have been checked.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/matrix_view.h"
#include "base/phase.h"
#include "kernels/device/stream.h"
#include "kernels/linear/linear.h"

namespace dflash::backend {

absl::Status SwiGlu(ConstMatrixView gate_up, MatrixView y, const Stream& stream);
// Whether it has done the work: a backend may leave shapes to the two calls.
absl::StatusOr<bool> LinearSwiGlu(ConstMatrixView x, const LinearWeight& w, Phase phase, MatrixView gate_up,
                                  MatrixView y, const Stream& stream);
absl::Status SigmoidGate(MatrixView x, ConstMatrixView gate, const Stream& stream);

}  // namespace dflash::backend
