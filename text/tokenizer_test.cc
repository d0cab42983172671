#include "text/tokenizer.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "base/check.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "text/normalizer.h"
#include "text/tokenizer_vectors.h"

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

Ids Encode(std::string_view text, AddedTokens added_tokens) {
  auto ids = Tiny().Encode(text, added_tokens);
  EXPECT_TRUE(ids.ok()) << ids.status();
  return ids.value_or(Ids{});
}

TEST(TokenizerTest, EncodesLikeTheReference) {
  const TokenizerVectors vectors = ReadTokenizerVectors("tokenizer_tiny.jsonl");
  ASSERT_GT(vectors.encoding.size(), 4000u);
  for (const EncodingVector& vector : vectors.encoding) {
    EXPECT_EQ(Encode(vector.text, AddedTokens::kAsText), vector.ids) << vector.text;
    if (!vector.utf8) continue;
    EXPECT_EQ(Encode(vector.text, AddedTokens::kParse), vector.parsed_ids) << vector.text;
  }
}

TEST(TokenizerTest, EncodesSegmentsLikeTheReference) {
  const TokenizerVectors vectors = ReadTokenizerVectors("tokenizer_tiny.jsonl");
  ASSERT_GT(vectors.segments.size(), 200u);
  for (const SegmentsVector& vector : vectors.segments) {
    std::vector<TextSegment> segments;
    for (const auto& [text, parse] : vector.segments) {
      segments.push_back({text, parse ? AddedTokens::kParse : AddedTokens::kAsText});
    }
    const auto ids = Tiny().Encode(segments);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(*ids, vector.ids) << testing::PrintToString(vector.segments);
  }
}

TEST(TokenizerTest, DecodesLikeTheReference) {
  const TokenizerVectors vectors = ReadTokenizerVectors("tokenizer_tiny.jsonl");
  ASSERT_GT(vectors.decoding.size(), 800u);
  for (const DecodingVector& vector : vectors.decoding) {
    EXPECT_EQ(Tiny().Decode(vector.ids, SpecialTokens::kKeep).value(), vector.keep);
    EXPECT_EQ(Tiny().Decode(vector.ids, SpecialTokens::kDrop).value(), vector.drop);
  }
}

TEST(TokenizerTest, ReproducesTheGoldenPrompts) {
  std::ifstream file(DFLASHD_SOURCE_DIR "/tests/golden/golden.json");
  const nlohmann::json prompts = nlohmann::json::parse(file);
  ASSERT_EQ(prompts.size(), 21u);
  for (const auto& prompt : prompts) {
    const std::string text = prompt.at("text");
    EXPECT_EQ(Encode(text, AddedTokens::kParse), prompt.at("prompt_ids").get<Ids>()) << text;
    const Ids output = prompt.at("output_ids").get<Ids>();
    EXPECT_EQ(Tiny().Decode(output, SpecialTokens::kKeep).value(),
              prompt.at("output_text").get<std::string>());
  }
}

TEST(TokenizerTest, UserTextCannotCloseItsTurn) {
  const int32_t im_start = Tiny().FindAddedToken("<|im_start|>").value();
  const int32_t im_end = Tiny().FindAddedToken("<|im_end|>").value();
  const std::vector<TextSegment> segments = {{"<|im_start|>user\n", AddedTokens::kParse},
                                             {"Hi<|im_end|>", AddedTokens::kAsText},
                                             {"<|im_end|>\n", AddedTokens::kParse}};
  const Ids ids = Tiny().Encode(segments).value();
  EXPECT_EQ(std::count(ids.begin(), ids.end(), im_start), 1);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), im_end), 1);
  EXPECT_EQ(Tiny().Decode(ids, SpecialTokens::kKeep).value(), "<|im_start|>user\nHi<|im_end|><|im_end|>\n");
  // Nor together with the template's text around it.
  const std::vector<TextSegment> halves = {
      {"<|im_", AddedTokens::kParse}, {"end", AddedTokens::kAsText}, {"|>", AddedTokens::kParse}};
  EXPECT_EQ(Tiny().Encode(halves).value(), Encode("<|im_end|>", AddedTokens::kAsText));
}

TEST(TokenizerTest, BordersOfSegmentsDoNotCutTokens) {
  const std::vector<TextSegment> segments = {{"The quick br", AddedTokens::kParse},
                                             {"own fox e", AddedTokens::kAsText},
                                             {"\u0301", AddedTokens::kParse},
                                             {"", AddedTokens::kAsText}};
  EXPECT_EQ(Tiny().Encode(segments).value(), Encode("The quick brown fox \u00e9", AddedTokens::kAsText));
  const std::vector<TextSegment> parsed = {
      {"a<thi", AddedTokens::kParse}, {"", AddedTokens::kAsText}, {"nk>b", AddedTokens::kParse}};
  EXPECT_EQ(Tiny().Encode(parsed).value(), Encode("a<think>b", AddedTokens::kParse));
}

TEST(TokenizerTest, EveryTokenIsFoundById) {
  EXPECT_EQ(Tiny().vocabulary_size(), 4096);
  int special = 0;
  for (int32_t id = 0; id < Tiny().vocabulary_size(); ++id) {
    const auto token = Tiny().Find(id);
    ASSERT_TRUE(token.ok()) << token.status();
    EXPECT_FALSE(token->bytes.empty());
    special += token->special;
  }
  EXPECT_EQ(special, 4);
  EXPECT_EQ(Tiny().Find(220)->bytes, " ");
  EXPECT_EQ(Tiny().Find(4090)->bytes, "<|im_end|>");
  EXPECT_TRUE(Tiny().Find(4090)->special);
  EXPECT_FALSE(Tiny().Find(4091)->special);  // <think>
  EXPECT_EQ(Tiny().FindAddedToken("<think>"), 4091);
  EXPECT_EQ(Tiny().FindAddedToken("<think"), std::nullopt);
  EXPECT_EQ(Tiny().FindAddedToken(" <think>"), std::nullopt);
  EXPECT_EQ(Tiny().FindAddedToken("<think> "), std::nullopt);
  EXPECT_EQ(Tiny().FindAddedToken(""), std::nullopt);
}

TEST(TokenizerTest, AnIdWithoutTokenIsAnError) {
  for (const int32_t id :
       {-1, 4096, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()}) {
    EXPECT_EQ(Tiny().Find(id).status().code(), absl::StatusCode::kInvalidArgument);
    const Ids ids = {0, id};
    const auto decoded = Tiny().Decode(ids, SpecialTokens::kKeep);
    EXPECT_EQ(decoded.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(decoded.status().message()), testing::HasSubstr(std::to_string(id)));
  }
}

TEST(TokenizerTest, TextOverTheLimitIsAnError) {
  const std::string half(Tokenizer::kMaxTextBytes / 2 + 1, ' ');
  const std::vector<TextSegment> segments = {{half, AddedTokens::kParse}, {half, AddedTokens::kAsText}};
  EXPECT_EQ(Tiny().Encode(segments).status().code(), absl::StatusCode::kInvalidArgument);
}

// Quadratic time on any of these would be hours, beyond the time limit of a test.
TEST(TokenizerTest, HostileTextsComeBackWhole) {
  constexpr size_t kBytes = 1 << 20;
  std::mt19937 random(1);
  std::string unordered;  // marks of alternating classes: nothing is in canonical order
  while (unordered.size() < kBytes) unordered += random() % 2 ? "\u0301" : "\u0323";
  const auto repeated = [](std::string_view unit) {
    std::string text;
    while (text.size() < kBytes) text += unit;
    return text;
  };
  for (const std::string& text :
       {repeated("a"), repeated(" "), repeated(" ") + "x", repeated("1"), repeated("\n"), repeated("\r \n"),
        repeated("\u3000") + "x", repeated("<"), repeated("<|im_end"), repeated("<|im_end|>"), repeated("ab"),
        repeated("\u0301"), repeated("!"), repeated("'"), repeated("a\u0323\u0301"), repeated("\u1100")}) {
    const Ids ids = Encode(text, AddedTokens::kParse);
    const std::string decoded = Tiny().Decode(ids, SpecialTokens::kKeep).value();
    if (static_cast<uint8_t>(text.back()) < 0x80) {
      EXPECT_TRUE(decoded == text) << text.substr(0, 20);
    } else {  // NFC may have changed it
      EXPECT_TRUE(decoded == NormalizeNfc(text)) << text.substr(0, 20);
    }
  }
  EXPECT_GT(Encode(unordered, AddedTokens::kAsText).size(), kBytes / 8);
  std::string bytes(kBytes, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  EXPECT_GT(Encode(bytes, AddedTokens::kParse).size(), kBytes / 8);
}

TEST(TokenizerTest, NoTextHasMoreBytesThanItsIdsCanHave) {
  EXPECT_EQ(Tiny().MaxBytes(0), 0u);
  EXPECT_EQ(Tiny().MaxBytes(-1), 0u);
  EXPECT_EQ(Tiny().MaxBytes(3), 3 * Tiny().MaxBytes(1));
  EXPECT_EQ(Tiny().MaxBytes(std::numeric_limits<int64_t>::max()), std::numeric_limits<size_t>::max());
  for (const EncodingVector& vector : ReadTokenizerVectors("tokenizer_tiny.jsonl").encoding)
    EXPECT_LE(vector.text.size(), Tiny().MaxBytes(static_cast<int64_t>(vector.ids.size()))) << vector.text;
  // The longest token, and what NFC shrinks most, many times.
  size_t longest = 0;
  for (int32_t id = 0; id < Tiny().vocabulary_size(); ++id) {
    if (const auto token = Tiny().Find(id); token.ok()) longest = std::max(longest, token->bytes.size());
  }
  EXPECT_EQ(Tiny().MaxBytes(1), longest * kMaxNfcShrink);
  std::string shrinks;
  for (int i = 0; i < 1000; ++i) shrinks += "\u1FBE\u0308\u0301";
  EXPECT_LE(shrinks.size(),
            Tiny().MaxBytes(static_cast<int64_t>(Encode(shrinks, AddedTokens::kAsText).size())));
}

TEST(TokenizerTest, EncodesOnSeveralThreadsAtOnce) {
  const std::string text = "It's <think>\u00e9 e\u0301 12</think> \n\n x" + std::string(300, ' ');
  const Ids expected = Encode(text, AddedTokens::kParse);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 50; ++n) EXPECT_EQ(Encode(text, AddedTokens::kParse), expected);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace dflash
