#include "kernels/swiglu/swiglu.h"

#include "absl/strings/str_cat.h"
#include "kernels/device/buffer.h"
#include "kernels/device/describe.h"
#include "kernels/swiglu/swiglu_backend.h"

namespace dflash {

absl::Status SwiGlu(ConstMatrixView gate_up, MatrixView y, const Stream& stream) {
  if (!IsWellFormed(gate_up) || !IsWellFormed(y) || gate_up.rows != y.rows || gate_up.cols % 2 != 0 ||
      gate_up.cols / 2 != y.cols || gate_up.dtype != ActivationDType() || y.dtype != ActivationDType()) {
    return absl::InvalidArgumentError(
        absl::StrCat("SwiGlu: gate_up ", Describe(gate_up), ", y ", Describe(y)));
  }
  if (y.rows == 0 || y.cols == 0) return absl::OkStatus();
  return backend::SwiGlu(gate_up, y, stream);
}

absl::Status SigmoidGate(MatrixView x, ConstMatrixView gate, const Stream& stream) {
  if (!IsWellFormed(x) || !IsWellFormed(gate) || x.rows != gate.rows || x.cols != gate.cols ||
      x.dtype != ActivationDType() || gate.dtype != ActivationDType()) {
    return absl::InvalidArgumentError(
        absl::StrCat("SigmoidGate: x ", Describe(x), ", gate ", Describe(gate)));
  }
  if (x.rows == 0 || x.cols == 0) return absl::OkStatus();
  return backend::SigmoidGate(x, gate, stream);
}

}  // namespace dflash
