// The exposition of all metrics: the coordinator's own and the latest snapshot of every worker group, in one
// text.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "base/metric_registry.h"

namespace dflash {

class Exporter {
 public:
  // `model` becomes the label of that name on every series.
  explicit Exporter(std::string model);

  // Series of the whole server, and those that the coordinator observes about a group. Any thread.
  MetricRegistry& server() { return server_; }
  MetricRegistry& group(const std::string& name);

  // Replaces what a group has reported about itself. Families that are not in the table, or not of a group,
  // or whose samples have other labels or buckets than the table says, are dropped: returns the first such
  // name, or "".
  std::string SetSnapshot(const std::string& group, std::vector<prometheus::MetricFamily> families);

  // The sum over a group's reported counters or gauges of that name whose labels include `labels`; 0 when
  // there are none.
  double Sum(const std::string& group, const MetricInfo& info, const MetricLabels& labels = {}) const;

  // The labels of the group's reported gauge of that name which is 1, where one of several always is;
  // nullopt: none.
  std::optional<MetricLabels> InForce(const std::string& group, const MetricInfo& info) const;

  // Called at the beginning of every Text(), to bring gauges up to date. Set before the first Text().
  void SetRefresh(std::function<void()> refresh) { refresh_ = std::move(refresh); }

  // Prometheus text format, families sorted by name.
  std::string Text();

 private:
  const std::string model_;
  MetricRegistry server_;
  std::function<void()> refresh_;
  mutable absl::Mutex mutex_;
  std::map<std::string, std::unique_ptr<MetricRegistry>> groups_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::vector<prometheus::MetricFamily>> snapshots_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dflash
