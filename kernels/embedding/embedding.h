// Embedding lookup.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"

namespace dflash {

// y[t, :] = table[ids[t], :], converted to y's dtype; no scaling.
// ids: int32 [T], device memory, each in [0, V) (the caller has checked them); table: bf16 or f32 [V, D];
// y: activation dtype [T, D]. T >= 0. No aliasing.
// Errors: InvalidArgument when shapes disagree.
absl::Status EmbedRows(const int32_t* ids, ConstMatrixView table, MatrixView y, const Stream& stream);

// The same where a rank of a group has rows [first_id, first_id + V) of the table only: y[t, :] =
// table[ids[t] - first_id, :], zeros for ids of other ranks, so that the sum over the ranks is the lookup.
// ids >= 0.
absl::Status EmbedOwnRows(const int32_t* ids, ConstMatrixView table, int64_t first_id, MatrixView y,
                          const Stream& stream);

}  // namespace dflash
