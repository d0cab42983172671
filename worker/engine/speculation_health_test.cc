// The detector on rounds whose cause is known.
#include "worker/engine/speculation_health.h"

#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace dflash {
namespace {

constexpr int32_t kDrafts = 15;

// Rounds of a drafter that is right with probability `truth(p)` where it says p, with p around `confidence`.
struct Model {
  double confidence = 0.8;
  double lost = 0;      // of the first draft's acceptance, beyond what it says
  int cliff = kDrafts;  // from this position on nothing is accepted
  float temperature = 0;
  ContextOrigin origin = ContextOrigin::kCold;
  int64_t context_missing = 0;
  bool other_law = false;
};

DecodedRound Round(const Model& model, std::mt19937& random) {
  std::uniform_real_distribution<double> uniform(0, 1);
  DecodedRound round;
  round.round.drafted = kDrafts;
  bool alive = true;
  for (int d = 0; d < kDrafts; ++d) {
    const double p = std::min(1.0, model.confidence + 0.2 * (uniform(random) - 0.5));
    round.confidences.push_back(static_cast<float>(p));
    alive = alive && uniform(random) < p - (d == 0 ? model.lost : 0) && d < model.cliff;
    round.round.accepted += alive;
  }
  round.emitted = round.round.accepted + 1;
  round.temperature = model.temperature;
  round.origin = model.origin;
  round.context_tokens = 100;
  round.context_missing = model.context_missing;
  round.other_law = model.other_law;
  return round;
}

SpeculationHealth After(const std::vector<std::pair<int, Model>>& models) {
  HealthMonitor monitor;
  std::mt19937 random(5);
  for (const auto& [rounds, model] : models) {
    for (int i = 0; i < rounds; ++i) monitor.Add(Round(model, random));
  }
  return monitor.Judge();
}

void Expect(const SpeculationHealth& health, HealthVerdict verdict, HealthReason reason) {
  EXPECT_STREQ(Name(health.verdict()), Name(verdict));
  EXPECT_STREQ(Name(health.reason), Name(reason));
}

TEST(SpeculationHealthTest, FewRoundsSayNothing) {
  Expect(After({{127, {.lost = 0.5}}}), HealthVerdict::kUnknown, HealthReason::kTooFewRounds);
  Expect(After({{128, {.lost = 0.5}}}), HealthVerdict::kBroken, HealthReason::kConfidentAndRejected);
}

TEST(SpeculationHealthTest, ADrafterThatKnowsWhatItKnowsIsHealthy) {
  for (const double confidence : {0.6, 0.75, 0.9}) {
    const SpeculationHealth health = After({{2048, {.confidence = confidence}}});
    Expect(health, HealthVerdict::kHealthy, HealthReason::kNone);
    EXPECT_NEAR(health.first_confidence, confidence, 0.02);
    EXPECT_NEAR(health.gap(), 0, 0.04);
    EXPECT_EQ(health.rounds, 2048);
  }
}

TEST(SpeculationHealthTest, HardTextIsNoDefect) {
  for (const double confidence : {0.15, 0.3, 0.4})
    Expect(After({{2048, {.confidence = confidence}}}), HealthVerdict::kHardText,
           HealthReason::kDrafterUnsure);
}

// A drafter that accepts more than it says, as greedy ones do, has no defect.
TEST(SpeculationHealthTest, ModestyIsNoDefect) {
  Expect(After({{2048, {.confidence = 0.5, .lost = -0.4}}}), HealthVerdict::kHealthy, HealthReason::kNone);
}

TEST(SpeculationHealthTest, ConfidentAndRejectedIsBroken) {
  Expect(After({{2048, {.confidence = 0.8, .lost = 0.4}}}), HealthVerdict::kBroken,
         HealthReason::kConfidentAndRejected);
  // Also where most of the text is hard.
  Expect(After({{1500, {.confidence = 0.2}}, {500, {.confidence = 0.8, .lost = 0.3}}}),
         HealthVerdict::kBroken, HealthReason::kConfidentAndRejected);
}

// Penalties and constraints make the target refuse what the drafter rightly expects.
TEST(SpeculationHealthTest, RulesOfRequestsAreNoDefectAndHideNone) {
  const Model ruled = {.confidence = 0.8, .lost = 0.5, .cliff = 2, .other_law = true};
  Expect(After({{2048, ruled}}), HealthVerdict::kUnknown, HealthReason::kTooFewRounds);
  Expect(After({{500, {}}, {2048, ruled}}), HealthVerdict::kHealthy, HealthReason::kNone);
  Expect(After({{500, {.lost = 0.4}}, {2048, ruled}}), HealthVerdict::kBroken,
         HealthReason::kConfidentAndRejected);
}

TEST(SpeculationHealthTest, ACliffInTheBlockIsBroken) {
  Expect(After({{2048, {.confidence = 0.9, .cliff = 3}}}), HealthVerdict::kBroken,
         HealthReason::kCliffAtPosition);
}

TEST(SpeculationHealthTest, OnlyPrefixHitsAreBroken) {
  const Model hit = {.lost = 0.3, .origin = ContextOrigin::kPrefix};
  Expect(After({{1000, {}}, {200, hit}}), HealthVerdict::kBroken, HealthReason::kPrefixHitsDiffer);
  Expect(After({{1000, {}}, {200, {.origin = ContextOrigin::kPrefix}}}), HealthVerdict::kHealthy,
         HealthReason::kNone);
}

TEST(SpeculationHealthTest, MissingContextIsBroken) {
  Expect(After({{1000, {}}, {1, {.context_missing = 50}}}), HealthVerdict::kBroken,
         HealthReason::kContextMissing);
}

TEST(SpeculationHealthTest, AHeadWithoutOpinionIsBroken) {
  HealthMonitor monitor;
  DecodedRound round;
  round.round.drafted = kDrafts;
  round.emitted = 1;
  round.confidences.assign(kDrafts, 1.0f / 4096);
  for (int i = 0; i < 200; ++i) {
    round.context_tokens = i;
    monitor.Add(round);
  }
  Expect(monitor.Judge(), HealthVerdict::kBroken, HealthReason::kNoOpinion);
}

TEST(SpeculationHealthTest, HotRequestsAreNotJudged) {
  Expect(After({{500, {}}, {500, {.lost = 0.5, .temperature = 1.5f}}}), HealthVerdict::kHealthy,
         HealthReason::kNone);
}

TEST(SpeculationHealthTest, TheWindowForgets) {
  Expect(After({{2048, {.lost = 0.5}}, {2304, {}}}), HealthVerdict::kHealthy, HealthReason::kNone);
}

// Drafts behind the end of an output were never judged.
TEST(SpeculationHealthTest, EndsOfOutputsAreNoRejections) {
  HealthMonitor monitor;
  DecodedRound round;
  round.round = {.drafted = kDrafts, .accepted = 3};
  round.emitted = 3;  // the third accepted draft was the stop token
  round.confidences.assign(kDrafts, 0.99f);
  EXPECT_EQ(ReachedDrafts(round), 3);
  for (int i = 0; i < 200; ++i) {
    round.context_tokens = i;
    monitor.Add(round);
  }
  Expect(monitor.Judge(), HealthVerdict::kHealthy, HealthReason::kNone);
}

// A drafter that is right may be rejected once where it is sure. Of a request that is sent again and again
// that is still once, however its blocks are cut.
TEST(SpeculationHealthTest, ARequestThatIsSentAgainSaysNothingNew) {
  std::mt19937 random(5);
  DecodedRound rejected = Round({.confidence = 0.8}, random);
  rejected.round.accepted = 0;
  rejected.emitted = 1;
  HealthMonitor monitor;
  for (int i = 0; i < 500; ++i) {
    rejected.round.drafted = 4 + i % (kDrafts - 4);
    monitor.Add(rejected);
  }
  Expect(monitor.Judge(), HealthVerdict::kUnknown, HealthReason::kTooFewRounds);
  EXPECT_EQ(monitor.Judge().rounds, 1);
  for (int i = 0; i < 300; ++i) monitor.Add(Round({.confidence = 0.8}, random));
  for (int i = 0; i < 500; ++i) monitor.Add(rejected);
  Expect(monitor.Judge(), HealthVerdict::kHealthy, HealthReason::kNone);
  EXPECT_EQ(monitor.Judge().rounds, 301);
  // Another context, or another origin of it, is news.
  rejected.context_tokens += 1;
  monitor.Add(rejected);
  rejected.origin = ContextOrigin::kPrefix;
  monitor.Add(rejected);
  EXPECT_EQ(monitor.Judge().rounds, 303);
}

}  // namespace
}  // namespace dflash
