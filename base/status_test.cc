#include "base/status.h"

#include "gtest/gtest.h"

namespace dflash {
namespace {

TEST(AnnotateTest, SaysWhereAndKeepsTheRest) {
  EXPECT_TRUE(Annotate(absl::OkStatus(), "here").ok());
  const absl::Status status = Annotate(WithReason(absl::NotFoundError("no file"), "GONE"), "here");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "here: no file");
  EXPECT_EQ(ReasonOf(status), "GONE");
}

}  // namespace
}  // namespace dflash
