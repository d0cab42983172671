#include "kernels/sampling/philox.h"

#include <cstdint>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::ElementsAre;

// The known-answer vectors published with Random123 (DEShawResearch/random123, kat_vectors, philox4x32 10).
TEST(PhiloxTest, KnownAnswers) {
  EXPECT_THAT(Philox4x32({{0, 0, 0, 0}}, 0).word,
              ElementsAre(0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
  EXPECT_THAT(Philox4x32({{~0u, ~0u, ~0u, ~0u}}, ~uint64_t{0}).word,
              ElementsAre(0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
  EXPECT_THAT(
      Philox4x32({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, uint64_t{0x299f31d0} << 32 | 0xa4093822)
          .word,
      ElementsAre(0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1));
}

// The pi vector again, through the addressing of this program: every field in its own place.
TEST(PhiloxTest, SeedPositionAndIdAreAddressedAsDocumented) {
  const uint64_t seed = uint64_t{0x299f31d0} << 32 | 0xa4093822;
  const auto position = static_cast<int64_t>(uint64_t{0x85a308d3} << 32 | 0x243f6a88);
  const PhiloxBlock counter = NoiseCounter(position, 0x13198a2e, NoiseStream{0x03707344});
  EXPECT_THAT(Philox4x32(counter, seed).word, ElementsAre(0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1));

  EXPECT_EQ(NoiseWord(0, 0, 0, NoiseStream::kTargetChoice), 0x6627e8d5u);
  EXPECT_EQ(NoiseWord(0, 0, 3, NoiseStream::kTargetChoice), 0x9b00dbd8u);
  EXPECT_EQ(NoiseWord(seed, 7, 4 * 9 + 2, NoiseStream::kTargetChoice),
            Philox4x32({{7, 0, 9, 0}}, seed).word[2]);
}

TEST(PhiloxTest, NeighboursShareNoWord) {
  std::set<uint32_t> words;
  for (int64_t position : {int64_t{0}, int64_t{1}, int64_t{1} << 32}) {
    for (int32_t id = 0; id < 64; ++id) words.insert(NoiseWord(5, position, id, NoiseStream::kTargetChoice));
  }
  EXPECT_EQ(words.size(), 3u * 64u);
}

static_assert(NoiseWord(0, 0, 1, NoiseStream::kTargetChoice) == 0xe169c58du,
              "usable in constant expressions");

}  // namespace
}  // namespace dflash
