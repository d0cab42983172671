// What a backend provides behind rms_norm.h; the arguments have been checked.
#pragma once

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"
#include "kernels/rms_norm/rms_norm.h"

namespace dflash::backend {

absl::Status RmsNorm(ConstMatrixView x, ConstMatrixView w, NormWeight weight, float eps, MatrixView y,
                     const Stream& stream);
absl::Status AddRmsNorm(MatrixView residual, ConstMatrixView delta, ConstMatrixView w, NormWeight weight,
                        float eps, MatrixView y, const Stream& stream);
absl::Status GatedRmsNorm(ConstMatrixView x, ConstMatrixView w, ConstMatrixView z, GateActivation gate,
                          float eps, MatrixView y, const Stream& stream);

}  // namespace dflash::backend
