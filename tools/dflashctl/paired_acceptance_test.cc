#include "tools/dflashctl/paired_acceptance.h"

#include "gtest/gtest.h"

namespace dflash::ctl {
namespace {

std::vector<RoundPair> Times(size_t count, RoundPair round) { return std::vector<RoundPair>(count, round); }
std::vector<RoundPair> operator+(std::vector<RoundPair> rounds, const std::vector<RoundPair>& more) {
  rounds.insert(rounds.end(), more.begin(), more.end());
  return rounds;
}
bool Fails(const AcceptanceLoss& loss) { return loss.tells && loss.loss > loss.limit; }

// Of a drafter with six accepted drafts in sixteen rounds one may be lost to a near tie: 0.17 is no defect.
TEST(PairedAcceptanceTest, OneDraftOfAWeakDrafterIsChance) {
  const AcceptanceLoss loss = CompareRounds(Times(10, {0, 0}) + Times(5, {1, 1}) + Times(1, {0, 1}));
  EXPECT_NEAR(loss.loss, 1.0 / 6, 1e-12);
  EXPECT_NEAR(loss.limit, 0.5, 1e-12);  // 3 sqrt(15 / 16 / (16 15)) rounds / 6 drafts
  EXPECT_FALSE(Fails(loss));
}

TEST(PairedAcceptanceTest, TheSameShareOfManyRoundsIsALoss) {
  const AcceptanceLoss loss = CompareRounds(Times(240, {1, 1}) + Times(60, {0, 1}));
  EXPECT_NEAR(loss.loss, 0.2, 1e-12);
  EXPECT_TRUE(Fails(loss));
  EXPECT_FALSE(Fails(CompareRounds(Times(8, {1, 1}) + Times(2, {0, 1})))) << "of ten it may be chance";
}

TEST(PairedAcceptanceTest, RoundsThatLoseMostOfTheirDraftsFail) {
  EXPECT_TRUE(Fails(CompareRounds(Times(4, {1, 9}) + Times(4, {0, 7}) + Times(4, {4, 15}))));
  EXPECT_TRUE(Fails(CompareRounds(Times(8, {0, 1}))));
  EXPECT_FALSE(Fails(CompareRounds(Times(7, {9, 9}) + Times(1, {0, 9})))) << "one round of eight";
  EXPECT_FALSE(Fails(CompareRounds(Times(8, {9, 5})))) << "more than the others";
}

// Where few rounds accept anything, nothing that is lost would show.
TEST(PairedAcceptanceTest, TooFewDraftsTellNothing) {
  EXPECT_FALSE(CompareRounds({}).tells);
  EXPECT_FALSE(CompareRounds(Times(16, {0, 0})).tells);
  EXPECT_FALSE(CompareRounds(Times(1, {9, 9})).tells);
  EXPECT_FALSE(CompareRounds(Times(15, {0, 0}) + Times(1, {1, 1})).tells);
  EXPECT_TRUE(CompareRounds(Times(8, {0, 0}) + Times(8, {1, 1})).tells);
}

}  // namespace
}  // namespace dflash::ctl
