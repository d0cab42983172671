#include "daemon/traces/trace_exporter.h"

#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/metric_names.h"
#include "daemon/traces/testing/trace_collector.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using testing::AttributeOf;
using ::testing::HasSubstr;
using testing::TraceCollector;

Span SpanOf(int64_t number) {
  return {.trace_id = "0af7651916cd43dd8448eb211c80319c",
          .span_id = "b7ad6b7169203331",
          .parent_span_id = number == 0 ? "" : "00f067aa0ba902b7",
          .name = "generate",
          .kind = Span::Kind::kServer,
          .start = absl::FromUnixNanos(1'700'000'000'123'456'789),
          .end = absl::FromUnixNanos(1'700'000'001'000'000'000),
          .attributes = {{"number", number}, {"words", std::string("say \"hi\"\n\xff")}, {"mean", 2.5}},
          .error = number == 1 ? "INTERNAL" : ""};
}

double Count(MetricRegistry& registry, const char* outcome) {
  return registry.Counter(metrics::kTraceSpans, {{"outcome", outcome}}).Value();
}

TraceExporter::Options OptionsFor(const TraceCollector& collector) {
  TraceExporter::Options options;
  options.endpoint = ParseOtlpEndpoint(collector.url()).value();
  options.version = "1.2.3";
  options.interval = absl::Milliseconds(20);
  return options;
}

TEST(ParseOtlpEndpoint, KnowsPortsAndPaths) {
  const auto expect = [](const char* url, const char* host, const char* port, const char* path) {
    const auto endpoint = ParseOtlpEndpoint(url);
    ASSERT_TRUE(endpoint.ok()) << endpoint.status();
    EXPECT_EQ(endpoint->host, host);
    EXPECT_EQ(endpoint->port, port);
    EXPECT_EQ(endpoint->path, path);
  };
  expect("http://collector", "collector", "4318", "/v1/traces");
  expect("http://collector:80/", "collector", "80", "/v1/traces");
  expect("http://[::1]:99/x/y", "::1", "99", "/x/y");
  expect("http://[::1]", "::1", "4318", "/v1/traces");
  for (const char* bad :
       {"", "collector:4318", "https://collector", "http://", "http://:80", "http://a:0", "http://a:b",
        "http://a:70000", "http://a b", "http://user@a", "http://a/x\r\nHost: b"}) {
    EXPECT_EQ(ParseOtlpEndpoint(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(TraceExporter, TellsACollectorEverything) {
  TraceCollector collector;
  MetricRegistry registry;
  TraceExporter exporter(OptionsFor(collector), &registry);
  exporter.Export({SpanOf(0), SpanOf(1)});
  const auto spans = collector.AwaitSpans(2);
  EXPECT_EQ(collector.complaint(), "");
  ASSERT_EQ(spans.size(), 2u);
  const nlohmann::json& span = spans[1];
  EXPECT_EQ(span["traceId"], "0af7651916cd43dd8448eb211c80319c");
  EXPECT_EQ(span["spanId"], "b7ad6b7169203331");
  EXPECT_EQ(span["parentSpanId"], "00f067aa0ba902b7");
  EXPECT_EQ(span["name"], "generate");
  EXPECT_EQ(span["kind"], 2);
  EXPECT_EQ(span["startTimeUnixNano"], "1700000000123456789");
  EXPECT_EQ(span["endTimeUnixNano"], "1700000001000000000");
  EXPECT_EQ(AttributeOf(span, "number"), "1");
  EXPECT_EQ(AttributeOf(span, "mean"), 2.5);
  EXPECT_EQ(AttributeOf(span, "words"), "say \"hi\"\n\xef\xbf\xbd");
  EXPECT_EQ(span["status"]["code"], 2);
  EXPECT_EQ(span["status"]["message"], "INTERNAL");
  EXPECT_FALSE(spans[0].contains("parentSpanId"));
  EXPECT_TRUE(spans[0]["status"].empty());
  EXPECT_EQ(AttributeOf(span["resource"], "service.name"), "dflashd");
  EXPECT_EQ(AttributeOf(span["resource"], "service.version"), "1.2.3");
}

// And nothing because of the time.
TraceExporter::Options BatchesOfTen(const TraceCollector& collector) {
  TraceExporter::Options options = OptionsFor(collector);
  options.max_batch = 10;
  options.interval = absl::Hours(1);
  return options;
}

TEST(TraceExporter, ExportsInBatchesAndWhatIsLeftAtItsEnd) {
  TraceCollector collector;
  MetricRegistry registry;
  const TraceExporter::Options options = BatchesOfTen(collector);
  {
    TraceExporter exporter(options, &registry);
    for (int64_t i = 0; i < 25; ++i) exporter.Export({SpanOf(i)});
    collector.AwaitSpans(20);
  }
  const auto spans = collector.AwaitSpans(25);
  ASSERT_EQ(spans.size(), 25u);
  for (size_t i = 0; i < spans.size(); ++i) EXPECT_EQ(AttributeOf(spans[i], "number"), absl::StrCat(i));
  EXPECT_EQ(collector.exports(), 3u);
  EXPECT_EQ(Count(registry, "exported"), 25);
  EXPECT_EQ(Count(registry, "queue_full") + Count(registry, "failed"), 0);
}

TEST(TraceExporter, FlushesWithinItsTime) {
  TraceCollector collector;
  MetricRegistry registry;
  const TraceExporter::Options options = BatchesOfTen(collector);
  TraceExporter exporter(options, &registry);
  EXPECT_TRUE(exporter.Flush(absl::Seconds(30))) << "there is nothing";
  for (int64_t i = 0; i < 25; ++i) exporter.Export({SpanOf(i)});
  EXPECT_TRUE(exporter.Flush(absl::Seconds(30)));
  EXPECT_EQ(Count(registry, "exported"), 25);
  EXPECT_EQ(collector.AwaitSpans(25).size(), 25u);

  TraceCollector mute(0);
  TraceExporter unheard(OptionsFor(mute), &registry);
  unheard.Export({SpanOf(0)});
  EXPECT_FALSE(unheard.Flush(absl::Milliseconds(50)));
}

// However much comes, and whatever the collector does, the caller goes on, and every span is counted once.
TEST(TraceExporter, DropsWhatACollectorDoesNotTake) {
  for (const int status : {0, 500, 404}) {
    SCOPED_TRACE(status);
    TraceCollector collector(status);
    MetricRegistry registry;
    TraceExporter::Options options = OptionsFor(collector);
    options.max_queued = 100;
    options.max_batch = 50;
    options.timeout = absl::Milliseconds(200);
    {
      TraceExporter exporter(options, &registry);
      for (int64_t i = 0; i < 1000; ++i) exporter.Export({SpanOf(i), SpanOf(i)});
      EXPECT_TRUE(collector.AwaitExports(1));
    }
    EXPECT_EQ(Count(registry, "exported"), 0);
    EXPECT_GT(Count(registry, "failed"), 0);
    EXPECT_GT(Count(registry, "queue_full"), 0);
    EXPECT_EQ(Count(registry, "failed") + Count(registry, "queue_full"), 2000);
  }
}

TEST(TraceExporter, WorksAgainWhenTheCollectorDoes) {
  MetricRegistry registry;
  TraceExporter::Options options;
  uint16_t port = 0;
  {
    const TraceCollector gone;
    options = OptionsFor(gone);
    port = gone.port();
  }
  TraceExporter exporter(options, &registry);
  exporter.Export({SpanOf(0)});
  while (Count(registry, "failed") < 1) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(Count(registry, "exported"), 0);
  TraceCollector back(200, port);
  exporter.Export({SpanOf(7)});
  const auto spans = back.AwaitSpans(1);
  ASSERT_EQ(spans.size(), 1u);
  EXPECT_EQ(AttributeOf(spans[0], "number"), "7");
}

TEST(TraceExporter, SamplesByTheTrace) {
  TraceCollector collector;
  MetricRegistry registry;
  TraceExporter::Options options = OptionsFor(collector);
  const std::string low = "ffffffffffffffffff00000000000001", high = "000000000000000000ffffffffffffff";
  for (const auto& [ratio, low_too, high_too] :
       {std::tuple(0.0, false, false), std::tuple(0.5, true, false), std::tuple(1.0, true, true)}) {
    options.sample_ratio = ratio;
    const TraceExporter exporter(options, &registry);
    EXPECT_EQ(exporter.Samples(low), low_too) << ratio;
    EXPECT_EQ(exporter.Samples(high), high_too) << ratio;
  }
}

}  // namespace
}  // namespace dflash
