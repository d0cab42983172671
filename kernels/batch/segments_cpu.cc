#include "kernels/batch/segments_cpu.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace dflash {

absl::Status CheckSegments(const char* operation, SegmentList segments, int64_t rows, int64_t slots) {
  DFLASH_RETURN_IF_ERROR(CheckSegmentList(operation, segments));
  for (int64_t i = 0; i < segments.count; ++i) {
    const Segment& segment = segments.data[i];
    if (segment.slot < 0 || segment.slot >= slots) {
      return absl::InvalidArgumentError(
          absl::StrCat(operation, ": segment ", i, " has slot ", segment.slot, " of ", slots));
    }
    if (segment.first_row < 0 || segment.row_count < 0 || segment.first_row > rows - segment.row_count) {
      return absl::InvalidArgumentError(absl::StrCat(operation, ": segment ", i, " has rows ",
                                                     segment.first_row, " + ", segment.row_count, " of ",
                                                     rows));
    }
    if (segment.start_position < 0 || segment.start_position > INT32_MAX - segment.row_count) {
      return absl::InvalidArgumentError(absl::StrCat(operation, ": segment ", i, " has positions ",
                                                     segment.start_position, " + ", segment.row_count));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckRowCounts(const char* operation, SegmentList segments, const int32_t* row_counts) {
  if (row_counts == nullptr) return absl::OkStatus();
  for (int64_t i = 0; i < segments.count; ++i) {
    if (row_counts[i] < 0 || row_counts[i] > segments.data[i].row_count) {
      return absl::InvalidArgumentError(absl::StrCat(operation, ": row count ", row_counts[i], " of segment ",
                                                     i, ", which has ", segments.data[i].row_count));
    }
  }
  return absl::OkStatus();
}

}  // namespace dflash
