#include "kernels/linear/linear.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/describe.h"
#include "kernels/linear/linear_backend.h"

namespace dflash {

absl::StatusOr<LinearWeight> LinearWeight::Pack(const std::vector<ConstMatrixView>& parts,
                                                const Stream& stream) {
  if (parts.empty()) return absl::InvalidArgumentError("LinearWeight: no matrices");
  LinearWeight weight;
  weight.in_features_ = parts[0].cols;
  weight.dtype_ = parts[0].dtype;
  for (const ConstMatrixView& part : parts) {
    if (!IsWellFormed(part) || part.rows < 1 || part.cols < 1) {
      return absl::InvalidArgumentError(absl::StrCat("LinearWeight: illegal matrix ", Describe(part)));
    }
    if (part.cols != weight.in_features_ || part.dtype != weight.dtype_) {
      return absl::InvalidArgumentError(
          absl::StrCat("LinearWeight: ", Describe(part), " cannot be stacked under ", Describe(parts[0])));
    }
    if (part.rows > INT64_MAX / 16 / part.cols - weight.out_features_) {
      return absl::InvalidArgumentError("LinearWeight: the stacked matrices are too large");
    }
    weight.out_features_ += part.rows;
  }
  DFLASH_ASSIGN_OR_RETURN(
      weight.packed_, backend::PackLinearWeight(parts, weight.out_features_, weight.in_features_, stream));
  return weight;
}

absl::Status Linear(ConstMatrixView x, const LinearWeight& w, Phase phase, MatrixView y,
                    const Stream& stream) {
  if (!IsWellFormed(x) || !IsWellFormed(y) || x.cols != w.in_features() || y.cols != w.out_features() ||
      x.rows != y.rows) {
    return absl::InvalidArgumentError(absl::StrCat("Linear: x ", Describe(x), ", W ", w.out_features(), "x",
                                                   w.in_features(), ", y ", Describe(y)));
  }
  if (x.dtype != ActivationDType() || (y.dtype != ActivationDType() && y.dtype != DType::kF32)) {
    return absl::InvalidArgumentError(absl::StrCat("Linear: x is ", Name(x.dtype), ", y is ", Name(y.dtype)));
  }
  if (x.rows == 0) return absl::OkStatus();
  return backend::Linear(x, w, phase, y, stream);
}

}  // namespace dflash
