#include "worker/verify/walk.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::ElementsAre;

constexpr int32_t kStop = 99;
bool IsStop(int32_t token) { return token == kStop; }

TEST(WalkTest, EveryMismatchPositionOfAChain) {
  const std::vector<int32_t> drafts = {11, 12, 13};
  for (int32_t wrong = 0; wrong <= 3; ++wrong) {
    SCOPED_TRACE(wrong);
    std::vector<int32_t> target = {11, 12, 13, 14};
    if (wrong < 3) target[static_cast<size_t>(wrong)] = 77;
    const WalkResult result = Walk(MakeChain(10, drafts), target, IsStop, /*room=*/100);
    EXPECT_EQ(result.accepted, wrong);
    EXPECT_EQ(result.path.size(), static_cast<size_t>(wrong) + 1);
    EXPECT_EQ(result.emitted, std::vector<int32_t>(target.begin(), target.begin() + wrong + 1));
    EXPECT_FALSE(result.stopped);
  }
}

TEST(WalkTest, StopInsideTheAcceptedRunEndsTheOutputAndCountsTheDraft) {
  const WalkResult result = Walk(MakeChain(10, {11, kStop, 13}), {11, kStop, 13, 14}, IsStop, 100);
  EXPECT_THAT(result.emitted, ElementsAre(11, kStop));
  EXPECT_THAT(result.path, ElementsAre(0, 1));  // the stop token itself is never fed
  EXPECT_EQ(result.accepted, 2);
  EXPECT_TRUE(result.stopped);
}

TEST(WalkTest, StopAsCorrectionIsNotAnAcceptedDraft) {
  const WalkResult result = Walk(MakeChain(10, {11, 12}), {11, kStop, 0}, IsStop, 100);
  EXPECT_EQ(result.accepted, 1);
  EXPECT_TRUE(result.stopped);
}

TEST(WalkTest, RoomEndsTheWalk) {
  const WalkResult result = Walk(MakeChain(10, {11, 12}), {11, 12, 13}, IsStop, 2);
  EXPECT_THAT(result.emitted, ElementsAre(11, 12));
  EXPECT_THAT(result.path, ElementsAre(0, 1));
}

TEST(WalkTest, FollowsTheBranchThatTheTargetChose) {
  // 0 anchor; 1, 2 its children; 3, 4 children of 2.
  const VerifyPlan tree = {
      .tokens = {10, 11, 12, 21, 22}, .parents = {-1, 0, 0, 2, 2}, .depths = {0, 1, 1, 2, 2}};
  ASSERT_TRUE(CheckPlan(tree).ok());
  EXPECT_FALSE(tree.IsChain());
  const WalkResult result = Walk(tree, {12, 0, 22, 0, 33}, IsStop, 100);
  EXPECT_THAT(result.path, ElementsAre(0, 2, 4));
  EXPECT_THAT(result.emitted, ElementsAre(12, 22, 33));
}

TEST(CheckPlanTest, RefusesBrokenPlans) {
  EXPECT_FALSE(CheckPlan({}).ok());
  EXPECT_FALSE(CheckPlan({.tokens = {1, 2}, .parents = {-1, 1}, .depths = {0, 1}}).ok());
  EXPECT_FALSE(CheckPlan({.tokens = {1, 2}, .parents = {-1, 0}, .depths = {0, 2}}).ok());
  EXPECT_FALSE(CheckPlan({.tokens = {1, 2, 2}, .parents = {-1, 0, 0}, .depths = {0, 1, 1}}).ok());
  EXPECT_TRUE(CheckPlan(MakeChain(5, {6, 7})).ok());
}

}  // namespace
}  // namespace dflash
