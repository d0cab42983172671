// Masks say of every token what reading its bytes says.
#include "text/grammar/token_constraint.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "text/grammar/json_grammar.h"
#include "text/testing/exploding_schemas.h"

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
  std::mt19937 random(9);
  std::vector<std::string> texts(40);
  for (std::string& text : texts) {
    for (int i = 0; i < 200; ++i) text += static_cast<char>('a' + static_cast<int>(random() % 26));
  }
  const TokenConstraint::Limits few = {.bytes = TokenConstraint(*OneOf(texts), tree_).bytes() + (1 << 20)};
  const auto shared = std::make_shared<TokenConstraint>(*OneOf(texts), tree_, few);
  struct Waiting {
    ConstraintCursor cursor;
    std::vector<int32_t> rest;
    std::vector<std::vector<uint32_t>> masks;  // along it
  };
  std::vector<Waiting> waiting;
  int64_t most_states = 0, most_bytes = 0;
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
      most_states = std::max(most_states, shared->states());
      most_bytes = std::max(most_bytes, shared->bytes());
    }
    EXPECT_TRUE(cursor.IsText());
    EXPECT_FALSE(cursor.GoesOn());
  }
  EXPECT_LT(most_states, 4000) << "of 8000";
  EXPECT_GT(most_bytes, few.bytes);
  EXPECT_LT(most_bytes, few.bytes + (1 << 20)) << "beside places and one walk";
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
  // Nor is a mask known on the way to whose tokens is too much work, though all of it was done before.
  const auto few = std::make_shared<TokenConstraint>(*OneOf({"certainly", "perhaps"}), tree_,
                                                     TokenConstraint::Limits{.walk_work = 100});
  for (const char* text : {"certainly", "perhaps"}) {
    ConstraintCursor cursor(few);
    const std::vector<int32_t> tokens = *tokenizer_.Encode(text, AddedTokens::kAsText);
    for (const int32_t token : tokens) cursor.Advance(token);
    EXPECT_TRUE(cursor.IsText());
    EXPECT_FALSE(cursor.Mask().empty()) << "nothing follows: no states";
  }
  EXPECT_TRUE(ConstraintCursor(few).Mask().empty());
}

struct Sizes {
  int64_t walk_work = 0, bytes = 0;
};

// Follows tokens that a mask allows, the first of `wanted` if possible, else a random one, and holds against
// the bounds what every mask and token takes, and what is kept. Up to `steps` of them; returns what the
// largest take. `too_large`, if any: whether the constraint ended so.
Sizes Follow(const std::shared_ptr<TokenConstraint>& constraint, int64_t vocabulary,
             const std::vector<int32_t>& wanted, int steps, bool* too_large = nullptr) {
  const TokenConstraint::Limits limits;
  std::mt19937 random(5);
  Sizes most = {.bytes = constraint->bytes()};
  int64_t done = constraint->work_done();
  const auto took = [&] { return constraint->work_done() - std::exchange(done, constraint->work_done()); };
  ConstraintCursor cursor(constraint);
  for (int step = 0; step < steps && cursor.GoesOn(); ++step) {
    const std::span<const uint32_t> mask = cursor.Mask();
    EXPECT_LE(took(), limits.walk_work + 4 * GrammarAutomaton::kMaxStepWork);
    most.walk_work = std::max(most.walk_work, cursor.MaskWork());
    most.bytes = std::max(most.bytes, constraint->bytes());
    if (too_large != nullptr) *too_large = mask.empty();
    if (mask.empty()) break;
    std::vector<int32_t> allowed, others;
    for (const int32_t token : wanted) {
      if (IsAllowed(mask, token)) allowed.push_back(token);
      if (!allowed.empty()) break;
    }
    for (int32_t token = 0; allowed.empty() && token < vocabulary; ++token) {
      if (IsAllowed(mask, token)) others.push_back(token);
    }
    if (allowed.empty()) allowed = others;
    if (allowed.empty()) {
      ADD_FAILURE() << "nothing may follow";
      break;
    }
    cursor.Advance(allowed[random() % allowed.size()]);
    EXPECT_LE(took(), limits.walk_work) << "a part of the walk before, forgotten or not";
    if (cursor.IsLost()) {
      ADD_FAILURE() << "behind a token that is allowed";
      break;
    }
  }
  EXPECT_LE(most.bytes, 16 << 20);
  return most;
}

// Whatever the schema is, a mask takes bounded work and memory, and the end is the same for the next reader.
TEST_F(TokenConstraintTest, WorkAndMemoryOfWhatExplodesAreBounded) {
  using End = testing::ExplodingSchema::End;
  for (const auto& [name, schema, wanted, end] : testing::ExplodingSchemas()) {
    SCOPED_TRACE(name);
    const absl::StatusOr<Grammar> grammar = ConformsTo(schema);
    if (!grammar.ok()) {
      EXPECT_EQ(grammar.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(end, End::kRefused) << grammar.status();
      continue;
    }
    const auto constraint = std::make_shared<TokenConstraint>(*grammar, tree_);
    EXPECT_LT(constraint->bytes(), 6 << 20);
    EXPECT_LT(constraint->work_done(), 4 * GrammarAutomaton::kMaxStepWork);
    EXPECT_EQ(ConstraintCursor(constraint).IsTooLarge(), end == End::kRefused);
    if (end == End::kRefused) continue;
    const std::vector<int32_t> tokens = *tokenizer_.Encode(wanted, AddedTokens::kAsText);
    for (int reader = 0; reader < 2; ++reader) {
      bool too_large = false;
      Follow(constraint, tree_->vocabulary(), tokens, 60, &too_large);
      EXPECT_EQ(too_large, end == End::kTooLarge);
    }
  }
}

// Neither what was read before nor what was forgotten changes what a mask is counted to take.
TEST_F(TokenConstraintTest, WorkIsCountedAsIfNothingWasKnown) {
  const std::vector<int32_t> text =
      *tokenizer_.Encode(R"({"name": "somebody", "list": [1, 2, {"x": null}]})", AddedTokens::kAsText);
  std::vector<std::vector<int64_t>> works;
  for (const int64_t bytes : {int64_t{9} << 20, int64_t{0}}) {
    const auto constraint = std::make_shared<TokenConstraint>(
        *AnyJsonObject(), tree_, TokenConstraint::Limits{.bytes = bytes, .mask_bytes = 0});
    for (int reader = 0; reader < 2; ++reader) {
      ConstraintCursor cursor(constraint);
      std::vector<int64_t>& work = works.emplace_back();
      for (const int32_t token : text) {
        work.push_back(cursor.MaskWork());
        cursor.Advance(token);
      }
      EXPECT_TRUE(cursor.IsText());
    }
  }
  EXPECT_GT(works[0][0], 0);
  for (const std::vector<int64_t>& work : works) EXPECT_EQ(work, works[0]);
}

// As many tokens as large vocabularies have: words, runs of one character, punctuation, digits, UTF-8.
std::vector<std::string> LargeVocabulary(size_t count) {
  std::mt19937 random(1);
  const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  std::set<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.emplace(1, static_cast<char>(byte));
  for (size_t length = 2; length <= 128; ++length) {
    for (const char c : std::string_view(" \t=-*#")) tokens.emplace(length, c);
    tokens.insert("\n" + std::string(length, ' '));
  }
  const std::string_view marks = "{}[]\",:;()\\/<>=.!'`_-";
  while (tokens.size() < count) {
    std::string token = below(2) == 0 ? " " : "";
    const uint32_t kind = below(10), length = 1 + below(9);
    for (uint32_t i = 0; i < length; ++i) {
      if (kind < 6) {
        token += static_cast<char>('a' + below(26));
      } else if (kind < 7) {
        token += marks[below(static_cast<uint32_t>(marks.size()))];
      } else if (kind < 8) {
        token += static_cast<char>('0' + below(10));
      } else {
        for (const uint32_t byte : {0xe4 + below(6), 0x80 + below(64), 0x80 + below(64)})
          token += static_cast<char>(byte);
      }
    }
    tokens.insert(token.substr(0, 1 + below(static_cast<uint32_t>(token.size()))));
  }
  return {tokens.begin(), tokens.end()};
}

// What clients ask for stays far below the bounds, with large vocabularies, too.
TEST_F(TokenConstraintTest, OrdinaryLanguagesHaveRoom) {
  const char* kinds[] = {
      R"({"type":"string","format":"date-time","maxLength":255})",
      R"({"enum":["pending","paid","shipped","cancelled","refunded",null]})",
      R"({"type":"array","maxItems":20,"items":{"type":"object","required":["sku","n"],"properties":{
          "sku":{"type":"string"},"n":{"type":"integer"},"tags":{"type":"array","items":{"enum":["a","b"]}}}}})",
      R"({"type":["number","null"]})",
      R"({"anyOf":[{"type":"string"},{"type":"object","additionalProperties":{"type":"string"}}]})",
      R"({"type":"object","properties":{"street":{"type":"string"},"zip":{"type":"string","minLength":5,
          "maxLength":10},"geo":{}}})"};
  std::string object = R"({"type":"object","required":["property_0","property_7"],"properties":{)";
  for (size_t i = 0; i < 50; ++i)
    absl::StrAppend(&object, i > 0 ? "," : "", R"("property_)", i, R"(":)", kinds[i % std::size(kinds)]);
  object += "}}";
  std::string tools = R"({"type":"array","items":{"anyOf":[)";
  for (int i = 0; i < 32; ++i) {
    absl::StrAppend(&tools, i > 0 ? "," : "",
                    R"({"type":"object","required":["name","arguments"],"properties":{
        "name":{"const":"tool_)",
                    i, R"("},"arguments":{"type":"object","properties":{"path":{"type":"string"},
        "limit":{"type":"integer"},"mode":{"enum":["a","b"]}}}}})");
  }
  tools += "]}}";
  const TokenConstraint::Limits limits;
  const auto large = std::make_shared<TokenTree>(LargeVocabulary(150'000));
  for (const auto& tree : {tree_, std::shared_ptr<const TokenTree>(large)}) {
    for (const std::string& schema :
         {std::string(R"({"type":"string"})"), std::string(R"({"type":"string","maxLength":1000})"),
          std::string(R"({"type":"object"})"), object, tools}) {
      SCOPED_TRACE(schema.substr(0, 60));
      const auto constraint = std::make_shared<TokenConstraint>(*ConformsTo(schema), tree);
      EXPECT_LT(constraint->bytes(), 1 << 20);
      bool too_large = false;
      const Sizes sizes = Follow(constraint, tree->vocabulary(), {}, 60, &too_large);
      EXPECT_FALSE(too_large);
      EXPECT_LT(sizes.walk_work, limits.walk_work / 3);
    }
  }
}

}  // namespace
}  // namespace dflash
