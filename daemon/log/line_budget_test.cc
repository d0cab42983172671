#include "daemon/log/line_budget.h"

#include "gtest/gtest.h"

namespace dflash {
namespace {

absl::Time At(double seconds) { return absl::FromUnixSeconds(1000) + absl::Seconds(seconds); }

TEST(LineBudget, SoManyASecondAndTheRestIsCounted) {
  LineBudget budget(2);
  EXPECT_EQ(budget.Take(At(0)), 0);
  EXPECT_EQ(budget.Take(At(0.5)), 0);
  EXPECT_EQ(budget.Take(At(0.6)), std::nullopt);
  EXPECT_EQ(budget.Take(At(0.99)), std::nullopt);
  EXPECT_EQ(budget.Take(At(1)), 2) << "those that were left out";
  EXPECT_EQ(budget.Take(At(1.5)), 0);
  EXPECT_EQ(budget.Take(At(1.9)), std::nullopt);
  EXPECT_EQ(budget.Take(At(100)), 1);
  EXPECT_EQ(budget.Take(At(100.5)), 0);
}

}  // namespace
}  // namespace dflash
