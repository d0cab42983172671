// The self-test on the tiny pair: healthy, and with the defects that it is there for.
#include "worker/self_test/self_test.h"

#include <memory>
#include <string>
#include <utility>

#include "base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/defects/defects.h"
#include "worker/model/testing/temporary_folder.h"
#include "worker/testing/tiny_pair.h"

namespace dflash {
namespace {

using ::testing::HasSubstr;

golden::GoldenBundle Bundle() {
  return golden::GoldenBundle::Open(testing::SourcePath("tests/golden")).value();
}

std::unique_ptr<Engine> EngineOf(const testing::TinyPair& pair, Drafter* drafter,
                                 int64_t max_verify_rows = 0) {
  EngineOptions options;
  options.max_verify_rows = max_verify_rows;
  options.vocabulary = pair.vocabulary;
  return Engine::Create(options, pair.target.get(), drafter, pair.table.get(), pair.tokenizer.get(),
                        *pair.stream)
      .value();
}

SelfTestReport Examine(const std::string& defect, int64_t max_verify_rows = 0) {
  testing::TinyPairOptions pair_options;
  if (!defect.empty()) {
    pair_options.mutate_contract = [&](FeatureContract& contract) {
      EXPECT_TRUE(PlantDefect(defect, contract).ok());
    };
  }
  testing::TinyPair pair = testing::LoadTinyPair(pair_options).value();
  std::unique_ptr<Drafter> drafter = std::move(pair.drafter);
  if (!defect.empty()) {
    drafter = PlantDefect(defect, pair.contract, std::move(drafter), pair.table.get(), *pair.stream).value();
  }
  const std::unique_ptr<Engine> engine = EngineOf(pair, drafter.get(), max_verify_rows);
  const absl::StatusOr<SelfTestReport> report = RunSelfTest(Bundle(), pair.contract, {}, engine.get());
  EXPECT_TRUE(report.ok()) << report.status();
  return report.value_or(SelfTestReport());
}

TEST(CheckTargetComputesTest, FindsWeightsThatAreNoNumbers) {
  const testing::TinyPair healthy = testing::LoadTinyPair({}).value();
  const absl::Status fine = CheckTargetComputes(EngineOf(healthy, nullptr).get());
  EXPECT_TRUE(fine.ok()) << fine;

  const TemporaryFolder folder;
  ASSERT_TRUE(testing::CopyTargetWithNan(folder.path(), "model.language_model.norm.weight", 5).ok());
  testing::TinyPairOptions options;
  options.target_dir = folder.path();
  const testing::TinyPair broken = testing::LoadTinyPair(options).value();
  const absl::Status found = CheckTargetComputes(EngineOf(broken, nullptr).get());
  EXPECT_EQ(ReasonOf(found), "NUMERIC_FAULT");
  EXPECT_THAT(std::string(found.message()),
              HasSubstr("the target, given token 0: the target's logits at position 1 are not numbers"));
}

TEST(SelfTestTest, TheHealthyPairPasses) {
  const SelfTestReport report = Examine("");
  EXPECT_TRUE(report.passed) << report.detail;
  EXPECT_THAT(report.detail, HasSubstr("of 4 golden prompts: "));
  EXPECT_THAT(report.detail, HasSubstr("chat 1")) << "ten and more tokens per round";
  EXPECT_EQ(report.detail.find("not the recorded"), std::string::npos) << report.detail;
}

// Of ten and more tokens per round blocks of eight rows have fewer: that is the operator's wish, no defect.
TEST(SelfTestTest, WhatCutBlocksGiveIsComparedWithCutOnes) {
  const SelfTestReport cut = Examine("", 8);
  EXPECT_TRUE(cut.passed) << cut.detail;
  EXPECT_THAT(cut.detail,
              HasSubstr("blocks, also the recorded ones, cut to 8 of 16 rows by --max-verify-rows"));
  EXPECT_THAT(cut.detail, HasSubstr("recorded 8.00"));
  EXPECT_FALSE(Examine("zero-head", 8).passed) << "nothing is accepted";
  EXPECT_FALSE(Examine("theta", 8).passed) << "the contract is judged all the same";
  // A limit of a whole block cuts none while one sequence runs.
  const SelfTestReport whole = Examine("", 16);
  EXPECT_TRUE(whole.passed) << whole.detail;
  EXPECT_THAT(whole.detail, HasSubstr("tokens per round of 4 golden prompts: "));
  EXPECT_FALSE(Examine("zero-head", 16).passed);
}

TEST(SelfTestTest, AnotherContractIsNamed) {
  for (const auto& [defect, words] : {std::pair("offset0", "target_layer_ids is 0,2,4 and not 1,3,5"),
                                      std::pair("noswa", "masks of the layers"),
                                      std::pair("target-norm", "norm"), std::pair("theta", "rope_theta")}) {
    const SelfTestReport report = Examine(defect);
    EXPECT_FALSE(report.passed) << defect;
    EXPECT_THAT(report.detail, HasSubstr(words)) << defect;
  }
}

// What no contract shows costs accepted drafts.
TEST(SelfTestTest, DefectsAroundTheDrafterCostAcceptance) {
  for (const char* defect : {"zero-head", "shifted-context"}) {
    const SelfTestReport report = Examine(defect);
    EXPECT_FALSE(report.passed) << defect << ": " << report.detail;
    EXPECT_THAT(report.detail, HasSubstr("tokens per round")) << defect;
  }
}

TEST(SelfTestTest, WithoutAPromptThatFitsItCannotTell) {
  testing::TinyPair pair = testing::LoadTinyPair({}).value();
  const std::unique_ptr<Engine> engine = testing::MakeEngine(pair, pair.drafter.get()).value();
  const SelfTestOptions options = {.max_tokens = int64_t{1} << 30};
  EXPECT_TRUE(absl::IsInvalidArgument(RunSelfTest(Bundle(), pair.contract, options, engine.get()).status()));
}

// The engine that was tested serves on, plainly when it was told so.
TEST(SelfTestTest, ARefusedEngineServesPlainly) {
  testing::TinyPair pair = testing::LoadTinyPair({}).value();
  const std::unique_ptr<Engine> engine = testing::MakeEngine(pair, pair.drafter.get()).value();
  const auto prompts = testing::LoadGoldenPrompts().value();
  const auto before = testing::RunAll(*engine, {testing::GoldenRequest(prompts[0])}).value();
  ASSERT_GT(before[0].finished.accepted_tokens, 0);
  engine->RefuseSpeculation("self_test_failed");
  const auto after = testing::RunAll(*engine, {testing::GoldenRequest(prompts[0])}).value();
  EXPECT_TRUE(after[0].done);
  EXPECT_EQ(after[0].tokens, before[0].tokens);
  EXPECT_EQ(after[0].finished.drafted_tokens, 0);
}

}  // namespace
}  // namespace dflash
