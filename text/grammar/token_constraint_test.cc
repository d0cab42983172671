// Masks say of every token what reading its bytes says.
#include "text/grammar/token_constraint.h"

#include <memory>
#include <random>
#include <string>
#include <vector>

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
    TokenConstraint constraint(*ConformsTo(schema), tree_);
    GrammarAutomaton automaton(*ConformsTo(schema));
    for (int walk = 0; walk < 6; ++walk) {
      auto state = constraint.start();
      std::string text;
      for (int step = 0; step < 25 && constraint.GoesOn(state); ++step) {
        const std::span<const uint32_t> mask = constraint.Mask(state);
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
        state = constraint.Advance(state, chosen);
        ASSERT_GE(state, 0);
      }
    }
  }
}

TEST_F(TokenConstraintTest, WhatIsNotAllowedIsDead) {
  TokenConstraint constraint(*OneOf({"yes", "no"}), tree_);
  const std::vector<int32_t> maybe = *tokenizer_.Encode("maybe", AddedTokens::kAsText);
  EXPECT_EQ(constraint.Advance(constraint.start(), maybe[0]), GrammarAutomaton::kDead);
  EXPECT_EQ(constraint.Advance(constraint.start(), 4090), GrammarAutomaton::kDead);
  EXPECT_EQ(constraint.Advance(constraint.start(), -1), GrammarAutomaton::kDead);
  EXPECT_EQ(constraint.Advance(constraint.start(), 1 << 20), GrammarAutomaton::kDead);
  auto state = constraint.start();
  const std::vector<int32_t> yes = *tokenizer_.Encode("yes", AddedTokens::kAsText);
  for (const int32_t token : yes) {
    EXPECT_TRUE(IsAllowed(constraint.Mask(state), token));
    state = constraint.Advance(state, token);
  }
  EXPECT_TRUE(constraint.IsText(state));
  EXPECT_FALSE(constraint.GoesOn(state));
}

}  // namespace
}  // namespace dflash
