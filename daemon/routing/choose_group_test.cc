#include "daemon/routing/choose_group.h"

#include "gtest/gtest.h"

namespace dflash {
namespace {

GroupSnapshot Ready(uint64_t credits, int64_t running, int64_t outstanding, int64_t prefix = 0) {
  return {.ready = true,
          .credits = credits,
          .running = running,
          .outstanding_tokens = outstanding,
          .prefix_tokens = prefix,
          .silence = absl::ZeroDuration(),
          .on_probation = false};
}
GroupSnapshot Silent(GroupSnapshot group, int64_t ms) {
  group.silence = absl::Milliseconds(ms);
  return group;
}
GroupSnapshot OnProbation(GroupSnapshot group) {
  group.on_probation = true;
  return group;
}
GroupSnapshot NotReady() { return {.ready = false, .credits = 9, .silence = absl::ZeroDuration()}; }

TEST(ChooseGroup, TheLeastWorkAmongThoseThatTakeRequests) {
  EXPECT_EQ(ChooseGroup({}), std::nullopt);
  EXPECT_EQ(ChooseGroup({Ready(0, 1, 0), NotReady()}), std::nullopt);
  EXPECT_EQ(ChooseGroup({Ready(1, 2, 50), Ready(1, 1, 20), Ready(0, 1, 1), NotReady()}), 1u);
  EXPECT_EQ(ChooseGroup({Ready(1, 1, 20), Ready(9, 1, 20)}), 0u) << "the first of equals";
}

TEST(ChooseGroup, ACachedPrefixCountsAsWorkThatIsNotThere) {
  // 3000 of the prompt's tokens are in group 1: it is chosen until it has 3000 more to do than group 0.
  EXPECT_EQ(ChooseGroup({Ready(1, 0, 0), Ready(1, 4, 2999, 3000)}), 1u);
  EXPECT_EQ(ChooseGroup({Ready(1, 0, 0), Ready(1, 4, 3000, 3000)}), 0u);
  EXPECT_EQ(ChooseGroup({Ready(1, 0, 0), Ready(0, 4, 100, 3000)}), 0u) << "it has no room: no waiting for it";
}

TEST(ChooseGroup, ASilentGroupIsPassedOver) {
  EXPECT_EQ(ChooseGroup({Silent(Ready(1, 0, 0), 1499), Ready(1, 1, 10)}), 0u);
  EXPECT_EQ(ChooseGroup({Silent(Ready(1, 0, 0), 1500), Ready(1, 1, 10)}), 1u);
  EXPECT_EQ(ChooseGroup({Silent(Ready(1, 0, 0), 1500), Ready(0, 1, 10)}), std::nullopt)
      << "waits for a sound one";
  EXPECT_EQ(ChooseGroup({Silent(Ready(1, 0, 0), 1500), NotReady()}), 0u) << "there is no other";
}

TEST(ChooseGroup, AGroupOnProbationGetsOneRequestAtATime) {
  EXPECT_EQ(ChooseGroup({OnProbation(Ready(8, 0, 0)), Ready(1, 1, 10)}), 0u);
  EXPECT_EQ(ChooseGroup({OnProbation(Ready(7, 1, 5)), Ready(1, 1, 10)}), 1u);
  EXPECT_EQ(ChooseGroup({OnProbation(Ready(7, 1, 5)), Ready(0, 1, 10)}), std::nullopt);
  EXPECT_EQ(ChooseGroup({OnProbation(Ready(7, 1, 5))}), 0u) << "alone it works as ever";
}

}  // namespace
}  // namespace dflash
