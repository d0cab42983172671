// Makes and collects the series of one process from the table in base/metric_names.h.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/metric_names.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/metric_family.h"
#include "prometheus/registry.h"

namespace dflash {

using MetricLabels = std::map<std::string, std::string>;

// Any thread. A series lives as long as its registry; asking again returns the same one. A type or a set of
// label names that differs from the table's is our bug and ends the process.
class MetricRegistry {
 public:
  prometheus::Counter& Counter(const MetricInfo& info, const MetricLabels& labels = {});
  prometheus::Gauge& Gauge(const MetricInfo& info, const MetricLabels& labels = {});
  prometheus::Histogram& Histogram(const MetricInfo& info, const MetricLabels& labels = {});

  std::vector<prometheus::MetricFamily> Collect() const { return registry_.Collect(); }

 private:
  prometheus::Registry registry_;
};

// True when `labels` are exactly the label names of the table entry.
bool LabelsMatch(const MetricInfo& info, const MetricLabels& labels);

}  // namespace dflash
