// The tokenizer files of Qwen3 (151,643 entries, a split pattern without \p{M}), which are not in this
// repository: tools/vectors/fetch-qwen3-tokenizer puts them into a folder, DFLASHD_QWEN3_TOKENIZER_DIR names
// it.
#include <cstdlib>

#include "gtest/gtest.h"
#include "text/detokenizer.h"
#include "text/tokenizer.h"
#include "text/tokenizer_vectors.h"

namespace dflash {
namespace {

TEST(Qwen3TokenizerTest, AnswersLikeTheReference) {
  const char* const folder = std::getenv("DFLASHD_QWEN3_TOKENIZER_DIR");
  if (folder == nullptr) GTEST_SKIP() << "DFLASHD_QWEN3_TOKENIZER_DIR is not set";
  const auto tokenizer = Tokenizer::Load(folder);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(tokenizer->vocabulary_size(), 151669);
  EXPECT_EQ(tokenizer->FindAddedToken("<|im_end|>"), 151645);
  EXPECT_EQ(tokenizer->FindAddedToken("</think>"), 151668);

  const TokenizerVectors vectors = ReadTokenizerVectors("tokenizer_qwen3.jsonl");
  ASSERT_GT(vectors.encoding.size(), 2000u);
  for (const EncodingVector& vector : vectors.encoding) {
    EXPECT_EQ(tokenizer->Encode(vector.text, AddedTokens::kAsText).value(), vector.ids) << vector.text;
    if (!vector.utf8) continue;
    EXPECT_EQ(tokenizer->Encode(vector.text, AddedTokens::kParse).value(), vector.parsed_ids) << vector.text;
  }
  ASSERT_FALSE(vectors.segments.empty());
  for (const SegmentsVector& vector : vectors.segments) {
    std::vector<TextSegment> segments;
    for (const auto& [text, parse] : vector.segments) {
      segments.push_back({text, parse ? AddedTokens::kParse : AddedTokens::kAsText});
    }
    EXPECT_EQ(tokenizer->Encode(segments).value(), vector.ids) << testing::PrintToString(vector.segments);
  }
  ASSERT_FALSE(vectors.decoding.empty());
  for (const DecodingVector& vector : vectors.decoding) {
    for (const SpecialTokens special : {SpecialTokens::kKeep, SpecialTokens::kDrop}) {
      const std::string& expected = special == SpecialTokens::kKeep ? vector.keep : vector.drop;
      EXPECT_EQ(tokenizer->Decode(vector.ids, special).value(), expected);
      Detokenizer detokenizer(*tokenizer, special);
      std::string text;
      for (const int32_t id : vector.ids) text += detokenizer.Feed({&id, 1}).value();
      EXPECT_EQ(text + detokenizer.Finish(), expected);
    }
  }
}

}  // namespace
}  // namespace dflash
