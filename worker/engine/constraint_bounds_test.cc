// What constraints may take of an engine: work of its steps, memory, and nothing of other requests.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "text/grammar/grammar.h"
#include "text/testing/exploding_schemas.h"
#include "worker/engine/constraint_cache.h"
#include "worker/engine/sequence_rules.h"
#include "worker/testing/tiny_pair.h"

namespace dflash {
namespace {

using testing::ExplodingSchema;
using testing::ExplodingSchemas;
using testing::GenerationOutcome;
using testing::GoldenRequest;
using testing::LoadGoldenPrompts;
using testing::LoadTinyPair;
using testing::RunAll;
using testing::TinyPair;
using End = ExplodingSchema::End;

OutputConstraint Schema(std::string schema) {
  OutputConstraint constraint;
  constraint.json_schema = std::move(schema);
  return constraint;
}

class ConstraintCacheTest : public ::testing::Test {
 protected:
  // Of some memory: `length` characters at most.
  static OutputConstraint Strings(int length) {
    return Schema(absl::StrCat(R"({"type":"string","maxLength":)", length, "}"));
  }
  const Tokenizer tokenizer_ = *Tokenizer::Load(DFLASHD_SOURCE_DIR "/models/tiny-qwen3.6");
};

TEST_F(ConstraintCacheTest, KeepsAsManyBytesAsItMayButWhatIsInUse) {
  const int64_t one = (*ConstraintCache(&tokenizer_).Find(Strings(1000)))->bytes();
  ConstraintCache cache(&tokenizer_, 4 * one);
  std::weak_ptr<TokenConstraint> oldest = *cache.Find(Strings(1000));
  for (int i = 1; i < 10; ++i) {
    ASSERT_TRUE(cache.Find(Strings(1000 - i)).ok());
    EXPECT_LE(cache.bytes(), 4 * one);
    EXPECT_EQ(oldest.expired(), i >= 4) << i;
  }
  EXPECT_EQ(cache.size(), 4u);
  // What is in use stays, and goes when it was used.
  std::vector<std::shared_ptr<TokenConstraint>> used;
  for (int i = 0; i < 20; ++i) used.push_back(*cache.Find(Strings(900 + i)));
  for (int i = 0; i < 20; ++i) EXPECT_EQ(*cache.Find(Strings(900 + i)), used[static_cast<size_t>(i)]);
  EXPECT_EQ(cache.size(), 20u);
  const int64_t work = cache.work_done();
  used.erase(used.begin(), used.begin() + 18);
  cache.DropUnused();
  EXPECT_EQ(cache.size(), 4u);
  EXPECT_LE(cache.bytes(), 4 * one);
  used.clear();
  cache.DropUnused();
  EXPECT_LE(cache.bytes(), 4 * one);
  EXPECT_EQ(cache.work_done(), work);
  ConstraintCache empty(&tokenizer_, 0);
  std::shared_ptr<TokenConstraint> last = *empty.Find(Strings(1000));
  EXPECT_EQ(empty.size(), 1u);
  last.reset();
  empty.DropUnused();
  EXPECT_EQ(empty.size(), 0u);
  EXPECT_EQ(empty.bytes(), 0);
}

TEST_F(ConstraintCacheTest, KeepsAsManyAsItMay) {
  ConstraintCache cache(&tokenizer_);
  for (int i = 0; i < 40; ++i) ASSERT_TRUE(cache.Find(Strings(i)).ok());
  EXPECT_EQ(cache.size(), ConstraintCache::kMaxKept);
}

// What grows in use counts when the use has ended.
TEST_F(ConstraintCacheTest, CountsWhatHasGrown) {
  const int64_t one = (*ConstraintCache(&tokenizer_).Find(Strings(1000)))->bytes();
  ConstraintCache cache(&tokenizer_, one + 100'000);
  {
    ConstraintCursor cursor(*cache.Find(Strings(1000)));
    const int32_t quote = tokenizer_.Encode("\"", AddedTokens::kAsText)->front();
    const int32_t letter = tokenizer_.Encode("a", AddedTokens::kAsText)->front();
    for (int i = 0; i < 200; ++i) {
      cursor.Advance(i == 0 ? quote : letter);
      ASSERT_FALSE(cursor.Mask().empty());
    }
    EXPECT_GT(cache.bytes(), one + 100'000);
    cache.DropUnused();
    EXPECT_EQ(cache.size(), 1u);
  }
  cache.DropUnused();
  EXPECT_EQ(cache.size(), 0u);
}

class MostOfConstraints final : public StepObserver {
 public:
  void OnStep(const StepReport& report, const EngineGauges& gauges) override {
    work = std::max(work, report.constraint_work);
    bytes = std::max(bytes, gauges.constraint_bytes);
    last_bytes = gauges.constraint_bytes;
  }
  int64_t work = 0, bytes = 0, last_bytes = 0;
};

class ConstraintBoundsTest : public ::testing::Test {
 protected:
  // What one request's constraint may take in a step: its block's masks, one of which may go beyond, with a
  // step of the automaton that may go beyond in its turn.
  static constexpr int64_t kMostWork =
      SequenceRules::kMaxBlockWork + TokenConstraint::Limits().walk_work + 8 * GrammarAutomaton::kMaxStepWork;

  void SetUp() override {
    absl::StatusOr<TinyPair> pair = LoadTinyPair();
    ASSERT_TRUE(pair.ok()) << pair.status();
    pair_ = *std::move(pair);
    EngineOptions options;
    options.vocabulary = pair_.vocabulary;
    options.observer = &most_;
    engine_ = *Engine::Create(options, pair_.target.get(), pair_.drafter.get(), pair_.table.get(),
                              pair_.tokenizer.get(), *pair_.stream);
    ordinary_ = GoldenRequest((*LoadGoldenPrompts())[0]);
  }
  GenerationOutcome Run(const GenerationRequest& request) { return (*RunAll(*engine_, {request}))[0]; }
  // Of a constraint, driven to `wanted`.
  GenerationRequest Constrained(const std::string& schema, const std::string& wanted) const {
    GenerationRequest request = ordinary_;
    request.id = "constrained";
    request.max_tokens = 200;
    request.constraint.json_schema = schema;
    if (wanted.empty()) return request;
    const std::vector<int32_t> tokens = *pair_.tokenizer->Encode(wanted, AddedTokens::kAsText);
    for (size_t i = 0; i < tokens.size(); ++i)
      request.logit_bias.push_back({.token = tokens[i], .bias = 100.0f - static_cast<float>(i)});
    return request;
  }

  TinyPair pair_;
  MostOfConstraints most_;
  std::unique_ptr<Engine> engine_;
  GenerationRequest ordinary_;
};

TEST_F(ConstraintBoundsTest, WhatExplodesEndsAndDisturbsNobody) {
  const std::string text = Run(ordinary_).text;
  for (const auto& [name, schema, wanted, end] : ExplodingSchemas()) {
    SCOPED_TRACE(name);
    most_ = {};
    GenerationRequest plain = Constrained(schema, wanted);
    plain.speculation = SpeculationMode::kOff;
    const std::vector<GenerationOutcome> outcomes =
        *RunAll(*engine_, {Constrained(schema, wanted), ordinary_});
    EXPECT_LE(most_.work, kMostWork);
    EXPECT_LE(most_.bytes, ConstraintCache::kMaxBytes + (16 << 20));
    EXPECT_TRUE(outcomes[1].done) << outcomes[1].status;
    EXPECT_EQ(outcomes[1].text, text);
    const GenerationOutcome again = Run(plain);
    for (const GenerationOutcome& outcome : {outcomes[0], again}) {
      EXPECT_EQ(outcome.tokens, again.tokens);
      if (end == End::kTooLarge) {
        EXPECT_EQ(outcome.status.code(), absl::StatusCode::kResourceExhausted) << outcome.status;
        EXPECT_EQ(ReasonOf(outcome.status), "CONSTRAINT_TOO_LARGE");
      } else if (end == End::kRefused) {
        EXPECT_EQ(outcome.status.code(), absl::StatusCode::kInvalidArgument) << outcome.status;
        EXPECT_TRUE(outcome.tokens.empty());
      } else {
        EXPECT_TRUE(outcome.done) << outcome.status;
      }
    }
  }
  (void)Run(ordinary_);
  EXPECT_LE(most_.last_bytes, ConstraintCache::kMaxBytes);
}

// Constraints that only a title tells apart, as large as they become, used one after the other.
TEST_F(ConstraintBoundsTest, MemoryOfManyIsBounded) {
  const std::string schema = ExplodingSchemas()[0].schema;
  for (int i = 0; i < 30; ++i) {
    const auto outcome = Run(Constrained(absl::StrCat(R"({"title":"t)", i, R"(",)", schema.substr(1)), "["));
    EXPECT_EQ(ReasonOf(outcome.status), "CONSTRAINT_TOO_LARGE");
  }
  EXPECT_LE(most_.bytes, ConstraintCache::kMaxBytes + (16 << 20));
  // More together than are kept: until they end.
  std::vector<GenerationRequest> together;
  std::string properties;
  for (int i = 0; i < 50; ++i)
    absl::StrAppend(&properties, i > 0 ? "," : "", R"("p)", i, R"(":{"type":"string","maxLength":1000})");
  for (int i = 0; i < 24; ++i) {
    together.push_back(Constrained(
        absl::StrCat(R"({"title":"t)", i, R"(","type":"object","properties":{)", properties, "}}"), ""));
    together.back().id = absl::StrCat("together ", i);
    together.back().max_tokens = 5;
  }
  const std::vector<GenerationOutcome> outcomes = *RunAll(*engine_, together);
  for (const GenerationOutcome& outcome : outcomes) EXPECT_TRUE(outcome.done) << outcome.status;
  EXPECT_GT(most_.bytes, ConstraintCache::kMaxBytes);
  ASSERT_TRUE(Run(ordinary_).done);
  EXPECT_LE(most_.last_bytes, ConstraintCache::kMaxBytes);
}

// Masks so heavy that a block has no more rows than they may take together: the text is that without drafts.
TEST_F(ConstraintBoundsTest, BlocksOfHeavyRowsAreCut) {
  const auto schemas = ExplodingSchemas();
  const auto heavy =
      std::find_if(schemas.begin(), schemas.end(), [](const auto& s) { return s.end == End::kFollowed; });
  ASSERT_NE(heavy, schemas.end());
  GenerationRequest request = Constrained(heavy->schema, "");
  request.max_tokens = 60;
  const GenerationOutcome cut = Run(request);
  request.speculation = SpeculationMode::kOff;
  const GenerationOutcome plain = Run(request);
  ASSERT_TRUE(cut.done) << cut.status;
  EXPECT_EQ(cut.text, plain.text);
  EXPECT_GT(cut.finished.accepted_tokens, 0);
  // Rows behind a cut have none of their request's rules: what these forbid would show.
  for (size_t i = 4; i < plain.tokens.size(); i += 8) {
    GenerationRequest forbids = request;
    forbids.bad_words = {{plain.tokens[i]}};
    const GenerationOutcome expected = Run(forbids);
    forbids.speculation = SpeculationMode::kDFlash;
    EXPECT_EQ(Run(forbids).tokens, expected.tokens) << "without token " << i;
  }

  ConstraintCache cache(pair_.tokenizer.get());
  const auto rules = *SequenceRules::Create(request, pair_.vocabulary, *cache.Find(request.constraint));
  for (size_t i = 0; i < 20; ++i) rules->Append(plain.tokens[i]);
  const std::vector<int32_t> drafts(plain.tokens.begin() + 20, plain.tokens.begin() + 35);
  RuleBatch batch;
  batch.rows.resize(16);
  const size_t rows = rules->Describe(drafts, 0, batch);
  EXPECT_GT(rows, 1u);
  EXPECT_LT(rows, 16u);
  const int64_t done = cache.work_done();
  EXPECT_EQ(rules->Describe(drafts, 0, batch), rows) << "whatever is known";
  EXPECT_EQ(cache.work_done(), done);
}

}  // namespace
}  // namespace dflash
