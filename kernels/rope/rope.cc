#include "kernels/rope/rope.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/buffer.h"
#include "kernels/device/describe.h"
#include "kernels/rope/rope_backend.h"

namespace dflash {

namespace {

absl::Status CheckRope(const char* operation, const MatrixView& x, const RopeShape& shape,
                       SegmentList segments) {
  if (shape.head_dim < 1 || shape.rotary_dim < 2 || shape.rotary_dim % 2 != 0 ||
      shape.rotary_dim > shape.head_dim || !std::isfinite(shape.theta) || shape.theta <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": head_dim ", shape.head_dim, ", rotary_dim ",
                                                   shape.rotary_dim, ", theta ", shape.theta));
  }
  if (!IsWellFormed(x) || x.dtype != ActivationDType() || x.cols % shape.head_dim != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(operation, ": x ", Describe(x), " with head_dim ", shape.head_dim));
  }
  if (segments.count < 0 || (segments.count > 0 && segments.data == nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": no segments"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ApplyRope(MatrixView x, const RopeShape& shape, SegmentList segments, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckRope("ApplyRope", x, shape, segments));
  if (x.rows == 0 || x.cols == 0 || segments.count == 0) return absl::OkStatus();
  return backend::ApplyRope(x, shape, segments, stream);
}

absl::Status NormAndRope(MatrixView q, ConstMatrixView q_weight, MatrixView k, ConstMatrixView k_weight,
                         NormWeight weight, float eps, const RopeShape& shape, SegmentList segments,
                         const Stream& stream) {
  for (const auto& [x, w] : {std::pair(q, q_weight), {k, k_weight}}) {
    DFLASH_RETURN_IF_ERROR(CheckRope("NormAndRope", x, shape, segments));
    if (x.rows != k.rows || !IsWellFormed(w) || w.rows != 1 || w.cols != shape.head_dim || !(eps > 0) ||
        (w.dtype != DType::kBf16 && w.dtype != DType::kF32)) {
      return absl::InvalidArgumentError(absl::StrCat("NormAndRope: x ", Describe(x), " of ", k.rows,
                                                     " rows, weight ", Describe(w), " for head_dim ",
                                                     shape.head_dim, ", eps ", eps));
    }
  }
  if (k.rows == 0) return absl::OkStatus();
  if (k.cols > 0 && segments.count > 0) {
    DFLASH_ASSIGN_OR_RETURN(const bool done, backend::NormAndRope(q, q_weight, k, k_weight, weight, eps,
                                                                  shape, segments, stream));
    if (done) return absl::OkStatus();
  }
  for (const auto& [x, w] : {std::pair(q, q_weight), {k, k_weight}}) {
    if (x.cols == 0) continue;
    DFLASH_RETURN_IF_ERROR(RmsNorm(x, w, weight, eps, x, stream));
    DFLASH_RETURN_IF_ERROR(ApplyRope(x, shape, segments, stream));
  }
  return absl::OkStatus();
}

}  // namespace dflash
