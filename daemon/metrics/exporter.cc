#include "daemon/metrics/exporter.h"

#include <algorithm>
#include <utility>

#include "prometheus/text_serializer.h"

namespace dflash {
namespace {

bool FitsTable(const prometheus::MetricFamily& family) {
  const MetricInfo* info = metrics::Find(family.name);
  if (info == nullptr || info->scope != MetricScope::kGroup) return false;
  return std::all_of(family.metric.begin(), family.metric.end(), [&](const prometheus::ClientMetric& metric) {
    MetricLabels labels;
    for (const auto& label : metric.label) labels.emplace(label.name, label.value);
    return labels.size() == metric.label.size() && LabelsMatch(*info, labels) &&
           (info->type != MetricType::kHistogram ||
            metric.histogram.bucket.size() == info->buckets.size() + 1);
  });
}

}  // namespace

Exporter::Exporter(std::string model) : model_(std::move(model)) {}

MetricRegistry& Exporter::group(const std::string& name) {
  absl::MutexLock lock(&mutex_);
  std::unique_ptr<MetricRegistry>& registry = groups_[name];
  if (registry == nullptr) registry = std::make_unique<MetricRegistry>();
  return *registry;
}

std::string Exporter::SetSnapshot(const std::string& group, std::vector<prometheus::MetricFamily> families) {
  std::string dropped;
  std::erase_if(families, [&](const prometheus::MetricFamily& family) {
    if (FitsTable(family)) return false;
    if (dropped.empty()) dropped = family.name;
    return true;
  });
  absl::MutexLock lock(&mutex_);
  snapshots_[group] = std::move(families);
  return dropped;
}

double Exporter::Sum(const std::string& group, const MetricInfo& info, const MetricLabels& labels) const {
  absl::MutexLock lock(&mutex_);
  const auto snapshot = snapshots_.find(group);
  if (snapshot == snapshots_.end()) return 0;
  double sum = 0;
  for (const prometheus::MetricFamily& family : snapshot->second) {
    if (family.name != info.name) continue;
    for (const prometheus::ClientMetric& metric : family.metric) {
      const bool matches = std::all_of(labels.begin(), labels.end(), [&](const auto& wanted) {
        return std::any_of(metric.label.begin(), metric.label.end(), [&](const auto& label) {
          return label.name == wanted.first && label.value == wanted.second;
        });
      });
      if (matches) sum += info.type == MetricType::kCounter ? metric.counter.value : metric.gauge.value;
    }
  }
  return sum;
}

std::optional<MetricLabels> Exporter::InForce(const std::string& group, const MetricInfo& info) const {
  absl::MutexLock lock(&mutex_);
  const auto snapshot = snapshots_.find(group);
  if (snapshot == snapshots_.end()) return std::nullopt;
  for (const prometheus::MetricFamily& family : snapshot->second) {
    if (family.name != info.name) continue;
    for (const prometheus::ClientMetric& metric : family.metric) {
      if (metric.gauge.value != 1) continue;
      MetricLabels labels;
      for (const auto& label : metric.label) labels.emplace(label.name, label.value);
      return labels;
    }
  }
  return std::nullopt;
}

std::string Exporter::Text() {
  if (refresh_) refresh_();
  std::map<std::string, prometheus::MetricFamily> merged;
  const auto add = [&](const std::vector<prometheus::MetricFamily>& families, const std::string* group) {
    for (const prometheus::MetricFamily& family : families) {
      prometheus::MetricFamily& target = merged[family.name];
      target.name = family.name;
      target.help = family.help;
      target.type = family.type;
      for (prometheus::ClientMetric metric : family.metric) {
        metric.label.push_back({"model", model_});
        if (group != nullptr) metric.label.push_back({"group", *group});
        target.metric.push_back(std::move(metric));
      }
    }
  };
  add(server_.Collect(), nullptr);
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [name, registry] : groups_) add(registry->Collect(), &name);
    for (const auto& [name, families] : snapshots_) add(families, &name);
  }
  std::vector<prometheus::MetricFamily> families;
  families.reserve(merged.size());
  for (auto& [name, family] : merged) families.push_back(std::move(family));
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace dflash
