// More requests than the server can do: what is taken is served, the rest is told at once to come again, and
// every request is counted exactly once on both sides.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/integration/server.h"

namespace dflash::integration {
namespace {

TEST(OverloadTest, WhatIsNotServedIsRefusedAndEverythingAddsUp) {
  Server server({"--max-sequences", "2", "--max-queued-requests", "2", "--max-prefill-tokens", "64"});
  ASSERT_NE(server.channel(), nullptr);
  // Far more than two sequences of this length can be served on any machine; all of it within two seconds.
  const Ran ran = server.Dflashctl({"bench",
                                    "--mode",
                                    "open",
                                    "--rates",
                                    "200",
                                    "--max-requests",
                                    "300",
                                    "--seconds",
                                    "60",
                                    "--clients",
                                    "4",
                                    "--prompt-tokens",
                                    "uniform:200:600",
                                    "--output-tokens",
                                    "uniform:20:60",
                                    "--ignore-eos",
                                    "--speculation",
                                    "off",
                                    "--quiet",
                                    "--json"});
  ASSERT_EQ(ran.exit_code, ctl::kSuccess) << ran.output;
  const nlohmann::json answer = nlohmann::json::parse(ran.output, nullptr, false);
  ASSERT_FALSE(answer.is_discarded()) << ran.output;
  const nlohmann::json& load = answer["phases"][0];
  EXPECT_EQ(load["sent"], 300);
  EXPECT_EQ(load["failed"], 0) << load["ends"];
  EXPECT_EQ(load["finished"].get<int>() + load["refused"].get<int>(), 300);
  EXPECT_GE(load["finished"], 4) << "the first of them fill slots and queue";
  EXPECT_GT(load["refused"], 50) << "this was no overload";
  EXPECT_EQ(load["refused_without_hint"], 0);
  EXPECT_EQ(load["ends"]["RESOURCE_EXHAUSTED QUEUE_FULL"], load["refused"]);

  ASSERT_TRUE(server.WaitUntilIdle());
  const std::string page = server.Metrics();
  EXPECT_EQ(SumOfMetric(page, "dflashd_requests_total"), 300);
  EXPECT_EQ(SumOfMetric(page, "dflashd_requests_total", "outcome=\"length\""),
            load["finished"].get<double>());
  EXPECT_EQ(SumOfMetric(page, "dflashd_requests_total", "outcome=\"rejected\""),
            load["refused"].get<double>());
  EXPECT_EQ(SumOfMetric(page, "dflashd_requests_rejected_total", "reason=\"queue_full\""),
            load["refused"].get<double>());
  EXPECT_EQ(SumOfMetric(page, "dflashd_requests_rejected_total"), load["refused"].get<double>());
  EXPECT_EQ(SumOfMetric(page, "dflashd_grpc_server_handled_total", "method=\"Generate\""), 300);
  EXPECT_EQ(SumOfMetric(page, "dflashd_generated_tokens_total"), load["tokens"].get<double>());
  EXPECT_EQ(SumOfMetric(page, "dflashd_prompt_tokens_total"), load["prompt_tokens"].get<double>());
  EXPECT_EQ(SumOfMetric(page, "dflashd_requests_waiting"), 0);
  EXPECT_EQ(SumOfMetric(page, "dflashd_requests_running"), 0);
  EXPECT_TRUE(PollUntil([&] {
    const v1::GroupLoad group = server.Load().groups(0);
    return group.cache_pages_free() == group.cache_pages_total();
  })) << "pages are lost";
  EXPECT_EQ(server.GenerateOk(ShortRequest()).token_ids.size(), 4u);
}

// A closed loop's clients follow the hints, so that all of them are served in the end.
TEST(OverloadTest, ClientsThatFollowTheHintsAreServed) {
  Server server({"--max-sequences", "1", "--max-queued-requests", "1"});
  ASSERT_NE(server.channel(), nullptr);
  const Ran ran = server.Dflashctl(
      {"bench", "--mode", "closed", "--clients", "4", "--seconds", "60", "--max-requests", "40", "--prompts",
       SourcePath("tests/golden/golden.json"), "--output-tokens", "40", "--quiet", "--json"});
  ASSERT_EQ(ran.exit_code, ctl::kSuccess) << ran.output;
  const nlohmann::json answer = nlohmann::json::parse(ran.output, nullptr, false);
  ASSERT_FALSE(answer.is_discarded()) << ran.output;
  const nlohmann::json& load = answer["phases"][0];
  EXPECT_EQ(load["failed"], 0) << load["ends"];
  EXPECT_EQ(load["refused_without_hint"], 0);
  EXPECT_EQ(load["sent"], 40);
  EXPECT_GT(load["finished"], 10);
  EXPECT_GT(load["acceptance"], 0.1) << "and drafts are made and accepted";
}

}  // namespace
}  // namespace dflash::integration
