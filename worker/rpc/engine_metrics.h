// Turns step reports into the metrics of a worker group (base/metric_names.h). The coordinator exports them.
#pragma once

#include <array>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/metric_registry.h"
#include "worker/engine/engine.h"
#include "worker/engine/speculation_health.h"

namespace dflash {

// How the self-test at start ended.
enum class SelfTestResult : uint8_t {
  kSkipped,
  kPassed,
  kFailed,      // nobody is drafted for
  kOverridden,  // failed, and drafts all the same
};
const char* Name(SelfTestResult result);  // "passed"

class EngineMetrics final : public StepObserver {
 public:
  struct Options {
    std::string backend;                          // "cpu", "cuda"
    int64_t max_drafts = 0;                       // of a round; 0: no drafter
    bool speculate_by_default = true;             // for requests that do not choose
    MetricLabels config;                          // labels of metrics::kSpecConfig; empty without a drafter
    std::map<std::string, int64_t> memory_bytes = {};  // by kind of pool
  };
  explicit EngineMetrics(const Options& options);

  // Until Unmute, steps are not counted: those of the self-test are nobody's requests. Before the first step
  // that counts.
  void Mute() { muted_ = true; }
  void Unmute() { muted_ = false; }
  void SetSelfTest(SelfTestResult result);

  // Engine's thread.
  void OnStep(const StepReport& report, const EngineGauges& gauges) override;
  // Any thread, before Collect(). Also judges the health of speculation anew.
  void SetGauges(const EngineGauges& gauges);

  // All series, cumulative. Any thread.
  std::vector<prometheus::MetricFamily> Collect() const { return registry_.Collect(); }

 private:
  void OnBlock(const BlockReport& block, int64_t rounds);
  void OnRound(const DecodedRound& round);
  void OnCalibration(const DecodedRound& round);
  void PublishHealth();
  void OnPrefix(const PrefixReport& prefix);

  // Rounds of a kind.
  struct Kind {
    prometheus::Counter* drafts = nullptr;
    prometheus::Counter* draft_tokens = nullptr;  // null: not counted by kind
    prometheus::Counter* accepted_tokens = nullptr;
    prometheus::Counter* first_accepted = nullptr;
    void Add(const RoundReport& round) const;
  };
  static constexpr size_t kConfidenceBins = 10;

  const bool speculate_by_default_;
  MetricRegistry registry_;
  bool muted_ = false;
  absl::Mutex health_mutex_;
  HealthMonitor health_ ABSL_GUARDED_BY(health_mutex_);
  bool refused_ ABSL_GUARDED_BY(health_mutex_) = false;  // the self-test failed
  std::vector<prometheus::Counter*> predicted_at_;       // by position
  std::array<prometheus::Counter*, kConfidenceBins> confidence_drafts_ = {}, confidence_accepted_ = {};
  std::array<Kind, kContentClasses> contents_;
  std::array<Kind, kContextOrigins> origins_;
  prometheus::Counter* context_tokens_;
  prometheus::Counter* context_missing_;
  std::map<std::pair<std::string, bool>, prometheus::Counter*> steps_;      // by kind, captured or not
  std::map<std::string, prometheus::Histogram*> step_seconds_;              // by kind
  std::map<std::string, prometheus::Histogram*> part_seconds_;              // by part
  std::map<std::string, prometheus::Counter*> skipped_;                     // by reason
  std::map<std::pair<int64_t, BlockReason>, prometheus::Counter*> blocks_;  // by rows and reason
  std::map<std::string, prometheus::Counter*> evictions_;                   // by pool
  prometheus::Counter* preemptions_;
  prometheus::Histogram* batch_size_;
  prometheus::Histogram* batch_tokens_;
  prometheus::Counter* drafts_;
  prometheus::Counter* draft_tokens_;
  prometheus::Counter* cut_draft_tokens_;
  prometheus::Counter* accepted_tokens_;
  std::vector<prometheus::Counter*> drafted_at_;   // by position
  std::vector<prometheus::Counter*> accepted_at_;  // by position
  prometheus::Histogram* accepted_per_step_;
  prometheus::Counter* queried_tokens_;
  std::map<std::string, prometheus::Counter*> hit_tokens_;  // by pool
  std::map<std::string, prometheus::Counter*> limited_;     // by pool
  prometheus::Counter* draft_seconds_;
  prometheus::Counter* verify_seconds_;
};

}  // namespace dflash
