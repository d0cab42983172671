#include "text/byte_pair_encoder.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using testing::ElementsAre;
using Ids = std::vector<int32_t>;

std::array<int32_t, 256> BytesAsTokens() {
  std::array<int32_t, 256> tokens;
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

Ids Encode(const std::vector<BytePairMerge>& merges, std::string_view piece) {
  const auto encoder = BytePairEncoder::Create(BytesAsTokens(), merges);
  EXPECT_TRUE(encoder.ok()) << encoder.status();
  BytePairEncoder::Workspace workspace;
  Ids ids;
  encoder->Encode(piece, workspace, ids);
  return ids;
}

TEST(BytePairEncoderTest, LowestRankFirstThenLeftmost) {
  // "ab" before "bc", although "bc" could make more of "abc".
  EXPECT_THAT(Encode({{'a', 'b', 256}, {'b', 'c', 257}}, "abc"), ElementsAre(256, 'c'));
  EXPECT_THAT(Encode({{'b', 'c', 257}, {'a', 'b', 256}}, "abc"), ElementsAre('a', 257));
  EXPECT_THAT(Encode({{'a', 'a', 256}}, "aaa"), ElementsAre(256, 'a'));
  EXPECT_THAT(Encode({{'a', 'a', 256}, {256, 256, 257}, {257, 'a', 258}}, "aaaaa"), ElementsAre(258));
  // A merge of lower rank that only another one makes possible comes before those that were there.
  EXPECT_THAT(Encode({{256, 'c', 257}, {'a', 'b', 256}, {'c', 'd', 258}}, "abcd"), ElementsAre(257, 'd'));
  EXPECT_THAT(Encode({}, ""), ElementsAre());
  EXPECT_THAT(Encode({}, "\xFF"), ElementsAre(255));
}

TEST(BytePairEncoderTest, AppendsAndReusesItsWorkspace) {
  const auto encoder = BytePairEncoder::Create(BytesAsTokens(), {{'a', 'b', 256}});
  BytePairEncoder::Workspace workspace;
  Ids ids;
  for (const char* piece : {"abab", "b", "aab"}) encoder->Encode(piece, workspace, ids);
  EXPECT_THAT(ids, ElementsAre(256, 256, 'b', 'a', 256));
}

TEST(BytePairEncoderTest, APairWithTwoMergesIsAnError) {
  const auto encoder =
      BytePairEncoder::Create(BytesAsTokens(), {{'a', 'b', 256}, {'b', 'c', 257}, {'a', 'b', 258}});
  EXPECT_EQ(encoder.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(encoder.status().message()), testing::HasSubstr("merges[2]"));
}

// The definition, word for word.
Ids EncodeByDefinition(const std::vector<BytePairMerge>& merges, std::string_view piece) {
  Ids ids;
  for (const char byte : piece) ids.push_back(static_cast<uint8_t>(byte));
  for (;;) {
    size_t best_rank = merges.size(), best = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      for (size_t rank = 0; rank < best_rank; ++rank) {
        if (merges[rank].left != ids[i] || merges[rank].right != ids[i + 1]) continue;
        best_rank = rank;
        best = i;
      }
    }
    if (best_rank == merges.size()) return ids;
    ids[best] = merges[best_rank].result;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
}

TEST(BytePairEncoderTest, EqualsTheDefinitionOnRandomMerges) {
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    // Tokens are strings over three letters; a merge joins any two of those that there are, so that most
    // tokens can be reached by several merges and the ranks are in no order.
    std::vector<std::string> strings(256);
    for (size_t byte = 0; byte < 256; ++byte) strings[byte] = std::string(1, static_cast<char>(byte));
    std::vector<int32_t> usable = {'a', 'b', 'c'};
    std::vector<BytePairMerge> merges;
    for (size_t n = random() % 40; n > 0; --n) {
      const int32_t left = usable[random() % usable.size()], right = usable[random() % usable.size()];
      const bool there = std::any_of(merges.begin(), merges.end(),
                                     [&](const auto& m) { return m.left == left && m.right == right; });
      if (there) continue;
      const std::string joined = strings[static_cast<size_t>(left)] + strings[static_cast<size_t>(right)];
      auto known = std::find(strings.begin(), strings.end(), joined);
      if (known == strings.end()) {
        known = strings.insert(strings.end(), joined);
        usable.push_back(static_cast<int32_t>(strings.size()) - 1);
      }
      merges.push_back({left, right, static_cast<int32_t>(known - strings.begin())});
    }
    std::shuffle(merges.begin(), merges.end(), random);
    for (int text = 0; text < 20; ++text) {
      std::string piece;
      for (size_t n = random() % 40; n > 0; --n) piece.push_back("abcd"[random() % 10 % 4]);
      EXPECT_EQ(Encode(merges, piece), EncodeByDefinition(merges, piece)) << piece;
    }
  }
}

}  // namespace
}  // namespace dflash
