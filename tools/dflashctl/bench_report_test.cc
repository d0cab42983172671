#include "tools/dflashctl/bench_report.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace dflash::ctl {
namespace {

using ::testing::HasSubstr;

TEST(Percentile, NearestRank) {
  EXPECT_EQ(Percentile({}, 0.5), 0);
  EXPECT_EQ(Percentile({3}, 0.99), 3);
  EXPECT_EQ(Percentile({4, 1, 3, 2}, 0.5), 2);
  EXPECT_EQ(Percentile({4, 1, 3, 2}, 0.51), 3);
  EXPECT_EQ(Percentile({4, 1, 3, 2}, 0.9), 4);
  std::vector<double> hundred;
  for (int i = 100; i >= 1; --i) hundred.push_back(i);
  EXPECT_EQ(Percentile(hundred, 0.99), 99);
  EXPECT_EQ(Percentile(hundred, 1), 100);
}

BenchArm Off() {
  return {"off", {{11, 10, 0, 0, 0.1, 1.1, 1.0, 0, 0.9}, {21, 20, 0, 0, 0.3, 4.3, 4.0, 0, 3.9}}, 5.4};
}
BenchArm DFlash() {
  return {
      "dflash", {{11, 2, 30, 8, 0.1, 0.3, 0.2, 0.02, 0.08}, {21, 4, 60, 16, 0.2, 0.6, 0.4, 0.04, 0.16}}, 0.9};
}

TEST(BenchReport, Figures) {
  const BenchFigures off = Summarize(Off());
  EXPECT_EQ(off.requests, 2);
  EXPECT_EQ(off.tokens, 32);
  EXPECT_DOUBLE_EQ(off.tokens_per_second, 32 / 5.4);
  EXPECT_DOUBLE_EQ(off.decode_tokens_per_second, 5);  // of 10 and 5: nearest rank takes the lower middle
  EXPECT_DOUBLE_EQ(off.tokens_per_round, 1);
  EXPECT_DOUBLE_EQ(off.acceptance, 0);
  EXPECT_DOUBLE_EQ(off.verify_seconds_per_round, 4.8 / 30);
  const BenchFigures on = Summarize(DFlash());
  EXPECT_DOUBLE_EQ(on.tokens_per_round, 1 + 24.0 / 6);
  EXPECT_DOUBLE_EQ(on.acceptance, 24.0 / 90);
  EXPECT_DOUBLE_EQ(on.draft_seconds_per_round, 0.01);
  EXPECT_DOUBLE_EQ(on.verify_seconds_per_round, 0.04);
  EXPECT_DOUBLE_EQ(on.first_token_p50_seconds, 0.1);
  EXPECT_DOUBLE_EQ(on.first_token_p99_seconds, 0.2);
}

TEST(BenchReport, EmptyArmHasNoNan) {
  EXPECT_EQ(FormatTable({{"off", {}, 0}, {"dflash", {}, 0}}).find("nan"), std::string::npos);
}

TEST(BenchReport, TableAndJson) {
  const std::string table = FormatTable({Off(), DFlash()});
  EXPECT_THAT(table, HasSubstr("speculation                              off      dflash       ratio\n"));
  EXPECT_THAT(table, HasSubstr("tokens per round                       1.000       5.000        5.00\n"));
  EXPECT_THAT(table, HasSubstr("draft, ms per round                    0.000      10.000\n"));
  const auto json = nlohmann::json::parse(FormatJson({Off(), DFlash()}));
  EXPECT_EQ(json["arms"][1]["name"], "dflash");
  EXPECT_EQ(json["arms"][1]["tokens"], 32);
  EXPECT_DOUBLE_EQ(json["arms"][1]["draft_seconds_per_round"].get<double>(), 0.01);
}

}  // namespace
}  // namespace dflash::ctl
