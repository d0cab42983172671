// What a backend provides behind linear.h; the arguments have been checked.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/matrix_view.h"
#include "base/phase.h"
#include "kernels/device/buffer.h"
#include "kernels/device/stream.h"
#include "kernels/linear/linear.h"

namespace dflash::backend {

// Packs the stacked matrices (together [out_features, in_features]) into the backend's layout.
absl::StatusOr<Buffer> PackLinearWeight(const std::vector<ConstMatrixView>& parts, int64_t out_features,
                                        int64_t in_features, const Stream& stream);

absl::Status Linear(ConstMatrixView x, const LinearWeight& w, Phase phase, MatrixView y,
                    const Stream& stream);

}  // namespace dflash::backend
