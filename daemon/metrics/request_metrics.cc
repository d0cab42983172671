#include "daemon/metrics/request_metrics.h"

#include "daemon/request/request_error.h"

namespace dflash {

RequestMetrics::RequestMetrics(MetricRegistry* registry) {
  // Made at once rather than when first observed: a rate needs the zero before the first event.
  for (const char* outcome : {"stop", "length", "cancelled", "deadline", "rejected", "error"}) {
    outcomes_[outcome] = &registry->Counter(metrics::kRequests, {{"api", "grpc"}, {"outcome", outcome}});
  }
  for (const char* reason :
       {"queue_full", "queue_timeout", "client_limit", "rate_limited", "unauthenticated", "draining",
        "not_ready", "invalid", "too_long", "unsupported", "slow_consumer"}) {
    rejections_[reason] = &registry->Counter(metrics::kRequestsRejected, {{"reason", reason}});
  }
  for (const char* cache : {"hit", "partial", "miss"}) {
    first_token_[cache] = &registry->Histogram(metrics::kTimeToFirstToken, {{"cache", cache}});
  }
  step_interval_ = &registry->Histogram(metrics::kStepInterval);
  time_per_token_ = &registry->Histogram(metrics::kTimePerOutputToken);
  request_time_per_token_ = &registry->Histogram(metrics::kRequestTimePerOutputToken);
  queue_seconds_ = &registry->Histogram(metrics::kRequestQueueSeconds);
  prefill_seconds_ = &registry->Histogram(metrics::kRequestPrefillSeconds);
  decode_seconds_ = &registry->Histogram(metrics::kRequestDecodeSeconds);
  request_seconds_ = &registry->Histogram(metrics::kRequestSeconds);
  request_prompt_tokens_ = &registry->Histogram(metrics::kRequestPromptTokens);
  request_output_tokens_ = &registry->Histogram(metrics::kRequestOutputTokens);
  prompt_computed_ = &registry->Counter(metrics::kPromptTokens, {{"source", "computed"}});
  prompt_cached_ = &registry->Counter(metrics::kPromptTokens, {{"source", "cached"}});
  generated_ = &registry->Counter(metrics::kGeneratedTokens);
}

std::string RejectionLabel(const std::string& reason) {
  if (reason == "QUEUE_FULL") return "queue_full";
  if (reason == "QUEUE_TIMEOUT") return "queue_timeout";
  if (reason == "CLIENT_LIMIT") return "client_limit";
  if (reason == "RATE_LIMITED") return "rate_limited";
  if (reason == "UNAUTHENTICATED" || reason == "PERMISSION_DENIED") return "unauthenticated";
  if (reason == "DRAINING") return "draining";
  if (reason == "NOT_READY" || reason == "WORKER_LOST") return "not_ready";
  if (reason == "CONTEXT_TOO_LONG") return "too_long";
  if (reason == "UNSUPPORTED" || reason == "METHOD_NOT_LOADED") return "unsupported";
  if (reason == "SLOW_CONSUMER") return "slow_consumer";
  if (reason == "BAD_PARAMETER" || reason == "TEMPLATE_ERROR" || reason == "MODEL_NOT_FOUND" ||
      reason == "DUPLICATE_REQUEST" || reason == "REVISION_MISMATCH" || reason == "METADATA_TOO_LARGE" ||
      reason == "CONSTRAINT_TOO_LARGE") {
    return "invalid";
  }
  return "";
}

void RequestTimeline::OnStarted(absl::Time now, const StartedOutput& started) {
  started_ = now;
  if (started.cached_tokens > 0) {
    // What is cached ends on a grid of 64 tokens, and at least one has to run.
    cache_ = started.prompt_tokens - started.cached_tokens <= 64 ? "hit" : "partial";
  }
  metrics_->queue_seconds_->Observe(absl::ToDoubleSeconds(queue_time()));
  metrics_->request_prompt_tokens_->Observe(static_cast<double>(started.prompt_tokens));
  metrics_->prompt_computed_->Increment(static_cast<double>(started.prompt_tokens - started.cached_tokens));
  metrics_->prompt_cached_->Increment(static_cast<double>(started.cached_tokens));
}

void RequestTimeline::OnTokens(absl::Time now, int64_t tokens) {
  if (tokens == 0) return;
  output_tokens_ += tokens;
  metrics_->generated_->Increment(static_cast<double>(tokens));
  if (first_token_ == absl::InfinitePast()) {
    first_token_ = now;
    metrics_->first_token_.at(cache_)->Observe(absl::ToDoubleSeconds(time_to_first_token()));
  } else {
    const double gap = absl::ToDoubleSeconds(now - last_output_);
    metrics_->step_interval_->Observe(gap);
    for (int64_t i = 0; i < tokens; ++i)
      metrics_->time_per_token_->Observe(gap / static_cast<double>(tokens));
  }
  last_output_ = now;
}

void RequestTimeline::OnFinished(absl::Time now, const FinishedOutput& finished) {
  ended_ = now;
  metrics_->Outcome(finished.cause == StopCause::kLength ? "length" : "stop").Increment();
  metrics_->request_seconds_->Observe(absl::ToDoubleSeconds(total_time()));
  metrics_->prefill_seconds_->Observe(absl::ToDoubleSeconds(finished.prefill_time));
  metrics_->decode_seconds_->Observe(absl::ToDoubleSeconds(finished.decode_time));
  metrics_->request_output_tokens_->Observe(static_cast<double>(output_tokens_));
  if (output_tokens_ > 1) {
    metrics_->request_time_per_token_->Observe(absl::ToDoubleSeconds(last_output_ - first_token_) /
                                               static_cast<double>(output_tokens_ - 1));
  }
}

void RequestTimeline::OnFailed(absl::Time now, const absl::Status& status) {
  ended_ = now;
  const std::string rejection = RejectionLabel(DetailsOf(status).reason);
  // What a client does wrong may show while its request runs; what the server lacks then is an error.
  const bool is_rejected =
      !rejection.empty() && (!started() || rejection == "invalid" || rejection == "slow_consumer");
  if (status.code() == absl::StatusCode::kCancelled) {
    metrics_->Outcome("cancelled").Increment();
  } else if (status.code() == absl::StatusCode::kDeadlineExceeded) {
    metrics_->Outcome("deadline").Increment();
  } else if (is_rejected) {
    metrics_->Outcome("rejected").Increment();
  } else {
    metrics_->Outcome("error").Increment();
  }
  if (is_rejected) metrics_->Rejection(rejection).Increment();
}

}  // namespace dflash
