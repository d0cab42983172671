// What a backend provides behind rope.h; the arguments have been checked.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/matrix_view.h"
#include "kernels/batch/segments.h"
#include "kernels/device/stream.h"
#include "kernels/rope/rope.h"

namespace dflash::backend {

absl::Status ApplyRope(MatrixView x, const RopeShape& shape, SegmentList segments, const Stream& stream);
// Whether it has done the work: a backend may leave shapes to the four calls.
absl::StatusOr<bool> NormAndRope(MatrixView q, ConstMatrixView q_weight, MatrixView k,
                                 ConstMatrixView k_weight, NormWeight weight, float eps,
                                 const RopeShape& shape, SegmentList segments, const Stream& stream);

}  // namespace dflash::backend
