// The measurements on the small pair: synthetic acceptance commits what it was told to, and the text stays
// the target's.
#include "gtest/gtest.h"
#include "tools/step_bench/steps.h"

namespace dflash::bench {
namespace {

Group LoadSmallPair() {
  GroupOptions options;
  options.model = DFLASHD_SOURCE_DIR "/models/tiny-qwen3.6";
  options.draft_model = DFLASHD_SOURCE_DIR "/models/tiny-qwen3.6-dflash";
  options.threads = 1;
  options.max_sequences = 3;
  options.max_context_tokens = 1024;
  absl::StatusOr<Group> group = LoadGroup(options, [](const std::string&) {});
  EXPECT_TRUE(group.ok()) << group.status();
  return *std::move(group);
}

TEST(StepBenchTest, SyntheticAcceptanceCommitsItsMeanAndKeepsTheText) {
  const Group group = LoadSmallPair();
  for (int64_t sequences : {1, 3}) {
    for (float temperature : {0.0f, 0.7f}) {
      RoundCase c;
      c.sequences = sequences;
      c.context_tokens = 100;
      c.sampling = {.temperature = temperature, .top_k = 20, .top_p = 1, .min_p = 0, .seed = 3};
      c.rounds = 24;
      const absl::StatusOr<RoundFigures> figures = MeasureRounds(group, c, 64);
      ASSERT_TRUE(figures.ok()) << figures.status();
      ASSERT_EQ(figures->drafted.size(), 1u);
      EXPECT_EQ(figures->drafted[0].tokens_per_round, 6.5);  // every count from 0 to 11 twice
      EXPECT_EQ(figures->plain.round.size(), figures->plain.target.size());
      EXPECT_EQ(figures->drafted[0].times.round.size(), 24u);
    }
  }
  // Nothing is left behind.
  EXPECT_EQ(group.table->free_slots(), 3);
  EXPECT_EQ(group.table->free_pages(), group.table->pages());
}

// Each draft is accepted with probability 0.86: 6.5 tokens of 16 rows, 5.0 of 8, 3.2 of 4.
TEST(StepBenchTest, ShorterBlocksCommitLess) {
  const Group group = LoadSmallPair();
  RoundCase c;
  c.sequences = 2;
  c.context_tokens = 100;
  c.acceptance = RoundCase::Acceptance::kGeometric;
  c.block_rows = {4, 8, 16};
  c.rounds = 24;
  const absl::StatusOr<RoundFigures> figures = MeasureRounds(group, c, 64);
  ASSERT_TRUE(figures.ok()) << figures.status();
  ASSERT_EQ(figures->drafted.size(), 3u);
  EXPECT_NEAR(figures->drafted[0].tokens_per_round, 3.24, 0.1);
  EXPECT_NEAR(figures->drafted[1].tokens_per_round, 5.0, 0.15);
  EXPECT_NEAR(figures->drafted[2].tokens_per_round, 6.5, 0.2);
  EXPECT_EQ(figures->acceptance.size(), 48u);
  const LoadFigures load = SumUpLoad(c, *figures, 16);
  EXPECT_GE(load.best, std::max(load.plain, load.chosen));
  EXPECT_TRUE(load.chosen_rows == 1 || load.chosen_rows == 4 || load.chosen_rows == 8 ||
              load.chosen_rows == 16);
}

TEST(StepBenchTest, PrefillAndFirstToken) {
  const Group group = LoadSmallPair();
  const absl::StatusOr<std::unique_ptr<Engine>> engine = group.MakeEngine(64, nullptr);
  ASSERT_TRUE(engine.ok()) << engine.status();
  const absl::StatusOr<std::vector<double>> prefill = MeasurePrefill(group, 100, 64, 2);
  ASSERT_TRUE(prefill.ok()) << prefill.status();
  EXPECT_EQ(prefill->size(), 2u);
  const absl::StatusOr<std::vector<double>> first = MeasureFirstToken(**engine, group.vocabulary, 100, 2);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->size(), 2u);
  for (double seconds : *first) EXPECT_LT(seconds, 1e9);  // a token did come
}

TEST(StepBenchTest, WhatDoesNotFitIsAnError) {
  const Group group = LoadSmallPair();
  RoundCase c;
  c.context_tokens = 1000;
  EXPECT_EQ(MeasureRounds(group, c, 64).status().code(), absl::StatusCode::kInvalidArgument);
  c.context_tokens = 100;
  c.sequences = 4;
  EXPECT_EQ(MeasureRounds(group, c, 64).status().code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace dflash::bench
