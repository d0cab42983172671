#include "daemon/metrics/request_metrics.h"

#include "base/status.h"
#include "daemon/request/request_error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

const absl::Time kReceived = absl::FromUnixSeconds(1000);
absl::Time At(double seconds) { return kReceived + absl::Seconds(seconds); }

class RequestMetricsTest : public ::testing::Test {
 protected:
  double Value(const MetricInfo& info, const MetricLabels& labels = {}) {
    return registry_.Counter(info, labels).Value();
  }
  prometheus::ClientMetric::Histogram Histogram(const MetricInfo& info, const MetricLabels& labels = {}) {
    return registry_.Histogram(info, labels).Collect().histogram;
  }
  MetricRegistry registry_;
  RequestMetrics metrics_{&registry_};
};

// Received 0, started 1, first token 3; then 4 tokens at 3.2 and 2 at 3.6.
TEST_F(RequestMetricsTest, TimelineOfARequest) {
  RequestTimeline timeline(&metrics_, kReceived);
  timeline.OnStarted(At(1), {.prompt_tokens = 140, .cached_tokens = 64});
  timeline.OnTokens(At(3), 1);
  timeline.OnTokens(At(3.2), 4);
  timeline.OnTokens(At(3.6), 2);
  FinishedOutput finished;
  finished.cause = StopCause::kStopToken;
  finished.prefill_time = absl::Seconds(2);
  finished.decode_time = absl::Seconds(0.6);
  timeline.OnFinished(At(4), finished);

  EXPECT_EQ(timeline.queue_time(), absl::Seconds(1));
  EXPECT_EQ(timeline.time_to_first_token(), absl::Seconds(3));
  EXPECT_EQ(timeline.total_time(), absl::Seconds(4));
  EXPECT_EQ(timeline.output_tokens(), 7);
  EXPECT_EQ(Value(metrics::kRequests, {{"api", "grpc"}, {"outcome", "stop"}}), 1);
  EXPECT_EQ(Value(metrics::kGeneratedTokens), 7);
  EXPECT_EQ(Value(metrics::kPromptTokens, {{"source", "computed"}}), 76);
  EXPECT_EQ(Value(metrics::kPromptTokens, {{"source", "cached"}}), 64);
  EXPECT_EQ(Histogram(metrics::kTimeToFirstToken, {{"cache", "partial"}}).sample_sum, 3);
  const auto interval = Histogram(metrics::kStepInterval);
  EXPECT_EQ(interval.sample_count, 2u) << "once per output";
  EXPECT_NEAR(interval.sample_sum, 0.6, 1e-9);
  const auto per_token = Histogram(metrics::kTimePerOutputToken);
  EXPECT_EQ(per_token.sample_count, 6u) << "once per token";
  EXPECT_NEAR(per_token.sample_sum, 0.6, 1e-9);
  EXPECT_NEAR(Histogram(metrics::kRequestTimePerOutputToken).sample_sum, 0.1, 1e-9);
  EXPECT_EQ(Histogram(metrics::kRequestSeconds).sample_sum, 4);
  EXPECT_EQ(Histogram(metrics::kRequestQueueSeconds).sample_sum, 1);
  EXPECT_EQ(Histogram(metrics::kRequestOutputTokens).sample_sum, 7);
}

TEST_F(RequestMetricsTest, EveryEndIsCountedOnce) {
  const auto fail = [&](const absl::Status& status, bool started) {
    RequestTimeline timeline(&metrics_, kReceived);
    if (started) timeline.OnStarted(At(1), {.prompt_tokens = 4, .cached_tokens = 0});
    timeline.OnFailed(At(2), status);
  };
  fail(BadParameter("sampling.temperature", "x"), false);
  fail(NotInThisBuild("constraint"), false);
  fail(absl::ResourceExhaustedError("full"), false);
  fail(WithDetails(absl::UnavailableError("x"),
                   {.reason = "WORKER_LOST", .field = "", .retry_after = {}, .metadata = {}}),
       false);
  fail(WithDetails(absl::UnavailableError("x"),
                   {.reason = "WORKER_LOST", .field = "", .retry_after = {}, .metadata = {}}),
       true);
  fail(WithDetails(absl::ResourceExhaustedError("x"),
                   {.reason = "SLOW_CONSUMER", .field = "", .retry_after = {}, .metadata = {}}),
       true);
  fail(WithReason(absl::ResourceExhaustedError("constraint"), "CONSTRAINT_TOO_LARGE"), true);
  fail(absl::InvalidArgumentError("bad_words forbid all that the constraint allows"), true);
  fail(absl::ResourceExhaustedError("memory"), true);
  fail(absl::CancelledError("x"), true);
  fail(absl::DeadlineExceededError("x"), false);
  fail(absl::InternalError("x"), true);
  const auto outcome = [&](const char* name) {
    return Value(metrics::kRequests, {{"api", "grpc"}, {"outcome", name}});
  };
  EXPECT_EQ(outcome("rejected"), 7);
  EXPECT_EQ(outcome("error"), 3);
  EXPECT_EQ(outcome("cancelled"), 1);
  EXPECT_EQ(outcome("deadline"), 1);
  const auto rejected = [&](const char* name) {
    return Value(metrics::kRequestsRejected, {{"reason", name}});
  };
  EXPECT_EQ(rejected("invalid"), 3) << "also of what runs";
  EXPECT_EQ(rejected("unsupported"), 1);
  EXPECT_EQ(rejected("queue_full"), 1) << "nor is what runs out of memory";
  EXPECT_EQ(rejected("not_ready"), 1) << "the running one was not refused";
  EXPECT_EQ(rejected("slow_consumer"), 1);
}

}  // namespace
}  // namespace dflash
