// Greedy text and the acceptance length of every round of the 21 golden prompts; and the classic integration
// defects, planted on purpose, which must show the acceptance that the independent implementation measured
// for them.
#include <algorithm>
#include <cstdio>
#include <map>

#include "gtest/gtest.h"
#include "worker/defects/defects.h"
#include "worker/testing/tiny_pair.h"

namespace dflash {
namespace {

using testing::GenerationOutcome;
using testing::GoldenPrompt;
using testing::GoldenRequest;
using testing::LoadGoldenPrompts;
using testing::LoadTinyPair;
using testing::MakeEngine;
using testing::RunAll;
using testing::TinyPair;
using testing::TinyPairOptions;

double MeanTokensPerRound(const std::vector<GenerationOutcome>& outcomes,
                          const std::vector<GoldenPrompt>& prompts, const std::string& kind) {
  double tokens = 0;
  double rounds = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    if (prompts[i].kind != kind) continue;
    for (const RoundReport& round : outcomes[i].rounds) tokens += round.accepted + 1;
    rounds += static_cast<double>(outcomes[i].rounds.size());
  }
  return tokens / rounds;
}

std::vector<GenerationOutcome> RunGolden(TinyPair& pair, Drafter* drafter,
                                         const std::vector<GoldenPrompt>& prompts) {
  absl::StatusOr<std::unique_ptr<Engine>> engine = MakeEngine(pair, drafter);
  EXPECT_TRUE(engine.ok()) << engine.status();
  std::vector<GenerationRequest> requests;
  for (const GoldenPrompt& prompt : prompts) requests.push_back(GoldenRequest(prompt));
  absl::StatusOr<std::vector<GenerationOutcome>> outcomes = RunAll(**engine, std::move(requests));
  EXPECT_TRUE(outcomes.ok()) << outcomes.status();
  return *outcomes;
}

TEST(GoldenTextTest, OutputsAndAcceptanceLengthsAreIdentical) {
  absl::StatusOr<TinyPair> pair = LoadTinyPair();
  ASSERT_TRUE(pair.ok()) << pair.status();
  absl::StatusOr<std::vector<GoldenPrompt>> prompts = LoadGoldenPrompts();
  ASSERT_TRUE(prompts.ok()) << prompts.status();
  ASSERT_EQ(prompts->size(), 21u);
  const std::vector<GenerationOutcome> outcomes = RunGolden(*pair, pair->drafter.get(), *prompts);
  for (size_t i = 0; i < prompts->size(); ++i) {
    SCOPED_TRACE(::testing::Message() << "prompt " << i << " " << (*prompts)[i].kind);
    ASSERT_TRUE(outcomes[i].done) << outcomes[i].status;
    EXPECT_EQ(outcomes[i].tokens, (*prompts)[i].output_ids);
    // The counting rule of the last round differs (golden/README.md), so it is not compared.
    const std::vector<int64_t>& golden = (*prompts)[i].acceptance_lengths;
    ASSERT_EQ(outcomes[i].rounds.size(), golden.size());
    for (size_t round = 0; round + 1 < golden.size(); ++round) {
      EXPECT_EQ(outcomes[i].rounds[round].accepted + 1, golden[round]) << "round " << round;
    }
    EXPECT_GT(outcomes[i].finished.drafted_tokens, 0);
  }
  EXPECT_NEAR(MeanTokensPerRound(outcomes, *prompts, "chat"), testing::kGoldenChatMean, 0.05);
  EXPECT_NEAR(MeanTokensPerRound(outcomes, *prompts, "code"), 1.458, 0.05);
  EXPECT_NEAR(MeanTokensPerRound(outcomes, *prompts, "long-code"), 1.521, 0.05);
}

TEST(GoldenTextTest, TextIsTheDetokenizedOutput) {
  absl::StatusOr<TinyPair> pair = LoadTinyPair();
  ASSERT_TRUE(pair.ok()) << pair.status();
  std::vector<GoldenPrompt> prompts = *LoadGoldenPrompts();
  prompts.resize(5);
  absl::StatusOr<std::unique_ptr<Engine>> engine = MakeEngine(*pair, pair->drafter.get());
  ASSERT_TRUE(engine.ok());
  std::vector<GenerationRequest> requests;
  for (const GoldenPrompt& prompt : prompts) {
    requests.push_back(GoldenRequest(prompt));
    requests.back().keep_special_tokens = true;
  }
  const std::vector<GenerationOutcome> outcomes = *RunAll(**engine, requests);
  for (size_t i = 0; i < prompts.size(); ++i) EXPECT_EQ(outcomes[i].text, prompts[i].output_text);
}

struct Defect {
  const char* name;
  double chat_mean;  // of tests/golden/README.md
};

class DefectTest : public ::testing::TestWithParam<Defect> {};

TEST_P(DefectTest, ShowsTheGoldenAcceptance) {
  TinyPairOptions options;
  options.mutate_contract = [](FeatureContract& contract) {
    const absl::Status planted = PlantDefect(GetParam().name, contract);
    ASSERT_TRUE(planted.ok()) << planted;
  };
  absl::StatusOr<TinyPair> pair = LoadTinyPair(options);
  ASSERT_TRUE(pair.ok()) << pair.status();
  std::vector<GoldenPrompt> prompts = *LoadGoldenPrompts();
  std::erase_if(prompts, [](const GoldenPrompt& prompt) { return prompt.kind != "chat"; });
  absl::StatusOr<std::unique_ptr<Drafter>> drafter =
      PlantDefect(GetParam().name, std::move(pair->drafter), pair->table.get());
  ASSERT_TRUE(drafter.ok()) << drafter.status();
  const std::vector<GenerationOutcome> outcomes = RunGolden(*pair, drafter->get(), prompts);
  const double mean = MeanTokensPerRound(outcomes, prompts, "chat");
  std::printf("%s: %.3f tokens per round, golden %.3f\n", GetParam().name, mean, GetParam().chat_mean);
  EXPECT_NEAR(mean, GetParam().chat_mean, 0.05);
  // Whatever the drafter does, the text is the target's.
  for (size_t i = 0; i < prompts.size(); ++i) EXPECT_EQ(outcomes[i].tokens, prompts[i].output_ids);
}

INSTANTIATE_TEST_SUITE_P(Classic, DefectTest,
                         ::testing::Values(Defect{"offset0", 6.350}, Defect{"noswa", 2.811},
                                           Defect{"noncausal", 8.206}, Defect{"dropprefix", 7.908},
                                           Defect{"vllm0201", 1.854}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(DefectNamesTest, EveryDefectIsMeasured) { EXPECT_EQ(DefectNames().size(), 5u); }

}  // namespace
}  // namespace dflash
