// Checks of batch descriptions where device memory can be read: on the CPU. One place for all operations.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/batch/segments.h"

namespace dflash {

// InvalidArgument, beginning with `operation`, when a segment names a slot outside [0, slots), rows outside
// [0, rows), or positions that are negative or beyond int32.
absl::Status CheckSegments(const char* operation, SegmentList segments, int64_t rows, int64_t slots);

// InvalidArgument when a row count is outside [0, the segment's rows]. Null counts are legal: all rows.
absl::Status CheckRowCounts(const char* operation, SegmentList segments, const int32_t* row_counts);

// Rows of segment `index` that an operation with optional row counts works on.
inline int64_t RowsOf(SegmentList segments, const int32_t* row_counts, int64_t index) {
  return row_counts == nullptr ? segments.data[index].row_count : row_counts[index];
}

}  // namespace dflash
