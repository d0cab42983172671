// Metrics of requests (base/metric_names.h, "Requests"), and the timeline of one request.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/metric_registry.h"
#include "daemon/request/group_request.h"

namespace dflash {

// Shared by all requests; any thread.
class RequestMetrics {
 public:
  explicit RequestMetrics(MetricRegistry* registry);

 private:
  friend class RequestTimeline;

  prometheus::Counter& Outcome(const std::string& outcome) { return *outcomes_.at(outcome); }
  prometheus::Counter& Rejection(const std::string& reason) { return *rejections_.at(reason); }

  std::map<std::string, prometheus::Counter*> outcomes_;
  std::map<std::string, prometheus::Counter*> rejections_;
  std::map<std::string, prometheus::Histogram*> first_token_;  // by cache outcome
  prometheus::Histogram* step_interval_;
  prometheus::Histogram* time_per_token_;
  prometheus::Histogram* request_time_per_token_;
  prometheus::Histogram* queue_seconds_;
  prometheus::Histogram* prefill_seconds_;
  prometheus::Histogram* decode_seconds_;
  prometheus::Histogram* request_seconds_;
  prometheus::Histogram* request_prompt_tokens_;
  prometheus::Histogram* request_output_tokens_;
  prometheus::Counter* prompt_computed_;
  prometheus::Counter* prompt_cached_;
  prometheus::Counter* generated_;
};

// When things happened to one request. Observes the metrics as it goes; not thread-safe. Times are given, not
// read.
class RequestTimeline {
 public:
  RequestTimeline(RequestMetrics* metrics, absl::Time received) : metrics_(metrics), received_(received) {}

  void OnStarted(absl::Time now, const StartedOutput& started);
  void OnTokens(absl::Time now, int64_t tokens);
  // The request ends; exactly one of these, once.
  void OnFinished(absl::Time now, const FinishedOutput& finished);
  void OnFailed(absl::Time now, const absl::Status& status);

  absl::Time received_at() const { return received_; }
  absl::Time started_at() const { return started_; }                               // InfinitePast: it has not
  absl::Time first_token_at() const { return first_token_; }                       // likewise
  absl::Time ended_at() const { return ended_; }                                   // likewise
  absl::Duration queue_time() const { return started_ - received_; }               // after OnStarted
  absl::Duration time_to_first_token() const { return first_token_ - received_; }  // after the first OnTokens
  absl::Duration total_time() const { return ended_ - received_; }                 // after the end
  int64_t output_tokens() const { return output_tokens_; }
  bool started() const { return started_ != absl::InfinitePast(); }

 private:
  RequestMetrics* const metrics_;
  const absl::Time received_;
  absl::Time started_ = absl::InfinitePast();
  absl::Time first_token_ = absl::InfinitePast();
  absl::Time last_output_ = absl::InfinitePast();
  absl::Time ended_ = absl::InfinitePast();
  const char* cache_ = "miss";
  int64_t output_tokens_ = 0;
};

// The label value of metrics::kRequestsRejected for a reason of proto/dflash/v1/inference.proto; "" when the
// reason is no rejection.
std::string RejectionLabel(const std::string& reason);

}  // namespace dflash
