#include "daemon/routing/prefix_affinity.h"

#include "gtest/gtest.h"

namespace dflash {
namespace {

std::vector<int32_t> Tokens(size_t count, int32_t first) {
  std::vector<int32_t> tokens(count);
  for (size_t i = 0; i < count; ++i) tokens[i] = first + static_cast<int32_t>(i);
  return tokens;
}
std::vector<uint64_t> Hashes(const std::vector<int32_t>& prompt, std::string_view salt = "") {
  return PrefixAffinity::BlockHashes(prompt, salt);
}

TEST(PrefixAffinity, OneHashAWholeBlock) {
  EXPECT_TRUE(Hashes({}).empty());
  EXPECT_TRUE(Hashes(Tokens(63, 0)).empty());
  EXPECT_EQ(Hashes(Tokens(64, 0)).size(), 1u);
  EXPECT_EQ(Hashes(Tokens(191, 0)).size(), 2u);
}

TEST(PrefixAffinity, AHashCoversEverythingBefore) {
  std::vector<int32_t> prompt = Tokens(256, 0);
  const auto hashes = Hashes(prompt);
  prompt[70] = 5;
  const auto other = Hashes(prompt);
  EXPECT_EQ(other[0], hashes[0]);
  for (size_t i = 1; i < 4; ++i) EXPECT_NE(other[i], hashes[i]) << i;
  EXPECT_NE(Hashes(Tokens(64, 0), "tenant"), Hashes(Tokens(64, 0)));
}

TEST(PrefixAffinity, MatchesUpToTheFirstDifference) {
  PrefixAffinity affinity;
  std::vector<int32_t> prompt = Tokens(300, 0);
  affinity.Record(0, Hashes(prompt));
  EXPECT_EQ(affinity.Match(0, Hashes(prompt)), 256);
  EXPECT_EQ(affinity.Match(1, Hashes(prompt)), 0) << "another group's";
  EXPECT_EQ(affinity.Match(0, Hashes(Tokens(1000, 0))), 256);
  EXPECT_EQ(affinity.Match(0, Hashes(Tokens(130, 0))), 128);
  prompt[64] = 9;
  EXPECT_EQ(affinity.Match(0, Hashes(prompt)), 64);
  EXPECT_EQ(affinity.Match(0, Hashes(Tokens(300, 1))), 0);
  affinity.Forget(0);
  EXPECT_EQ(affinity.Match(0, Hashes(Tokens(300, 0))), 0);
}

TEST(PrefixAffinity, KeepsTheLatestAndOfAPromptItsBeginning) {
  PrefixAffinity affinity(/*max_blocks=*/4);
  affinity.Record(0, Hashes(Tokens(6 * 64, 0)));
  EXPECT_EQ(affinity.Match(0, Hashes(Tokens(6 * 64, 0))), 4 * 64);
  affinity.Record(0, Hashes(Tokens(64, 1000)));
  EXPECT_EQ(affinity.Match(0, Hashes(Tokens(6 * 64, 0))), 3 * 64);
  EXPECT_EQ(affinity.Match(0, Hashes(Tokens(64, 1000))), 64);
  affinity.Record(0, Hashes(Tokens(64, 0)));  // used again
  affinity.Record(0, Hashes(Tokens(3 * 64, 2000)));
  EXPECT_EQ(affinity.Match(0, Hashes(Tokens(6 * 64, 0))), 64);
}

}  // namespace
}  // namespace dflash
