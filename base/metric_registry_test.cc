#include "base/metric_registry.h"

#include <algorithm>
#include <set>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

TEST(MetricNames, FollowTheRules) {
  std::set<std::string_view> seen;
  for (const MetricInfo* info : metrics::kAll) {
    SCOPED_TRACE(std::string(info->name));
    EXPECT_TRUE(seen.insert(info->name).second) << "twice in the table";
    EXPECT_EQ(info->name.substr(0, 8), "dflashd_");
    EXPECT_FALSE(info->help.empty());
    EXPECT_EQ(info->name.size() > 6 && info->name.substr(info->name.size() - 6) == "_total",
              info->type == MetricType::kCounter);
    EXPECT_EQ(info->buckets.empty(), info->type != MetricType::kHistogram);
    EXPECT_TRUE(std::is_sorted(info->buckets.begin(), info->buckets.end()));
    EXPECT_EQ(std::adjacent_find(info->buckets.begin(), info->buckets.end()), info->buckets.end());
    for (std::string_view label : info->labels) {
      EXPECT_NE(label, "model");  // added by the exporter
      EXPECT_NE(label, "group");
      EXPECT_NE(label, "le");
    }
    EXPECT_EQ(metrics::Find(info->name), info);
  }
  EXPECT_EQ(metrics::Find("dflashd_no_such_metric"), nullptr);
}

TEST(MetricRegistry, SameSeriesForSameLabels) {
  MetricRegistry registry;
  registry.Counter(metrics::kRequestsRejected, {{"reason", "queue_full"}}).Increment(2);
  registry.Counter(metrics::kRequestsRejected, {{"reason", "queue_full"}}).Increment(3);
  registry.Counter(metrics::kRequestsRejected, {{"reason", "invalid"}});
  registry.Histogram(metrics::kSpecAcceptedPerStep, {{"method", "dflash"}, {"constrained", "no"}})
      .Observe(15);
  const auto families = registry.Collect();
  ASSERT_EQ(families.size(), 2u);
  for (const auto& family : families) {
    if (family.type == prometheus::MetricType::Counter) {
      EXPECT_EQ(family.help, metrics::kRequestsRejected.help);
      ASSERT_EQ(family.metric.size(), 2u);
      EXPECT_EQ(family.metric[0].counter.value + family.metric[1].counter.value, 5);
    } else {
      const auto& histogram = family.metric.at(0).histogram;
      ASSERT_EQ(histogram.bucket.size(), std::size(metrics::kAcceptedBuckets) + 1);
      EXPECT_EQ(histogram.bucket[14].cumulative_count, 0u);
      EXPECT_EQ(histogram.bucket[15].cumulative_count, 1u);
    }
  }
}

TEST(MetricRegistryDeathTest, RefusesWhatTheTableDoesNotSay) {
  MetricRegistry registry;
  EXPECT_DEATH(registry.Counter(metrics::kRequestsRejected, {{"cause", "queue_full"}}), "rejected");
  EXPECT_DEATH(registry.Counter(metrics::kRequestsRejected, {}), "rejected");
  EXPECT_DEATH(registry.Gauge(metrics::kRequestsRejected, {{"reason", "x"}}), "rejected");
}

}  // namespace
}  // namespace dflash
