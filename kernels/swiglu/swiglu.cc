#include "kernels/swiglu/swiglu.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"
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

absl::Status LinearSwiGlu(ConstMatrixView x, const LinearWeight& w, Phase phase, MatrixView gate_up,
                          MatrixView y, const Stream& stream) {
  const DType activation = ActivationDType();
  if (!IsWellFormed(x) || !IsWellFormed(gate_up) || !IsWellFormed(y) || x.cols != w.in_features() ||
      gate_up.cols != w.out_features() || gate_up.cols % 2 != 0 || y.cols != gate_up.cols / 2 ||
      x.rows != y.rows || gate_up.rows != y.rows || x.dtype != activation || gate_up.dtype != activation ||
      y.dtype != activation) {
    return absl::InvalidArgumentError(absl::StrCat("LinearSwiGlu: x ", Describe(x), ", W ", w.out_features(),
                                                   "x", w.in_features(), ", gate_up ", Describe(gate_up),
                                                   ", y ", Describe(y)));
  }
  if (y.rows == 0) return absl::OkStatus();
  DFLASH_ASSIGN_OR_RETURN(const bool done, backend::LinearSwiGlu(x, w, phase, gate_up, y, stream));
  if (done) return absl::OkStatus();
  DFLASH_RETURN_IF_ERROR(Linear(x, w, phase, gate_up, stream));
  return SwiGlu(gate_up, y, stream);
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
