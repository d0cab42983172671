#include "worker/engine/block_length.h"

#include <cmath>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::Pointwise;

constexpr int64_t kBlock = 16;

TEST(RoundCostsTest, EstimatesLieOnLinesThroughWhatWasMeasured) {
  RoundCosts costs;
  EXPECT_EQ(costs.Estimate(16, 4), 0);
  costs.Observe(16, 2, 10);
  EXPECT_EQ(costs.Estimate(16, 2), 10);
  EXPECT_EQ(costs.Estimate(16, 1), 5);   // at best its share
  EXPECT_EQ(costs.Estimate(16, 8), 10);  // at best nothing more
  EXPECT_EQ(costs.Estimate(4, 2), 2.5);
  EXPECT_EQ(costs.Estimate(32, 2), 10);
  costs.Observe(16, 4, 14);
  EXPECT_EQ(costs.Estimate(16, 3), 12);
  EXPECT_EQ(costs.Estimate(16, 6), 18);
  costs.Observe(16, 5, 50);  // a line through 14 and 50 would rise by more than its share, 10
  EXPECT_EQ(costs.Estimate(16, 7), 70);
  costs.Observe(16, 6, 40);  // and none falls
  EXPECT_EQ(costs.Estimate(16, 9), 40);
  costs.Observe(1, 2, 4);
  EXPECT_DOUBLE_EQ(costs.Estimate(6, 2), 4 + (10 - 4) * 5.0 / 15);
}

TEST(RoundCostsTest, FollowsSlowlyAndStartsWithTheLeast) {
  RoundCosts costs;
  costs.Assume(4, 1, 3);
  EXPECT_EQ(costs.Estimate(4, 1), 3);
  EXPECT_EQ(costs.LastObserved(4, 1), 0);
  costs.Observe(4, 1, 100);  // a real one counts more, and this one was disturbed
  EXPECT_EQ(costs.Estimate(4, 1), 100);
  costs.Assume(4, 1, 3);
  EXPECT_EQ(costs.Estimate(4, 1), 100);
  costs.Observe(4, 1, 10);
  costs.Observe(4, 1, 20);
  EXPECT_EQ(costs.Estimate(4, 1), 10);
  costs.Observe(4, 1, 1000);
  EXPECT_DOUBLE_EQ(costs.Estimate(4, 1), 10.2);
  costs.Observe(4, 1, 0);
  EXPECT_DOUBLE_EQ(costs.Estimate(4, 1), 0.875 * 10.2);
  EXPECT_EQ(costs.LastObserved(4, 1), 5);
  EXPECT_EQ(costs.LastObserved(4, 2), 0);
}

TEST(DraftSurvivalTest, ConvergesToTheSharesOfWhatWasReached) {
  // Draft 1 is accepted in 80 % of all rounds, draft 2 in half of those, draft 3 never.
  DraftSurvival survival;
  for (int i = 0; i < 4000; ++i) survival.Observe(3, i % 5 == 0 ? 0 : i % 2 == 0 ? 1 : 2);
  const std::vector<double> probabilities = survival.Probabilities(3);
  EXPECT_THAT(probabilities, Pointwise(DoubleNear(0.02), {0.8, 0.4, 0.0}));
  // Deeper ones have never been seen: they are as good as they can be.
  EXPECT_NEAR(survival.Probabilities(4)[3], 0.95 * probabilities[2], 1e-12);
  // Short blocks say nothing about depths beyond them.
  for (int i = 0; i < 4000; ++i) survival.Observe(1, 1);
  EXPECT_NEAR(survival.Probabilities(3)[1] / survival.Probabilities(3)[0], 0.5, 0.02);
  EXPECT_GT(survival.Probabilities(3)[0], 0.99);
}

// Hard text, then plain rounds with a probe in every 256: eight probes that go well are enough, one is not,
// and where they go badly nothing changes.
TEST(DraftSurvivalTest, FadesWhileNothingIsDrafted) {
  for (const bool is_easy : {true, false}) {
    DraftSurvival survival;
    for (int i = 0; i < 1000; ++i) survival.Observe(15, 0);
    for (int probe = 1; probe <= 8; ++probe) {
      for (int i = 0; i < 255; ++i) survival.Fade();
      survival.Observe(15, is_easy ? 15 : 0);
      const double first = survival.Probabilities(1)[0];
      if (probe == 1) {
        EXPECT_LT(first, 0.1);
      }
      if (probe == 8) {
        EXPECT_TRUE(is_easy ? first > 0.6 : first < 0.05) << first;
      }
    }
  }
}

TEST(DraftSurvivalTest, ForgetsWhatIsLongAgo) {
  DraftSurvival survival;
  for (int i = 0; i < 5000; ++i) survival.Observe(15, 15);
  for (int i = 0; i < 600; ++i) survival.Observe(15, 0);
  EXPECT_LT(survival.Probabilities(1)[0], 0.2);
}

TEST(BlockLengthsTest, QuartersOfABlock) {
  EXPECT_THAT(BlockLengths(16), ElementsAre(1, 4, 8, 16));
  EXPECT_THAT(BlockLengths(8), ElementsAre(1, 2, 4, 8));
  EXPECT_THAT(BlockLengths(3), ElementsAre(1, 2, 3));
  EXPECT_THAT(BlockLengths(1), ElementsAre(1));
}

std::vector<int64_t> Drafts(int64_t sequences) {
  return std::vector<int64_t>(static_cast<size_t>(sequences), kBlock - 1);
}

// Every length and number of sequences measured; every draft accepted with this probability if those before
// it are.
BlockStatistics Measured(double acceptance, double (*seconds)(int64_t rows, int64_t sequences)) {
  BlockStatistics statistics;
  for (int64_t sequences = 1; sequences <= 128; ++sequences) {
    for (int64_t rows : BlockLengths(kBlock))
      statistics.costs.Observe(rows, sequences, seconds(rows, sequences));
  }
  std::mt19937 random(5);
  for (int round = 0; round < 20000; ++round) {
    int64_t accepted = 0;
    while (accepted < kBlock - 1 && std::generate_canonical<double, 32>(random) < acceptance) ++accepted;
    statistics.survival.Observe(kBlock - 1, accepted);
  }
  return statistics;
}

// A GPU at the 27B's shapes (docs of its floors): weights are read once, beyond some 180 rows arithmetic
// takes longer; a state is read for each sequence, drafting takes its own time.
double SecondsOfAGpu(int64_t rows, int64_t sequences) {
  const auto all = static_cast<double>(rows * sequences), count = static_cast<double>(sequences);
  const double draft = rows > 1 ? std::max(1.4, 0.12 * count) : 0;
  return 1e-3 * (std::max(11.9, 0.065 * all) + 0.07 * count + draft);
}

// Two cores: from a few rows on everything costs by the row.
double SecondsOfTwoCores(int64_t rows, int64_t sequences) {
  const auto all = static_cast<double>(rows * sequences), count = static_cast<double>(sequences);
  return 1e-3 * (0.28 + 0.11 * all + (rows > 1 ? 0.9 * count : 0));
}

int64_t RowsOf(int64_t sequences, const BlockStatistics& statistics) {
  const BlockChoice choice = ChooseBlock(Drafts(sequences), kBlock, kBlock, statistics);
  EXPECT_EQ(choice.reason, BlockReason::kBest);
  return choice.rows;
}

TEST(ChooseBlockTest, BlocksGetShorterWithMoreSequences) {
  const BlockStatistics gpu = Measured(0.86, SecondsOfAGpu);  // 6.5 tokens a round
  EXPECT_EQ(RowsOf(1, gpu), 16);
  EXPECT_EQ(RowsOf(8, gpu), 16);
  EXPECT_EQ(RowsOf(32, gpu), 8);
  EXPECT_EQ(RowsOf(64, gpu), 4);
  const BlockStatistics cores = Measured(0.93, SecondsOfTwoCores);
  EXPECT_EQ(RowsOf(1, cores), 16);
  EXPECT_EQ(RowsOf(16, cores), 1);
}

// Whatever the load and the text: what is chosen is never slower than plain decoding, nor than whole blocks.
TEST(ChooseBlockTest, IsNeverSlowerThanPlainDecoding) {
  for (auto* seconds : {SecondsOfAGpu, SecondsOfTwoCores}) {
    for (double acceptance : {0.05, 0.3, 0.6, 0.86, 0.95}) {
      const BlockStatistics statistics = Measured(acceptance, seconds);
      for (int64_t sequences = 1; sequences <= 128; sequences *= 2) {
        const auto rate = [&](int64_t rows) {
          const double tokens = (1 - std::pow(acceptance, rows)) / (1 - acceptance);
          return tokens / seconds(rows, sequences);
        };
        const double chosen = rate(RowsOf(sequences, statistics));
        EXPECT_GE(chosen, 0.98 * rate(1)) << acceptance << " " << sequences;
        EXPECT_GE(chosen, 0.98 * rate(16)) << acceptance << " " << sequences;
      }
    }
  }
}

TEST(ChooseBlockTest, SaysWhetherLoadOrAcceptanceMakesItPlain) {
  EXPECT_FALSE(ChooseBlock(Drafts(16), kBlock, kBlock, Measured(0.93, SecondsOfTwoCores)).low_acceptance);
  const BlockStatistics poor = Measured(0.1, SecondsOfTwoCores);
  EXPECT_EQ(RowsOf(1, poor), 1);
  EXPECT_TRUE(ChooseBlock(Drafts(1), kBlock, kBlock, poor).low_acceptance);
}

TEST(ChooseBlockTest, StaysUnlessAnotherLengthIsClearlyBetter) {
  // 8 rows are 3 % better than 16, then 8 %.
  const auto measured = [](double seconds_of_8) {
    BlockStatistics statistics;
    for (int i = 0; i < 3000; ++i) statistics.survival.Observe(15, 7);  // 8 tokens with 8 and 16 rows
    statistics.costs.Observe(16, 1, 1.0);
    statistics.costs.Observe(8, 1, seconds_of_8);
    statistics.costs.Observe(4, 1, 0.9);
    statistics.costs.Observe(1, 1, 0.8);
    return statistics;
  };
  BlockStatistics statistics = measured(0.97);
  statistics.rows = 16;
  EXPECT_EQ(RowsOf(1, statistics), 16);
  statistics.rows = 8;
  EXPECT_EQ(RowsOf(1, statistics), 8);
  statistics = measured(0.92);
  statistics.rows = 16;
  EXPECT_EQ(RowsOf(1, statistics), 8);
}

TEST(ChooseBlockTest, LimitsAndRequestsThatDoNotSpeculate) {
  const BlockStatistics gpu = Measured(0.86, SecondsOfAGpu);
  BlockChoice choice = ChooseBlock({0, 0}, kBlock, kBlock, gpu);
  EXPECT_EQ(choice.rows, 1);
  EXPECT_EQ(choice.reason, BlockReason::kNoDrafts);
  choice = ChooseBlock(Drafts(4), kBlock, 1, gpu);
  EXPECT_EQ(choice.rows, 1);
  EXPECT_EQ(choice.reason, BlockReason::kRowLimit);
  // The limit is a length of its own.
  EXPECT_EQ(ChooseBlock(Drafts(4), kBlock, 11, gpu).rows, 11);
  // Nobody may have more than three drafts.
  BlockStatistics uniform = gpu;
  uniform.uniform_rows = true;
  EXPECT_EQ(ChooseBlock({3, 3, 0}, kBlock, kBlock, uniform).rows, 4);
}

// Nothing is known but what a round of one sequence costs, and one after the other is found out.
TEST(ChooseBlockTest, FindsTheBestLengthByTryingWhatLooksGood) {
  for (auto* seconds : {SecondsOfAGpu, SecondsOfTwoCores}) {
    for (int64_t sequences : {1, 4, 16, 64}) {
      const auto rate = [&](int64_t rows) {
        return (1 - std::pow(0.86, rows)) / 0.14 / seconds(rows, sequences);
      };
      double best = 0;
      for (int64_t rows : BlockLengths(kBlock)) best = std::max(best, rate(rows));
      BlockStatistics statistics = Measured(0.86, seconds);
      statistics.costs = {};
      statistics.costs.Assume(1, 1, seconds(1, 1));
      statistics.costs.Assume(16, 1, seconds(16, 1));
      int slow = 0;
      for (int round = 0; round < 50; ++round) {
        statistics.rows = RowsOf(sequences, statistics);
        statistics.costs.Observe(statistics.rows, sequences, seconds(statistics.rows, sequences));
        slow += rate(statistics.rows) < 0.94 * best;
      }
      EXPECT_LE(slow, 4) << sequences;
      EXPECT_GE(rate(statistics.rows), 0.94 * best) << sequences;
    }
  }
}

TEST(ChooseBlockTest, ProbesWhatWasMeasuredLongestAgoWhenThereIsTime) {
  BlockStatistics statistics = Measured(0.86, SecondsOfAGpu);
  statistics.rows = 16;
  statistics.costs.Observe(1, 4, SecondsOfAGpu(1, 4));
  statistics.costs.Observe(4, 4, SecondsOfAGpu(4, 4));
  statistics.rounds_since_probe = 255;
  statistics.seconds_since_probe = 100;
  EXPECT_EQ(RowsOf(4, statistics), 16);
  statistics.rounds_since_probe = 256;
  BlockChoice choice = ChooseBlock(Drafts(4), kBlock, kBlock, statistics);
  EXPECT_EQ(choice.reason, BlockReason::kProbe);
  EXPECT_EQ(choice.rows, 8);
  statistics.costs.Observe(8, 4, SecondsOfAGpu(8, 4));
  EXPECT_EQ(ChooseBlock(Drafts(4), kBlock, kBlock, statistics).rows, 1);
  // A plain step costs 12.2 ms and gives what takes 2 ms otherwise: 2 % of 0.4 s are too little.
  statistics.seconds_since_probe = 0.4;
  choice = ChooseBlock(Drafts(4), kBlock, kBlock, statistics);
  EXPECT_TRUE(choice.reason == BlockReason::kBest || choice.rows == 8 || choice.rows == 4);
  EXPECT_NE(choice.rows, 1);
}

// Costs that differ from round to round by a third, around those for which two lengths are alike.
TEST(ChooseBlockTest, DoesNotFlap) {
  BlockStatistics statistics;
  for (int i = 0; i < 3000; ++i) statistics.survival.Observe(15, 7);
  std::mt19937 random(3);
  std::uniform_real_distribution<double> noise(0.85, 1.15);
  int changes = 0;
  for (int round = 0; round < 5000; ++round) {
    const int64_t rows = ChooseBlock(Drafts(2), kBlock, kBlock, statistics).rows;
    changes += statistics.rows != 0 && rows != statistics.rows;
    statistics.rows = rows;
    statistics.costs.Observe(rows, 2, noise(random) * (rows == 1 ? 0.9 : rows == 4 ? 0.95 : 1));
  }
  EXPECT_LE(changes, 25);
}

// Half of all rounds take up to ten times as long as they should. The best length, better by 9 % than the
// next one, is still used in most rounds, though the others are measured hardly ever.
TEST(ChooseBlockTest, DisturbedRoundsDoNotDriveItAway) {
  int best = 0;
  for (uint32_t seed = 0; seed < 10; ++seed) {
    BlockStatistics statistics = Measured(0.93, SecondsOfTwoCores);
    std::mt19937 random(seed);
    for (int round = 0; round < 4000; ++round) {
      const BlockChoice choice = ChooseBlock(Drafts(1), kBlock, kBlock, statistics);
      best += choice.rows == 16;
      if (choice.reason == BlockReason::kBest) statistics.rows = choice.rows;
      const double disturbed = random() % 2 == 0 ? 1 : 1 + static_cast<double>(random() % 900) / 100;
      const double seconds = disturbed * SecondsOfTwoCores(choice.rows, 1);
      statistics.costs.Observe(choice.rows, 1, seconds);
      ++statistics.rounds_since_probe;
      statistics.seconds_since_probe += seconds;
      if (choice.reason != BlockReason::kProbe) continue;
      statistics.rounds_since_probe = 0;
      statistics.seconds_since_probe = 0;
    }
  }
  EXPECT_GT(best, 32000);
}

}  // namespace
}  // namespace dflash
