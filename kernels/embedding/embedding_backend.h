// What a backend provides behind embedding.h; the arguments have been checked.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"

namespace dflash::backend {

absl::Status EmbedRows(const int32_t* ids, ConstMatrixView table, MatrixView y, const Stream& stream);
absl::Status EmbedOwnRows(const int32_t* ids, ConstMatrixView table, int64_t first_id, MatrixView y,
                          const Stream& stream);

}  // namespace dflash::backend
