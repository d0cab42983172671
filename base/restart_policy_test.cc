#include "base/restart_policy.h"

#include "gtest/gtest.h"

namespace dflash {
namespace {

constexpr RestartPolicy kPolicy = {.first_delay = absl::Seconds(1),
                                   .max_delay = absl::Seconds(6),
                                   .healthy_after = absl::Seconds(30),
                                   .max_failed_starts = 3};

TEST(RestartPolicy, AGroupThatNeverServedIsGivenUp) {
  RestartDecider decider(kPolicy);
  EXPECT_EQ(decider.OnEnd(std::nullopt, false), absl::Seconds(1));
  EXPECT_EQ(decider.OnEnd(std::nullopt, false), absl::Seconds(2));
  EXPECT_EQ(decider.OnEnd(std::nullopt, false), std::nullopt);
}

TEST(RestartPolicy, ABadModelIsGivenUpAtOnce) {
  RestartDecider decider(kPolicy);
  EXPECT_EQ(decider.OnEnd(std::nullopt, true), std::nullopt);
}

TEST(RestartPolicy, AGroupThatHasServedIsAlwaysStartedAgain) {
  RestartDecider decider(kPolicy);
  EXPECT_EQ(decider.OnEnd(absl::Seconds(3), false), absl::Seconds(1));
  for (const int seconds : {2, 4, 6, 6, 6, 6}) {
    EXPECT_EQ(decider.OnEnd(std::nullopt, true), absl::Seconds(seconds));
  }
  EXPECT_EQ(decider.OnEnd(absl::Seconds(29), false), absl::Seconds(6));
  EXPECT_EQ(decider.OnEnd(absl::Seconds(30), false), absl::Seconds(1)) << "healthy for long";
  EXPECT_EQ(decider.OnEnd(absl::ZeroDuration(), false), absl::Seconds(2));
}

}  // namespace
}  // namespace dflash
