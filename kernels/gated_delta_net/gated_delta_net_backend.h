// What a backend provides behind gated_delta_net.h; shapes have been checked, what lies in device memory not.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/batch/segments.h"
#include "kernels/device/stream.h"
#include "kernels/gated_delta_net/gated_delta_net.h"

namespace dflash::backend {

absl::Status GatedDeltaNetVerify(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                                 SegmentList segments, const PendingRecords& pending,
                                 const GatedDeltaNetState& state, MatrixView o, const Stream& stream);
// The three operations one after the other, or something with the same bits.
absl::Status GatedDeltaNetMixerVerify(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                                      const GatedDeltaNetSurroundings& around, SegmentList segments,
                                      const PendingRecords& pending, const GatedDeltaNetState& state,
                                      MatrixView convolved, MatrixView o, const Stream& stream);
absl::Status GatedDeltaNetPrefill(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                                  SegmentList segments, const GatedDeltaNetState& state, MatrixView o,
                                  const Stream& stream);
absl::Status GatedDeltaNetFold(const GatedDeltaNetShape& shape, const int32_t* slots, int64_t slot_count,
                               const PendingRecords& pending, const GatedDeltaNetState& state,
                               const Stream& stream);

}  // namespace dflash::backend
