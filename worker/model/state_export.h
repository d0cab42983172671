// Device state as plain numbers on the host, for comparisons, and numbers put there (tests, doctor).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "base/matrix_view.h"
#include "kernels/attention/attention.h"
#include "kernels/batch/segments.h"
#include "kernels/device/stream.h"

namespace dflash {

// All elements row by row, widened to float32. Waits for the stream.
absl::StatusOr<std::vector<float>> ActivationsToHost(ConstMatrixView matrix, const Stream& stream);

// Keys, then values of positions [0, length) of a slot, each [length, kv_heads * head_dim].
absl::StatusOr<std::vector<std::vector<float>>> ExportKeyValue(const KeyValuePool& pool, PageTable table,
                                                               int32_t slot, int64_t length,
                                                               const Stream& stream);

// Overwrites whole pages with a value.
absl::Status FillKeyValue(const KeyValuePool& pool, const std::vector<int32_t>& pages, float value,
                          const Stream& stream);

}  // namespace dflash
