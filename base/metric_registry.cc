#include "base/metric_registry.h"

#include <algorithm>
#include <string_view>

#include "base/check.h"

namespace dflash {

bool LabelsMatch(const MetricInfo& info, const MetricLabels& labels) {
  const auto used = std::find(info.labels.begin(), info.labels.end(), std::string_view());
  if (static_cast<size_t>(used - info.labels.begin()) != labels.size()) return false;
  return std::all_of(info.labels.begin(), used,
                     [&](std::string_view name) { return labels.count(std::string(name)) != 0; });
}

prometheus::Counter& MetricRegistry::Counter(const MetricInfo& info, const MetricLabels& labels) {
  DFLASH_CHECK(info.type == MetricType::kCounter && LabelsMatch(info, labels), info.name.data());
  return prometheus::BuildCounter()
      .Name(std::string(info.name))
      .Help(std::string(info.help))
      .Register(registry_)
      .Add(labels);
}

prometheus::Gauge& MetricRegistry::Gauge(const MetricInfo& info, const MetricLabels& labels) {
  DFLASH_CHECK(info.type == MetricType::kGauge && LabelsMatch(info, labels), info.name.data());
  return prometheus::BuildGauge()
      .Name(std::string(info.name))
      .Help(std::string(info.help))
      .Register(registry_)
      .Add(labels);
}

prometheus::Histogram& MetricRegistry::Histogram(const MetricInfo& info, const MetricLabels& labels) {
  DFLASH_CHECK(info.type == MetricType::kHistogram && LabelsMatch(info, labels), info.name.data());
  return prometheus::BuildHistogram()
      .Name(std::string(info.name))
      .Help(std::string(info.help))
      .Register(registry_)
      .Add(labels, prometheus::Histogram::BucketBoundaries(info.buckets.begin(), info.buckets.end()));
}

}  // namespace dflash
