// What a backend provides behind attention.h; shapes have been checked, what lies in device memory not. Also
// KeyValuePool::PageBytes.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/matrix_view.h"
#include "kernels/attention/attention.h"
#include "kernels/batch/segments.h"
#include "kernels/device/stream.h"

namespace dflash::backend {

absl::Status StoreKeyValue(ConstMatrixView k, ConstMatrixView v, SegmentList segments,
                           const int32_t* row_counts, PageTable table, const KeyValuePool& pool,
                           const Stream& stream);
absl::Status StoreKeyValues(const std::vector<KeyValueRows>& layers, SegmentList segments,
                            const int32_t* row_counts, PageTable table, const Stream& stream);
absl::Status LoadKeyValue(const KeyValuePool& pool, PageTable table, int64_t slot, int64_t first_position,
                          MatrixView k, MatrixView v, const Stream& stream);
// True when the rows were gated too; false leaves that to the caller.
absl::StatusOr<bool> Attention(ConstMatrixView q, ConstMatrixView block_k, ConstMatrixView block_v,
                               SegmentList segments, const int32_t* context_starts, PageTable table,
                               const KeyValuePool& pool, const AttentionMask& mask, float scale, Phase phase,
                               MatrixView out, const Stream& stream, ContextWritten written,
                               ConstMatrixView gate);

}  // namespace dflash::backend
