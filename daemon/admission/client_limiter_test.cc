#include "daemon/admission/client_limiter.h"

#include "daemon/request/request_error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

absl::Time At(double seconds) { return absl::FromUnixSeconds(1000) + absl::Seconds(seconds); }

TEST(ClientLimiter, WithoutLimitsEverybodyMayEverything) {
  ClientLimiter limiter({});
  for (int i = 0; i < 1000; ++i) ASSERT_TRUE(limiter.Enter("a", At(0)).ok());
}

TEST(ClientLimiter, RequestsAtATime) {
  ClientLimiter limiter({.max_requests = 2, .requests_per_second = 0});
  ASSERT_TRUE(limiter.Enter("a", At(0)).ok());
  ASSERT_TRUE(limiter.Enter("a", At(0)).ok());
  const absl::Status third = limiter.Enter("a", At(0));
  EXPECT_EQ(third.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(third).reason, "CLIENT_LIMIT");
  EXPECT_TRUE(DetailsOf(third).retry_after.has_value());
  EXPECT_TRUE(limiter.Enter("b", At(0)).ok()) << "another client's are its own";
  limiter.Leave("a");
  EXPECT_TRUE(limiter.Enter("a", At(0)).ok());
}

TEST(ClientLimiter, RequestsASecond) {
  ClientLimiter limiter({.max_requests = 0, .requests_per_second = 4});
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(limiter.Enter("a", At(0)).ok()) << "the burst";
  const absl::Status fifth = limiter.Enter("a", At(0));
  EXPECT_EQ(DetailsOf(fifth).reason, "RATE_LIMITED");
  EXPECT_EQ(DetailsOf(fifth).retry_after, absl::Milliseconds(250));
  EXPECT_FALSE(limiter.Enter("a", At(0.125)).ok()) << "a refusal costs nothing, and half is not one";
  EXPECT_TRUE(limiter.Enter("a", At(0.25)).ok());
  EXPECT_FALSE(limiter.Enter("a", At(0.25)).ok());
  int taken = 0;
  for (int i = 0; i < 100; ++i) taken += limiter.Enter("a", At(100)).ok() ? 1 : 0;
  EXPECT_EQ(taken, 4) << "what was not used does not pile up";
}

TEST(ClientLimiter, SlowRatesAllowOne) {
  ClientLimiter limiter({.max_requests = 0, .requests_per_second = 0.1});
  EXPECT_TRUE(limiter.Enter("a", At(0)).ok());
  EXPECT_EQ(DetailsOf(limiter.Enter("a", At(0))).retry_after, absl::Seconds(10));
  EXPECT_TRUE(limiter.Enter("a", At(10)).ok());
}

TEST(ClientLimiter, ForgetsThoseWhoHaveGone) {
  ClientLimiter limiter({.max_requests = 5, .requests_per_second = 1});
  ASSERT_TRUE(limiter.Enter("runs", At(0)).ok());
  ASSERT_TRUE(limiter.Enter("gone", At(0)).ok());
  limiter.Leave("gone");
  limiter.Forget(At(0.5));
  EXPECT_EQ(limiter.clients(), 2u) << "its rate has not recovered";
  limiter.Forget(At(1));
  EXPECT_EQ(limiter.clients(), 1u);
  limiter.Leave("runs");
  limiter.Forget(At(2));
  EXPECT_EQ(limiter.clients(), 0u);
}

}  // namespace
}  // namespace dflash
