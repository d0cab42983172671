#include "text/detokenizer.h"

#include <random>

#include "base/check.h"
#include "gtest/gtest.h"
#include "text/tokenizer_vectors.h"
#include "text/utf8.h"

namespace dflash {
namespace {

using Ids = std::vector<int32_t>;

const Tokenizer& Tiny() {
  static const auto* const tokenizer = [] {
    auto loaded = Tokenizer::Load(DFLASHD_SOURCE_DIR "/models/tiny-qwen3.6");
    DFLASH_CHECK(loaded.ok(), loaded.status().ToString().c_str());
    return new Tokenizer(*std::move(loaded));
  }();
  return *tokenizer;
}

TEST(DetokenizerTest, NeverGivesHalfACharacter) {
  const Ids ids = Tiny().Encode("a\U0001F600b", AddedTokens::kAsText).value();  // no token has the emoji
  ASSERT_EQ(ids.size(), 6u);
  Detokenizer detokenizer(Tiny(), SpecialTokens::kKeep);
  std::vector<std::string> parts;
  for (const int32_t id : ids) parts.push_back(detokenizer.Feed({&id, 1}).value());
  EXPECT_EQ(parts, (std::vector<std::string>{"a", "", "", "", "\U0001F600", "b"}));
  EXPECT_EQ(detokenizer.Finish(), "");
}

TEST(DetokenizerTest, FinishReplacesAnIncompleteCharacter) {
  Ids ids = Tiny().Encode("a\U0001F600", AddedTokens::kAsText).value();
  ids.pop_back();
  Detokenizer detokenizer(Tiny(), SpecialTokens::kKeep);
  EXPECT_EQ(detokenizer.Feed(ids).value(), "a");
  EXPECT_EQ(detokenizer.Finish(), "\uFFFD");
  EXPECT_EQ(detokenizer.Finish(), "");
}

TEST(DetokenizerTest, AnIdWithoutTokenTakesNothing) {
  const Ids half = Tiny().Encode("\u00E9", AddedTokens::kAsText).value();
  ASSERT_EQ(half.size(), 2u);
  Detokenizer detokenizer(Tiny(), SpecialTokens::kKeep);
  EXPECT_EQ(detokenizer.Feed({half.data(), 1}).value(), "");
  const Ids bad = {half[1], 4096};
  EXPECT_EQ(detokenizer.Feed(bad).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(detokenizer.Feed({half.data() + 1, 1}).value(), "\u00E9");
}

TEST(DetokenizerTest, PartsAreWellFormedAndTogetherTheWhole) {
  std::mt19937 random(9);
  const TokenizerVectors vectors = ReadTokenizerVectors("tokenizer_tiny.jsonl");
  for (const DecodingVector& vector : vectors.decoding) {
    for (const SpecialTokens special : {SpecialTokens::kKeep, SpecialTokens::kDrop}) {
      Detokenizer detokenizer(Tiny(), special);
      std::string text;
      for (size_t pos = 0; pos < vector.ids.size();) {
        const size_t size = std::min<size_t>(random() % 4, vector.ids.size() - pos);
        const std::string part = detokenizer.Feed({vector.ids.data() + pos, size}).value();
        EXPECT_EQ(ReplaceIllFormed(part), part);
        text += part;
        pos += size;
      }
      text += detokenizer.Finish();
      EXPECT_EQ(text, special == SpecialTokens::kKeep ? vector.keep : vector.drop);
    }
  }
}

}  // namespace
}  // namespace dflash
