#include "daemon/metrics/exporter.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// What a group's own registry gives, as it comes off the wire.
std::vector<prometheus::MetricFamily> GroupSnapshot(double drafts) {
  MetricRegistry registry;
  registry.Counter(metrics::kSpecDrafts, {{"method", "dflash"}}).Increment(drafts);
  registry.Gauge(metrics::kCacheBlocks, {{"pool", "kv"}, {"state", "free"}}).Set(7);
  registry.Gauge(metrics::kCacheBlocks, {{"pool", "kv"}, {"state", "used"}}).Set(3);
  registry.Histogram(metrics::kBatchSize).Observe(3);
  return registry.Collect();
}

TEST(Exporter, AddsModelAndGroup) {
  Exporter exporter("tiny");
  exporter.server().Counter(metrics::kGeneratedTokens).Increment(5);
  exporter.group("0").Gauge(metrics::kWorkerUp, {{"rank", "0"}}).Set(1);
  EXPECT_EQ(exporter.SetSnapshot("0", GroupSnapshot(4)), "");
  EXPECT_EQ(exporter.SetSnapshot("1", GroupSnapshot(6)), "");
  const std::string text = exporter.Text();
  EXPECT_THAT(text, HasSubstr("dflashd_generated_tokens_total{model=\"tiny\"} 5\n"));
  EXPECT_THAT(text, HasSubstr("dflashd_worker_up{rank=\"0\",model=\"tiny\",group=\"0\"} 1\n"));
  EXPECT_THAT(
      text,
      HasSubstr("dflashd_spec_decode_num_drafts_total{method=\"dflash\",model=\"tiny\",group=\"0\"} 4\n"
                "dflashd_spec_decode_num_drafts_total{method=\"dflash\",model=\"tiny\",group=\"1\"} 6\n"))
      << "one block per family";
  EXPECT_THAT(text, HasSubstr("dflashd_batch_size_bucket{model=\"tiny\",group=\"0\",le=\"2\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("dflashd_batch_size_bucket{model=\"tiny\",group=\"0\",le=\"4\"} 1\n"));
}

TEST(Exporter, ANewSnapshotReplacesTheOld) {
  Exporter exporter("tiny");
  exporter.SetSnapshot("0", GroupSnapshot(4));
  exporter.SetSnapshot("0", GroupSnapshot(9));
  EXPECT_EQ(exporter.Sum("0", metrics::kSpecDrafts), 9);
  EXPECT_EQ(exporter.Sum("0", metrics::kCacheBlocks, {{"pool", "kv"}}), 10);
  EXPECT_EQ(exporter.Sum("0", metrics::kCacheBlocks, {{"pool", "kv"}, {"state", "free"}}), 7);
  EXPECT_EQ(exporter.Sum("1", metrics::kSpecDrafts), 0);
}

TEST(Exporter, DropsWhatTheTableDoesNotSay) {
  Exporter exporter("tiny");
  auto families = GroupSnapshot(4);
  for (auto& family : families) {
    if (family.name == metrics::kSpecDrafts.name) family.name = "dflashd_invented_total";
    if (family.name == metrics::kBatchSize.name) family.metric[0].histogram.bucket.pop_back();
  }
  EXPECT_THAT(exporter.SetSnapshot("0", families),
              ::testing::AnyOf("dflashd_invented_total", metrics::kBatchSize.name));
  EXPECT_THAT(exporter.Text(), Not(HasSubstr("invented")));
  EXPECT_THAT(exporter.Text(), Not(HasSubstr("batch_size")));
  EXPECT_THAT(exporter.Text(), HasSubstr("cache_blocks"));

  families = GroupSnapshot(4);
  for (auto& family : families) {
    if (family.name == metrics::kSpecDrafts.name) family.metric[0].label[0].name = "way";
  }
  EXPECT_EQ(exporter.SetSnapshot("0", families), metrics::kSpecDrafts.name);
}

TEST(Exporter, RefreshesBeforeItCollects) {
  Exporter exporter("tiny");
  int calls = 0;
  exporter.SetRefresh([&] { exporter.server().Gauge(metrics::kRequestsWaiting).Set(++calls); });
  EXPECT_THAT(exporter.Text(), HasSubstr("dflashd_requests_waiting{model=\"tiny\"} 1\n"));
  EXPECT_THAT(exporter.Text(), HasSubstr("dflashd_requests_waiting{model=\"tiny\"} 2\n"));
}

}  // namespace
}  // namespace dflash
