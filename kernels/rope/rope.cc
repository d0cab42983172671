#include "kernels/rope/rope.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/device/buffer.h"
#include "kernels/device/describe.h"
#include "kernels/rope/rope_backend.h"

namespace dflash {

absl::Status ApplyRope(MatrixView x, const RopeShape& shape, SegmentList segments, const Stream& stream) {
  if (shape.head_dim < 1 || shape.rotary_dim < 2 || shape.rotary_dim % 2 != 0 ||
      shape.rotary_dim > shape.head_dim || !std::isfinite(shape.theta) || shape.theta <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("ApplyRope: head_dim ", shape.head_dim, ", rotary_dim ",
                                                   shape.rotary_dim, ", theta ", shape.theta));
  }
  if (!IsWellFormed(x) || x.dtype != ActivationDType() || x.cols % shape.head_dim != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("ApplyRope: x ", Describe(x), " with head_dim ", shape.head_dim));
  }
  if (segments.count < 0 || (segments.count > 0 && segments.data == nullptr)) {
    return absl::InvalidArgumentError("ApplyRope: no segments");
  }
  if (x.rows == 0 || x.cols == 0 || segments.count == 0) return absl::OkStatus();
  return backend::ApplyRope(x, shape, segments, stream);
}

}  // namespace dflash
