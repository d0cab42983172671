// What a backend provides behind causal_conv.h; the arguments have been checked, segments not (device
// memory).
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/batch/segments.h"
#include "kernels/causal_conv/causal_conv.h"
#include "kernels/device/stream.h"

namespace dflash::backend {

absl::Status CausalConv(ConstMatrixView x, ConstMatrixView w, SegmentList segments, const ConvState& state,
                        MatrixView y, const Stream& stream);
absl::Status AdvanceConvState(ConstMatrixView x, SegmentList segments, const int32_t* row_counts,
                              const ConvState& state, const Stream& stream);

}  // namespace dflash::backend
