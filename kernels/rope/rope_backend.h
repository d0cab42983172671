// What a backend provides behind rope.h; the arguments have been checked.
#pragma once

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/batch/segments.h"
#include "kernels/device/stream.h"
#include "kernels/rope/rope.h"

namespace dflash::backend {

absl::Status ApplyRope(MatrixView x, const RopeShape& shape, SegmentList segments, const Stream& stream);

}  // namespace dflash::backend
