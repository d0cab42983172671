// Masks say of every token what reading its bytes says.
#include "text/grammar/token_constraint.h"

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "text/grammar/json_grammar.h"

namespace dflash {
namespace {

bool IsAllowed(std::span<const uint32_t> mask, int32_t token) {
  return (mask[static_cast<size_t>(token / 32)] >> (token % 32) & 1) != 0;
}

class TokenConstraintTest : public ::testing::Test {
 protected:
  const Tokenizer tokenizer_ = *Tokenizer::Load(DFLASHD_SOURCE_DIR "/models/tiny-qwen3.6");
  const std::shared_ptr<const TokenTree> tree_ = std::make_shared<TokenTree>(tokenizer_);
};

TEST_F(TokenConstraintTest, MasksAreWhatReadingSays) {
  std::mt19937 random(9);
  for (const char* schema : {R"({"type": "object"})", R"({"type": "array", "items": {"type": "string"}})"}) {
    const auto constraint = std::make_shared<TokenConstraint>(*ConformsTo(schema), tree_);
    GrammarAutomaton automaton(*ConformsTo(schema));
    for (int walk = 0; walk < 6; ++walk) {
      ConstraintCursor cursor(constraint);
      std::string text;
      for (int step = 0; step < 25 && cursor.GoesOn(); ++step) {
        const std::span<const uint32_t> mask = cursor.Mask();
        const auto at = automaton.Read(automaton.start(), text);
        std::vector<int32_t> allowed;
        for (int32_t token = 0; token < tokenizer_.vocabulary_size(); ++token) {
          const absl::StatusOr<Tokenizer::Token> found = tokenizer_.Find(token);
          const bool is_added = token >= 4088;
          const bool expected = found.ok() && !is_added && automaton.Read(at, found->bytes) >= 0;
          ASSERT_EQ(IsAllowed(mask, token), expected) << "token " << token << " behind " << text;
          if (expected) allowed.push_back(token);
        }
        ASSERT_FALSE(allowed.empty()) << text;
        const int32_t chosen = allowed[random() % allowed.size()];
        text += tokenizer_.Find(chosen)->bytes;
        cursor.Advance(chosen);
        ASSERT_FALSE(cursor.IsLost());
      }
    }
  }
}

TEST_F(TokenConstraintTest, WhatIsNotAllowedIsDead) {
  const auto constraint = std::make_shared<TokenConstraint>(*OneOf({"yes", "no"}), tree_);
  const std::vector<int32_t> maybe = *tokenizer_.Encode("maybe", AddedTokens::kAsText);
  for (const int32_t token : {maybe[0], 4090, -1, 1 << 20}) {
    ConstraintCursor cursor(constraint);
    cursor.Advance(token);
    EXPECT_TRUE(cursor.IsLost()) << token;
    EXPECT_FALSE(cursor.IsTooLarge()) << token;
  }
  ConstraintCursor cursor(constraint);
  const std::vector<int32_t> yes = *tokenizer_.Encode("yes", AddedTokens::kAsText);
  for (const int32_t token : yes) {
    EXPECT_TRUE(IsAllowed(cursor.Mask(), token));
    cursor.Advance(token);
  }
  EXPECT_TRUE(cursor.IsText());
  EXPECT_FALSE(cursor.GoesOn());
}

std::vector<uint32_t> MaskOf(const ConstraintCursor& cursor) {
  const std::span<const uint32_t> mask = cursor.Mask();
  return {mask.begin(), mask.end()};
}

// Texts of far more states than are kept, each read beside a constraint that nobody else has asked anything.
// Outputs that stand still in the middle find what they would have found.
TEST_F(TokenConstraintTest, NobodyElseChangesAMask) {
  constexpr TokenConstraint::Limits kFew = {.states = 1000, .configurations = 10'000};
  std::mt19937 random(9);
  std::vector<std::string> texts(40);
  for (std::string& text : texts) {
    for (int i = 0; i < 200; ++i) text += static_cast<char>('a' + static_cast<int>(random() % 26));
  }
  const auto shared = std::make_shared<TokenConstraint>(*OneOf(texts), tree_, kFew);
  struct Waiting {
    ConstraintCursor cursor;
    std::vector<int32_t> rest;
    std::vector<std::vector<uint32_t>> masks;  // along it
  };
  std::vector<Waiting> waiting;
  int64_t most = 0;
  for (const std::string& text : texts) {
    const std::vector<int32_t> tokens = *tokenizer_.Encode(text, AddedTokens::kAsText);
    ConstraintCursor alone(std::make_shared<TokenConstraint>(*OneOf(texts), tree_)), cursor(shared);
    for (size_t i = 0; i < tokens.size(); ++i) {
      const std::vector<uint32_t> mask = MaskOf(alone);
      ASSERT_TRUE(IsAllowed(mask, tokens[i]));
      ASSERT_EQ(MaskOf(cursor), mask) << text << " behind " << i << " tokens";
      if (i == tokens.size() / 2) waiting.push_back({cursor, {tokens.begin() + i, tokens.end()}, {}});
      if (i >= tokens.size() / 2) waiting.back().masks.push_back(mask);
      alone.Advance(tokens[i]);
      cursor.Advance(tokens[i]);
      most = std::max(most, shared->states());
    }
    EXPECT_TRUE(cursor.IsText());
    EXPECT_FALSE(cursor.GoesOn());
  }
  EXPECT_GT(most, kFew.states);
  EXPECT_LT(most, 2 * kFew.states) << "of 8000";
  for (Waiting& text : waiting) {
    for (size_t i = 0; i < text.rest.size(); ++i) {
      ASSERT_EQ(MaskOf(text.cursor), text.masks[i]);
      text.cursor.Advance(text.rest[i]);
    }
    EXPECT_TRUE(text.cursor.IsText());
  }
}

// Where it is not known of every token whether it may follow, that is said, to everybody alike.
TEST_F(TokenConstraintTest, WhatIsTooLargeSaysSo) {
  // Behind n brackets the text may be in any of 2^n places.
  std::string schema = R"({"$defs":{"x40":{"type":"null"})";
  for (int i = 0; i < 40; ++i) {
    const std::string next = absl::StrCat(R"({"type":"array","items":{"$ref":"#/$defs/x)", i + 1, R"("}})");
    absl::StrAppend(&schema, R"(,"x)", i, R"(":{"anyOf":[)", next, ",", next, "]}");
  }
  schema += R"(},"$ref":"#/$defs/x0"})";
  const auto constraint = std::make_shared<TokenConstraint>(*ConformsTo(schema), tree_);
  const int32_t bracket = tokenizer_.Encode("[", AddedTokens::kAsText)->front();
  std::vector<size_t> known;
  for (int reader = 0; reader < 2; ++reader) {
    ConstraintCursor cursor(constraint);
    size_t brackets = 0;
    for (; !cursor.Mask().empty(); ++brackets) {
      ASSERT_LT(brackets, 40u);
      EXPECT_TRUE(IsAllowed(cursor.Mask(), bracket));
      cursor.Advance(bracket);
      ASSERT_FALSE(cursor.IsLost());
    }
    known.push_back(brackets);
    for (int i = 0; i < 40 && !cursor.IsLost(); ++i) cursor.Advance(bracket);
    EXPECT_TRUE(cursor.IsTooLarge());
    cursor.Advance(bracket);
    EXPECT_TRUE(cursor.IsTooLarge());
  }
  EXPECT_GT(known[0], 4u);
  EXPECT_EQ(known[1], known[0]);
  // Nor is a mask known on the way to whose tokens are too many states, though all of them were met before.
  const auto few = std::make_shared<TokenConstraint>(*OneOf({"certainly", "perhaps"}), tree_,
                                                     TokenConstraint::Limits{.walk_states = 3});
  for (const char* text : {"certainly", "perhaps"}) {
    ConstraintCursor cursor(few);
    const std::vector<int32_t> tokens = *tokenizer_.Encode(text, AddedTokens::kAsText);
    for (const int32_t token : tokens) cursor.Advance(token);
    EXPECT_TRUE(cursor.IsText());
    EXPECT_FALSE(cursor.Mask().empty()) << "nothing follows: no states";
  }
  EXPECT_TRUE(ConstraintCursor(few).Mask().empty());
}

}  // namespace
}  // namespace dflash
