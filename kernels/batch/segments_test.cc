#include "kernels/batch/segments.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/batch/segments_cpu.h"

namespace dflash {
namespace {

absl::StatusCode Check(Segment segment, int64_t rows, int64_t slots) {
  return CheckSegments("op", {&segment, 1}, rows, slots).code();
}

TEST(SegmentsTest, RowsSlotsAndPositionsAreHalfOpenRanges) {
  constexpr auto kBad = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(Check({.slot = 1, .first_row = 2, .row_count = 3, .start_position = 7}, 5, 2),
            absl::StatusCode::kOk);
  EXPECT_EQ(Check({.slot = 0, .first_row = 5, .row_count = 0}, 5, 1), absl::StatusCode::kOk);
  EXPECT_EQ(Check({.slot = 2, .row_count = 1}, 5, 2), kBad);
  EXPECT_EQ(Check({.slot = -1, .row_count = 1}, 5, 2), kBad);
  EXPECT_EQ(Check({.first_row = 3, .row_count = 3}, 5, 2), kBad);
  EXPECT_EQ(Check({.first_row = -1, .row_count = 3}, 5, 2), kBad);
  EXPECT_EQ(Check({.row_count = -1}, 5, 2), kBad);
  EXPECT_EQ(Check({.first_row = INT32_MAX, .row_count = INT32_MAX}, 5, 2), kBad);
  EXPECT_EQ(Check({.row_count = 1, .start_position = -1}, 5, 2), kBad);
  EXPECT_EQ(Check({.row_count = 1, .start_position = INT32_MAX}, 5, 2), kBad);
  EXPECT_EQ(CheckSegments("op", {nullptr, 1}, 5, 2).code(), kBad);
  EXPECT_EQ(CheckSegments("op", {nullptr, 0}, 0, 0).code(), absl::StatusCode::kOk);
}

TEST(SegmentsTest, RowCountsStayInsideTheirSegments) {
  const std::vector<Segment> segments = {{.row_count = 2}, {.row_count = 0}};
  const SegmentList list = {segments.data(), 2};
  const std::vector<int32_t> good = {1, 0}, negative = {-1, 0}, large = {2, 1};
  EXPECT_TRUE(CheckRowCounts("op", list, nullptr).ok());
  EXPECT_TRUE(CheckRowCounts("op", list, good.data()).ok());
  EXPECT_EQ(CheckRowCounts("op", list, negative.data()).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckRowCounts("op", list, large.data()).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(RowsOf(list, nullptr, 0), 2);
  EXPECT_EQ(RowsOf(list, good.data(), 0), 1);
}

}  // namespace
}  // namespace dflash
