// Blocks whose length changes from round to round: the text stays what it is, the drafter's context too, and
// the length follows what rounds are said to cost.
#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "worker/testing/company.h"
#include "worker/testing/tiny_pair.h"

namespace dflash {
namespace {

using testing::LoadTinyPair;
using testing::MixedRequests;
using testing::RunInCompany;
using testing::RunOneByOne;
using testing::TinyPair;

class Blocks final : public StepObserver {
 public:
  void OnStep(const StepReport& report, const EngineGauges&) override {
    for (const BlockReport& block : report.blocks) {
      changes += last != 0 && block.rows != last;
      last = block.rows;
      ++rounds[block.rows];
      ++reasons[block.reason];
    }
    for (const DecodedRound& decoded : report.rounds) accepted += decoded.round.accepted;
    for (const std::string& reason : report.not_speculated) ++skipped[reason];
  }
  int64_t last = 0, changes = 0, accepted = 0;
  std::map<int64_t, int64_t> rounds;  // by block rows
  std::map<BlockReason, int64_t> reasons;
  std::map<std::string, int64_t> skipped;
};

std::unique_ptr<Engine> MakeEngine(TinyPair& pair, EngineOptions options) {
  options.vocabulary = pair.vocabulary;
  auto engine = Engine::Create(options, pair.target.get(), pair.drafter.get(), pair.table.get(),
                               pair.tokenizer.get(), *pair.stream);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return *std::move(engine);
}

struct Mode {
  bool captured;
  int64_t rounds_ahead;
};

std::string NameOfMode(const ::testing::TestParamInfo<Mode>& info) {
  return std::string(info.param.captured ? "Captured" : "Eager") + std::to_string(info.param.rounds_ahead) +
         "Ahead";
}

class BlockJumpsTest : public ::testing::TestWithParam<Mode> {};

// With every number of sequences another length is the best, and more sequences cost more than anybody
// expects, so that all lengths are tried with each number of them.
TEST_P(BlockJumpsTest, TextStaysTheSame) {
  testing::TinyPairOptions pools;
  pools.slots = 6;
  pools.pages = 24;
  absl::StatusOr<TinyPair> pair = LoadTinyPair(pools);
  ASSERT_TRUE(pair.ok()) << pair.status();
  const std::vector<GenerationRequest> requests =
      MixedRequests(24, 21, {.longest_prompt = 100, .most_tokens = 96});
  Blocks blocks;
  EngineOptions options;
  options.adaptive_blocks = true;
  options.captured_rounds = GetParam().captured;
  options.rounds_ahead = GetParam().rounds_ahead;
  options.observer = &blocks;
  options.round_cost = [](int64_t rows, int64_t sequences) {
    constexpr int64_t kFavourites[] = {4, 16, 1, 8, 1, 4};
    const auto count = static_cast<double>(sequences);
    return count * count * count * count * (rows == kFavourites[sequences % 6] ? 1 : 20);
  };
  const std::unique_ptr<Engine> engine = MakeEngine(*pair, options);
  ASSERT_EQ(engine->WarmUp(2), absl::OkStatus());
  const auto expected = RunOneByOne(*MakeEngine(*pair, EngineOptions()), requests);
  ASSERT_TRUE(expected.ok()) << expected.status();
  const auto actual = RunInCompany(*engine, requests, {.seed = 4, .most_arrivals = 6, .cancelled = 6});
  ASSERT_TRUE(actual.ok()) << actual.status();
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ((*actual)[i].tokens, (*expected)[i].tokens) << requests[i].id;
    EXPECT_EQ((*actual)[i].text, (*expected)[i].text) << requests[i].id;
  }
  EXPECT_GE(blocks.rounds.size(), 3u);
  EXPECT_GE(blocks.changes, 5);
  EXPECT_GT(blocks.accepted, 0);
  EXPECT_GT(blocks.skipped["auto_batch"] + blocks.skipped["auto_low_accept"], 0);
}

INSTANTIATE_TEST_SUITE_P(Modes, BlockJumpsTest,
                         ::testing::Values(Mode{false, 0}, Mode{true, 0}, Mode{true, 2}), NameOfMode);

class BlockLengthByLoadTest : public ::testing::TestWithParam<Mode> {};

// Rounds cost what rows cost on two cores. One sequence keeps to whole blocks, sixteen decode plainly, and
// one that is alone again drafts again at once, from a context that has gone on meanwhile.
TEST_P(BlockLengthByLoadTest, FollowsTheLoad) {
  testing::TinyPairOptions pools;
  pools.slots = 16;
  absl::StatusOr<TinyPair> pair = LoadTinyPair(pools);
  ASSERT_TRUE(pair.ok()) << pair.status();
  Blocks blocks;
  EngineOptions options;
  options.observer = &blocks;
  options.captured_rounds = GetParam().captured;
  options.rounds_ahead = GetParam().rounds_ahead;
  options.round_cost = [](int64_t rows, int64_t sequences) {
    return 2 + 0.3 * static_cast<double>(std::max<int64_t>(rows * sequences - 16, 0));
  };
  const auto golden = testing::LoadGoldenPrompts();
  ASSERT_TRUE(golden.ok()) << golden.status();
  std::vector<GenerationRequest> requests;
  for (const testing::GoldenPrompt& prompt : *golden) {
    if (prompt.kind == "chat") requests.push_back(testing::GoldenRequest(prompt));
  }
  ASSERT_EQ(requests.size(), 16u);
  const std::unique_ptr<Engine> whole = MakeEngine(*pair, options);
  options.adaptive_blocks = true;
  const std::unique_ptr<Engine> engine = MakeEngine(*pair, options);
  ASSERT_EQ(engine->WarmUp(1), absl::OkStatus());
  const auto expected = RunOneByOne(*whole, requests);
  ASSERT_TRUE(expected.ok()) << expected.status();
  EXPECT_EQ(blocks.rounds.size(), 1u);
  EXPECT_EQ(blocks.reasons.count(BlockReason::kBest), 0u);

  const auto run = [&](bool together) {
    blocks = {};
    const auto actual = together ? testing::RunAll(*engine, requests) : RunOneByOne(*engine, requests);
    ASSERT_TRUE(actual.ok()) << actual.status();
    for (size_t i = 0; i < requests.size(); ++i) {
      EXPECT_EQ((*actual)[i].tokens, (*expected)[i].tokens) << requests[i].id;
    }
  };
  run(/*together=*/false);
  EXPECT_EQ(blocks.rounds.size(), 1u) << "one sequence: whole blocks, but for probes";
  // Of each captured shape two rounds are run before one is timed, and each length is tried before it is
  // given up: a few short bursts.
  const int most_bursts = GetParam().captured ? 12 : 1;
  for (int burst = 0; burst < most_bursts && blocks.rounds[1] <= 40; ++burst) run(/*together=*/true);
  EXPECT_GT(blocks.rounds[1], 40) << "sixteen: plain steps";
  EXPECT_GT(blocks.skipped["auto_batch"], 0);
  EXPECT_EQ(blocks.skipped["auto_low_accept"], 0);
  run(/*together=*/false);
  EXPECT_GT(blocks.rounds[16], 90) << "one sequence again: whole blocks, about ten tokens each";
  EXPECT_LE(blocks.rounds[1] + blocks.rounds[4] + blocks.rounds[8], 1);
}

INSTANTIATE_TEST_SUITE_P(Modes, BlockLengthByLoadTest, ::testing::Values(Mode{false, 0}, Mode{true, 1}),
                         NameOfMode);

}  // namespace
}  // namespace dflash
