// What a backend provides behind causal_conv.h; the arguments have been checked, segments not (device
// memory).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/batch/segments.h"
#include "kernels/causal_conv/causal_conv.h"
#include "kernels/device/stream.h"

namespace dflash::backend {

absl::Status CausalConv(ConstMatrixView x, ConstMatrixView w, SegmentList segments, const ConvState& state,
                        MatrixView y, const Stream& stream);
absl::Status AdvanceConvStates(const std::vector<ConvCommit>& layers, SegmentList segments,
                               const int32_t* row_counts, const Stream& stream);  // at least one layer

}  // namespace dflash::backend
