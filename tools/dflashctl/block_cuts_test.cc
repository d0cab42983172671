// Which rounds count as cut.
#include "tools/dflashctl/block_cuts.h"

#include "gtest/gtest.h"

namespace dflash::ctl {
namespace {

Generation Rounds(std::initializer_list<std::pair<uint32_t, uint32_t>> offsets_and_drafts) {
  Generation generation;
  for (const auto& [offset, drafts] : offsets_and_drafts) {
    generation.rounds.emplace_back();
    generation.rounds.back().set_first_token_offset(offset);
    generation.rounds.back().set_drafted(drafts);
  }
  return generation;
}

TEST(BlockCutsTest, ARequestsEndCutsNothing) {
  BlockCuts cuts(16);
  // 20 tokens: the last round has room for three, two of them drafts.
  EXPECT_FALSE(cuts.Add(Rounds({{1, 15}, {17, 2}}), 20));
  EXPECT_FALSE(cuts.Add(Rounds({{1, 15}, {19, 0}}), 20));
  EXPECT_FALSE(cuts.any());
}

TEST(BlockCutsTest, FewerDraftsThanThereIsRoomForAreACut) {
  BlockCuts cuts(16);
  EXPECT_TRUE(cuts.Add(Rounds({{1, 7}, {9, 7}, {17, 2}}), 20));
  EXPECT_EQ(cuts.Describe(), "blocks were cut to 8 of 16 rows (--max-verify-rows, or a limit on drafts)");
  EXPECT_FALSE(cuts.Add(Rounds({{1, 15}}), 20)) << "of this answer none";
  EXPECT_TRUE(cuts.Add(Rounds({{1, 0}, {2, 11}}), 20));
  EXPECT_EQ(cuts.Describe(),
            "blocks were cut to 1 to 12 of 16 rows (--max-verify-rows, or a limit on drafts)");
}

}  // namespace
}  // namespace dflash::ctl
