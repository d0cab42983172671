#include "kernels/rms_norm/rms_norm.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/buffer.h"
#include "kernels/device/describe.h"
#include "kernels/rms_norm/rms_norm_backend.h"

namespace dflash {
namespace {

// `other` is the second matrix of x's shape (delta, z); x itself where there is none.
absl::Status Check(const char* operation, ConstMatrixView x, ConstMatrixView other, ConstMatrixView w,
                   float eps, ConstMatrixView y) {
  const auto like_x = [&](const ConstMatrixView& view) {
    return IsWellFormed(view) && view.rows == x.rows && view.cols == x.cols &&
           view.dtype == ActivationDType();
  };
  if (!like_x(x) || !like_x(other) || !like_x(y) || !IsWellFormed(w) || w.rows != 1 || w.cols < 1 ||
      x.cols % w.cols != 0) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": x ", Describe(x), ", with it ",
                                                   Describe(other), ", w ", Describe(w), ", y ",
                                                   Describe(y)));
  }
  if (!(eps > 0)) return absl::InvalidArgumentError(absl::StrCat(operation, ": eps is ", eps));
  return absl::OkStatus();
}

}  // namespace

absl::Status RmsNorm(ConstMatrixView x, ConstMatrixView w, NormWeight weight, float eps, MatrixView y,
                     const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(Check("RmsNorm", x, x, w, eps, y));
  if (x.rows == 0 || x.cols == 0) return absl::OkStatus();
  return backend::RmsNorm(x, w, weight, eps, y, stream);
}

absl::Status AddRmsNorm(MatrixView residual, ConstMatrixView delta, ConstMatrixView w, NormWeight weight,
                        float eps, MatrixView y, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(Check("AddRmsNorm", residual, delta, w, eps, y));
  if (residual.cols != w.cols) {
    return absl::InvalidArgumentError(
        absl::StrCat("AddRmsNorm: residual ", Describe(residual), ", w ", Describe(w)));
  }
  if (residual.rows == 0) return absl::OkStatus();
  return backend::AddRmsNorm(residual, delta, w, weight, eps, y, stream);
}

absl::Status GatedRmsNorm(ConstMatrixView x, ConstMatrixView w, ConstMatrixView z, GateActivation gate,
                          float eps, MatrixView y, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(Check("GatedRmsNorm", x, z, w, eps, y));
  if (x.rows == 0 || x.cols == 0) return absl::OkStatus();
  return backend::GatedRmsNorm(x, w, z, gate, eps, y, stream);
}

}  // namespace dflash
