// Turns step reports into the metrics of a worker group (base/metric_names.h). The coordinator exports them.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/metric_registry.h"
#include "worker/engine/engine.h"

namespace dflash {

class EngineMetrics final : public StepObserver {
 public:
  struct Options {
    std::string backend;                          // "cpu", "cuda"
    int64_t max_drafts = 0;                       // of a round; 0: no drafter
    bool speculate_by_default = true;             // for requests that do not choose
    MetricLabels config;                          // labels of metrics::kSpecConfig; empty without a drafter
    std::map<std::string, int64_t> memory_bytes;  // by kind of pool
  };
  explicit EngineMetrics(const Options& options);

  // Engine's thread.
  void OnStep(const StepReport& report, const EngineGauges& gauges) override;
  // Any thread, before Collect().
  void SetGauges(const EngineGauges& gauges);

  // All series, cumulative. Any thread.
  std::vector<prometheus::MetricFamily> Collect() const { return registry_.Collect(); }

 private:
  void OnBlock(const BlockReport& block, int64_t rounds);
  void OnRound(const RoundReport& round);
  void OnPrefix(const PrefixReport& prefix);

  MetricRegistry registry_;
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
