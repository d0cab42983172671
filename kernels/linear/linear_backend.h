// What a backend provides behind linear.h; the arguments have been checked.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/matrix_view.h"
#include "base/phase.h"
#include "kernels/device/stream.h"
#include "kernels/linear/linear.h"

namespace dflash::backend {

// Size of a packed weight. InvalidArgument: too large for this backend.
absl::StatusOr<int64_t> PackedLinearBytes(int64_t out_features, int64_t in_features, DType dtype);

// Packs rows as outputs [first_output, first_output + rows.rows) of `weight`, whose memory was zeros before.
// PackRows reads device memory; PackHostRows reads host memory, which may go on return.
absl::Status PackRows(ConstMatrixView rows, int64_t first_output, const LinearWeight& weight,
                      const Stream& stream);
absl::Status PackHostRows(ConstMatrixView rows, int64_t first_output, const LinearWeight& weight,
                          const Stream& stream);

absl::Status Linear(ConstMatrixView x, const LinearWeight& w, Phase phase, MatrixView y,
                    const Stream& stream);

}  // namespace dflash::backend
