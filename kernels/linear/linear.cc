#include "kernels/linear/linear.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/describe.h"
#include "kernels/linear/linear_backend.h"

namespace dflash {

absl::StatusOr<LinearWeight> LinearWeight::Allocate(int64_t out_features, int64_t in_features, DType dtype,
                                                    const Stream& stream, LinearUse use) {
  if (out_features < 1 || in_features < 1 || out_features > INT64_MAX / 16 / in_features ||
      (use == LinearUse::kGateUp && out_features % 2 != 0)) {
    return absl::InvalidArgumentError(absl::StrCat("LinearWeight: illegal size ", out_features, "x",
                                                   in_features,
                                                   use == LinearUse::kGateUp ? " of gate and up" : ""));
  }
  LinearWeight weight;
  weight.out_features_ = out_features;
  weight.in_features_ = in_features;
  weight.dtype_ = dtype;
  weight.use_ = use;
  DFLASH_ASSIGN_OR_RETURN(const int64_t bytes, backend::PackedLinearBytes(out_features, in_features, dtype));
  DFLASH_ASSIGN_OR_RETURN(weight.packed_, Buffer::Allocate(bytes, stream));
  return weight;
}

absl::Status LinearWeight::PackRows(ConstMatrixView rows, int64_t first_output, const Stream& stream) {
  if (!IsWellFormed(rows) || rows.cols != in_features_ || rows.dtype != dtype_ || first_output < 0 ||
      first_output > out_features_ - rows.rows) {
    return absl::InvalidArgumentError(absl::StrCat("LinearWeight: rows ", Describe(rows), " at output ",
                                                   first_output, " of ", out_features_, "x", in_features_,
                                                   " ", Name(dtype_)));
  }
  if (rows.rows == 0) return absl::OkStatus();
  return backend::PackRows(rows, first_output, *this, stream);
}

absl::StatusOr<LinearWeight> LinearWeight::Pack(const std::vector<ConstMatrixView>& parts,
                                                const Stream& stream, LinearUse use) {
  if (parts.empty()) return absl::InvalidArgumentError("LinearWeight: no matrices");
  int64_t out_features = 0;
  for (const ConstMatrixView& part : parts) {
    if (!IsWellFormed(part) || part.rows < 1 || part.cols < 1) {
      return absl::InvalidArgumentError(absl::StrCat("LinearWeight: illegal matrix ", Describe(part)));
    }
    if (part.cols != parts[0].cols || part.dtype != parts[0].dtype) {
      return absl::InvalidArgumentError(
          absl::StrCat("LinearWeight: ", Describe(part), " cannot be stacked under ", Describe(parts[0])));
    }
    if (part.rows > INT64_MAX / 16 / part.cols - out_features) {
      return absl::InvalidArgumentError("LinearWeight: the stacked matrices are too large");
    }
    out_features += part.rows;
  }
  DFLASH_ASSIGN_OR_RETURN(LinearWeight weight,
                          Allocate(out_features, parts[0].cols, parts[0].dtype, stream, use));
  int64_t first_output = 0;
  for (const ConstMatrixView& part : parts) {
    DFLASH_RETURN_IF_ERROR(backend::PackHostRows(part, first_output, weight, stream));
    first_output += part.rows;
  }
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
