#include "tools/dflashctl/load_report.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tools/dflashctl/load_plot.h"

namespace dflash::ctl {
namespace {

using ::testing::HasSubstr;

TEST(Quantiles, NearestRankWithWeights) {
  EXPECT_EQ(QuantilesOf({}).count, 0);
  const Quantiles one = QuantilesOf({{3, 1}});
  EXPECT_EQ(one.p50, 3);
  EXPECT_EQ(one.p999, 3);
  std::vector<std::pair<double, int64_t>> thousand;
  for (int i = 1000; i >= 1; --i) thousand.emplace_back(i, 1);
  const Quantiles many = QuantilesOf(thousand);
  EXPECT_EQ(many.p50, 500);
  EXPECT_EQ(many.p90, 900);
  EXPECT_EQ(many.p95, 950);
  EXPECT_EQ(many.p99, 990);
  EXPECT_EQ(many.p999, 999);
  EXPECT_EQ(many.max, 1000);
  EXPECT_EQ(many.mean, 500.5);
  const Quantiles weighted = QuantilesOf({{1, 9}, {100, 1}});
  EXPECT_EQ(weighted.count, 10);
  EXPECT_EQ(weighted.p50, 1);
  EXPECT_EQ(weighted.p90, 1);
  EXPECT_EQ(weighted.p95, 100);
  EXPECT_DOUBLE_EQ(weighted.mean, 10.9);
}

LoadSample Finished(double first_token, double last_token, double end, int64_t tokens) {
  LoadSample sample;
  sample.due = 2;
  sample.first_token = first_token;
  sample.last_token = last_token;
  sample.end = end;
  sample.tokens = tokens;
  sample.prompt_tokens = 10;
  sample.rounds = 2;
  sample.drafted = 30;
  sample.accepted = tokens - 3;
  return sample;
}

TEST(Slo, EveryBoundCounts) {
  const LoadSample sample = Finished(0.1, 0.5, 0.6, 5);  // 0.1 per token
  EXPECT_TRUE(Meets(sample, {}));
  EXPECT_TRUE(Meets(sample, {.first_token = 0.1, .per_token = 0.11, .total = 0.6}));
  EXPECT_FALSE(Meets(sample, {.first_token = 0.09, .per_token = {}, .total = {}}));
  EXPECT_FALSE(Meets(sample, {.first_token = {}, .per_token = 0.09, .total = {}}));
  EXPECT_FALSE(Meets(sample, {.first_token = {}, .per_token = {}, .total = 0.59}));
  LoadSample failed = sample;
  failed.code = grpc::StatusCode::UNAVAILABLE;
  EXPECT_FALSE(Meets(failed, {}));
}

LoadResult Result() {
  LoadResult result;
  result.phase.rate = 4;
  result.wall_seconds = 10;
  result.requests = {Finished(0.1, 0.5, 0.6, 5), Finished(0.2, 1.2, 1.2, 11)};
  LoadSample refused;
  refused.due = 2;
  refused.code = grpc::StatusCode::RESOURCE_EXHAUSTED;
  refused.reason = "QUEUE_FULL";
  refused.end = 0.003;
  refused.retry_after = 1.5;
  result.requests.push_back(refused);
  refused.retry_after = -1;
  result.requests.push_back(refused);
  LoadSample failed = Finished(0.1, 0.2, 0.3, 2);
  failed.code = grpc::StatusCode::UNAVAILABLE;
  failed.reason = "WORKER_LOST";
  result.requests.push_back(failed);
  LoadSample cut = Finished(0.1, 0.2, 0.3, 3);  // refused after it had begun is a failure
  cut.code = grpc::StatusCode::RESOURCE_EXHAUSTED;
  cut.reason = "SLOW_CONSUMER";
  result.requests.push_back(cut);
  result.steps = {{2, 0.1, 1}, {2, 0.4, 4}, {2, 0.3, 1}};
  return result;
}

TEST(LoadReport, Figures) {
  const LoadFigures figures = Summarize(Result(), {.first_token = 0.15, .per_token = {}, .total = {}});
  EXPECT_EQ(figures.sent, 6);
  EXPECT_EQ(figures.finished, 2);
  EXPECT_EQ(figures.refused, 2);
  EXPECT_EQ(figures.refused_without_hint, 1);
  EXPECT_EQ(figures.failed, 2);
  EXPECT_EQ(figures.tokens, 21);
  EXPECT_DOUBLE_EQ(figures.tokens_per_second, 2.1);
  EXPECT_DOUBLE_EQ(figures.requests_per_second, 0.2);
  EXPECT_DOUBLE_EQ(figures.good_requests_per_second, 0.1);
  EXPECT_DOUBLE_EQ(figures.good_share, 1.0 / 6);
  EXPECT_DOUBLE_EQ(figures.tokens_per_round, 1 + 9.0 / 8);
  EXPECT_EQ(figures.first_token.count, 2);
  EXPECT_EQ(figures.first_token.p50, 0.1);
  EXPECT_EQ(figures.total.max, 1.2);
  EXPECT_EQ(figures.refusal.count, 2);
  EXPECT_EQ(figures.refusal.max, 0.003);
  EXPECT_EQ(figures.step_interval.count, 3);
  EXPECT_EQ(figures.step_interval.p50, 0.3);
  EXPECT_EQ(figures.per_token.count, 6);
  EXPECT_EQ(figures.per_token.p50, 0.1);
  EXPECT_DOUBLE_EQ(figures.request_per_token.p50, 0.1);
  EXPECT_EQ(figures.ends.at("OK"), 2);
  EXPECT_EQ(figures.ends.at("UNAVAILABLE WORKER_LOST"), 1);
  EXPECT_EQ(Summarize(Result(), {}, /*warm_up=*/3).sent, 0);
}

TEST(LoadReport, TableJsonAndSamples) {
  const LoadFigures figures = Summarize(Result(), {});
  const std::string table = FormatLoadTable({figures, figures});
  EXPECT_THAT(table, HasSubstr("load                                       open 4/s         open 4/s\n"));
  EXPECT_THAT(table, HasSubstr("  first token                           100.0/200.0      100.0/200.0\n"));
  EXPECT_THAT(table, HasSubstr("open 4/s: 2 x RESOURCE_EXHAUSTED QUEUE_FULL\n"));
  const auto json = nlohmann::json::parse(FormatLoadJson({figures}));
  EXPECT_EQ(json["phases"][0]["ends"]["RESOURCE_EXHAUSTED SLOW_CONSUMER"], 1);
  EXPECT_EQ(json["phases"][0]["first_token_seconds"]["p99"], 0.2);
  const std::string samples = FormatSamples({Result()});
  EXPECT_EQ(std::count(samples.begin(), samples.end(), '\n'), 7);
  EXPECT_THAT(samples, HasSubstr("UNAVAILABLE WORKER_LOST"));
  EXPECT_EQ(FormatLoadTable({Summarize({}, {})}).find("nan"), std::string::npos);
}

TEST(LoadPlot, HasACurveAPhaseAndNoNonsense) {
  const LoadFigures figures = Summarize(Result(), {});
  const std::string svg = FormatPlot({Result(), Result()}, {figures, figures});
  EXPECT_TRUE(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
  size_t curves = 0;
  for (size_t at = 0; (at = svg.find("<polyline", at)) != std::string::npos; ++at) ++curves;
  EXPECT_EQ(curves, 4u);
  // 0.1 s in panel one, from 100 ms to 1 s: at its left edge; one of six requests.
  EXPECT_THAT(svg, HasSubstr("points=\"60.0,223.3 156.3,186.7 \""));
  for (const std::string& plot : {svg, FormatPlot({}, {}), FormatPlot({{}}, {Summarize({}, {})})}) {
    EXPECT_EQ(plot.find("nan"), std::string::npos);
    EXPECT_EQ(plot.find("inf"), std::string::npos);
  }
}

}  // namespace
}  // namespace dflash::ctl
