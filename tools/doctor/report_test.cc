// Who is to blame: the integration, the model, either, or the files that were given.
#include "tools/doctor/report.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/doctor/revisions.h"

namespace dflash::doctor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// A report in which every interface agrees.
Report Agreeing() {
  Report report;
  for (const Interface& interface : Interfaces()) report.Pass(interface.id, 0, 0, "something", "");
  return report;
}

void ExpectVerdict(Report& report, VerdictKind kind, int exit_code, const std::string& id) {
  report.Settle();
  const Verdict verdict = report.verdict();
  EXPECT_EQ(verdict.kind, kind) << report.ToText(false);
  EXPECT_EQ(report.ExitCode(), exit_code);
  ASSERT_NE(verdict.first_failure, nullptr);
  EXPECT_EQ(verdict.first_failure->interface->id, id);
}

constexpr const char* kByWeights[] = {"target", "fusion", "calibration", "draft-logits", "end-to-end"};

TEST(BlameTest, WithOtherWeightsItIsTheModel) {
  for (const char* id : kByWeights) {
    SCOPED_TRACE(id);
    Report report = Agreeing();
    JudgeRevisions(CompareWeights({{{"norm.weight", "a"}}, {}}, {{{"norm.weight", "b"}}, {}}),
                   CompareWeights({{{"fc.weight", "a"}}, {}}, {{{"fc.weight", "a"}}, {}}), &report);
    report.Fail(id, "seen", "cause", Blame::kUnsettled);
    ExpectVerdict(report, VerdictKind::kModel, 5, "revisions");
    EXPECT_EQ(report.Of(id).blame, Blame::kModel);
    EXPECT_THAT(report.verdict().text, HasSubstr("the target's weights are not those"));
  }
}

TEST(BlameTest, WithTheRecordedWeightsAndEveryInterfaceAgreeingItIsTheModel) {
  for (const char* id : {"fusion", "calibration", "draft-logits", "end-to-end"}) {
    SCOPED_TRACE(id);
    Report report = Agreeing();
    report.target_weights = report.drafter_weights = Weights::kRecorded;
    report.Fail(id, "seen", "cause", Blame::kUnsettled);
    ExpectVerdict(report, VerdictKind::kModel, 5, id);
    EXPECT_THAT(report.verdict().text, HasSubstr("every interface agrees"));
  }
}

// An interface that fails explains what fails behind it, and nothing before it.
TEST(BlameTest, OtherWeightsDoNotHideTheInterfaceBehindThem) {
  for (const Weights weights : {Weights::kUnknown, Weights::kOther}) {
    Report report = Agreeing();
    report.target_weights = Weights::kRecorded;
    report.drafter_weights = weights;
    report.Fail("fusion", "seen", "other weights of fc", Blame::kUnsettled);
    report.Fail("masks", "seen", "full layers run causal");
    report.Fail("draft-logits", "seen", "other numbers", Blame::kUnsettled);
    ExpectVerdict(report, VerdictKind::kIntegration, 1, "masks");
  }
}

// The recorded weights, and an interface that nobody saw: what counts is the acceptance beside the recorded.
TEST(BlameTest, WithInterfacesThatNobodySawAcceptanceTells) {
  enum class Acceptance : uint8_t { kFewer, kAsRecorded, kNotRecorded };
  const struct {
    const char* id;
    Acceptance acceptance;
    VerdictKind kind;
    int exit_code;
    const char* words;
  } cases[] = {
      {"end-to-end", Acceptance::kFewer, VerdictKind::kIntegration, 1, "broken at"},
      {"calibration", Acceptance::kFewer, VerdictKind::kIntegration, 1, "broken at"},
      {"draft-logits", Acceptance::kFewer, VerdictKind::kIntegration, 1, "broken at"},
      {"calibration", Acceptance::kAsRecorded, VerdictKind::kModel, 5, "draft as they did when they were"},
      {"head", Acceptance::kAsRecorded, VerdictKind::kModel, 5, "draft as they did when they were"},
      {"draft-logits", Acceptance::kAsRecorded, VerdictKind::kEither, 6, "as recorded"},
      {"fusion", Acceptance::kAsRecorded, VerdictKind::kEither, 6, "as recorded"},
      {"calibration", Acceptance::kNotRecorded, VerdictKind::kEither, 6, "no acceptance to compare with"},
      {"draft-logits", Acceptance::kNotRecorded, VerdictKind::kEither, 6, "no acceptance to compare with"}};
  for (const auto& [id, acceptance, kind, exit_code, words] : cases) {
    SCOPED_TRACE(id);
    Report report = Agreeing();
    report.target_weights = report.drafter_weights = Weights::kRecorded;
    report.NotChecked("masks", "not visible from outside");
    if (acceptance == Acceptance::kFewer) report.Fail("end-to-end", "seen", "cause", Blame::kUnsettled);
    if (acceptance == Acceptance::kNotRecorded) report.NotChecked("end-to-end", "none recorded");
    report.Fail(id, "seen", "cause", Blame::kUnsettled);
    ExpectVerdict(report, kind, exit_code, id);
    EXPECT_THAT(report.verdict().text, HasSubstr(words));
    if (kind == VerdictKind::kEither) {
      EXPECT_THAT(report.verdict().text, AllOf(HasSubstr("a bad drafter"), Not(HasSubstr("other weights")),
                                               Not(HasSubstr("samples"))));
    }
  }
}

// Of weights that were compared by samples alone nothing may hang on their being the recorded ones.
TEST(BlameTest, SampledWeightsMayHaveBeenChangedBetweenTheSamples) {
  const struct {
    Weights target, drafter;
    TargetText text;
    bool all_checked;
    const char* id;
    VerdictKind kind;
    const char* words;
  } cases[] = {
      {Weights::kSampled, Weights::kSampled, TargetText::kRecorded, true, "target", VerdictKind::kEither,
       "only samples of the target's weights"},
      {Weights::kSampled, Weights::kSampled, TargetText::kRecorded, true, "end-to-end", VerdictKind::kModel,
       "accepts less than recorded: weights that were changed where no fingerprint samples them"},
      {Weights::kSampled, Weights::kSampled, TargetText::kRecorded, true, "calibration", VerdictKind::kModel,
       "weights that were changed where no fingerprint samples them"},
      {Weights::kRecorded, Weights::kRecorded, TargetText::kRecorded, true, "end-to-end", VerdictKind::kModel,
       "accepts less than recorded: what was recorded is the acceptance of another pair"},
      {Weights::kSampled, Weights::kRecorded, TargetText::kOther, true, "end-to-end", VerdictKind::kEither,
       "the target itself computes something else"},
      {Weights::kSampled, Weights::kRecorded, TargetText::kOther, true, "calibration", VerdictKind::kEither,
       "the target itself computes something else"},
      {Weights::kRecorded, Weights::kRecorded, TargetText::kOther, true, "end-to-end",
       VerdictKind::kIntegration, "broken at"},
      {Weights::kSampled, Weights::kSampled, TargetText::kRecorded, false, "end-to-end", VerdictKind::kEither,
       "only samples of the weights"},
      {Weights::kSampled, Weights::kRecorded, TargetText::kUnknown, false, "end-to-end", VerdictKind::kEither,
       "only samples of the weights"},
      {Weights::kSampled, Weights::kRecorded, TargetText::kRecorded, false, "end-to-end",
       VerdictKind::kIntegration, "broken at"},
      {Weights::kSampled, Weights::kSampled, TargetText::kUnknown, false, "calibration", VerdictKind::kModel,
       "draft as they did when they were recorded"}};
  for (const auto& [target, drafter, text, all_checked, id, kind, words] : cases) {
    SCOPED_TRACE(testing::Message() << id << int(target) << int(drafter) << int(text) << all_checked);
    Report report = Agreeing();
    report.target_weights = target;
    report.drafter_weights = drafter;
    report.target_text = text;
    if (!all_checked) report.NotChecked("masks", "not visible from outside");
    report.Fail(id, "seen", "cause", Blame::kUnsettled);
    ExpectVerdict(report, kind, kind == VerdictKind::kModel ? 5 : kind == VerdictKind::kEither ? 6 : 1, id);
    EXPECT_THAT(report.verdict().text, HasSubstr(words));
  }
}

// Of unknown weights either, of the target for itself and of both for the rest; other ones are the model's.
TEST(BlameTest, WeightsOfTheTargetAndOfTheDrafter) {
  constexpr Weights kRecorded = Weights::kRecorded, kUnknown = Weights::kUnknown, kOther = Weights::kOther;
  constexpr Blame kIntegration = Blame::kIntegration, kEither = Blame::kEither, kModel = Blame::kModel;
  const struct {
    Weights target, drafter;
    Blame of_target, of_drafts;
  } cases[] = {{kRecorded, kRecorded, kIntegration, kModel},
               {kRecorded, kUnknown, kIntegration, kEither},
               {kRecorded, kOther, kIntegration, kModel},
               {kUnknown, kRecorded, kEither, kEither},
               {kUnknown, kUnknown, kEither, kEither},
               {kUnknown, kOther, kEither, kModel},
               {kOther, kRecorded, kModel, kModel},
               {kOther, kUnknown, kModel, kModel},
               {kOther, kOther, kModel, kModel}};
  for (const auto& [target, drafter, of_target, of_drafts] : cases) {
    for (const auto& [id, blame] : {std::pair("target", of_target), std::pair("draft-logits", of_drafts)}) {
      SCOPED_TRACE(testing::Message() << id << int(target) << int(drafter));
      Report report = Agreeing();
      report.target_weights = target;
      report.drafter_weights = drafter;
      report.Fail(id, "seen", "cause", Blame::kUnsettled);
      report.Settle();
      EXPECT_EQ(report.Of(id).blame, blame);
    }
  }
}

// One file that is none leaves the rest examined.
TEST(BlameTest, AFileThatIsNoneIsNotAllThereIs) {
  Report report = Agreeing();
  report.Fail("masks", "seen", "cause");
  report.FailInput("template", "no such file", "chat_template.jinja");
  ExpectVerdict(report, VerdictKind::kBadInput, 2, "template");
  EXPECT_THAT(report.verdict().text,
              AllOf(HasSubstr("\"chat template and thinking flag\" (template) could not be examined"),
                    HasSubstr(" pass, masks fails."), Not(HasSubstr("Nothing was examined"))));
  // Nor hides it what was found.
  EXPECT_THAT(report.verdict().text,
              HasSubstr("Found all the same at \"causality of the block, per layer\" (masks, integration): "
                        "cause. Look at: layer_types"));
  report.Fail("masks", "seen", "another cause", Blame::kModel);
  EXPECT_THAT(report.verdict().text, HasSubstr("(masks, model): another cause. Look at: "));
}

TEST(ReportTest, AFindingReplacesTheOneBeforeIt) {
  Report report;
  report.Judge("weights", 3, 2, "finite numbers", "seen", "cause");
  report.Fail("weights", "fc.weight has a NaN", "cause");
  EXPECT_TRUE(std::isnan(report.Of("weights").measured));
  EXPECT_TRUE(std::isnan(report.Of("weights").limit));
  EXPECT_EQ(report.Of("weights").compared, "");
  report.Pass("weights", 0, 0, "finite numbers", "seen");
  EXPECT_EQ(report.Of("weights").cause, "");
}

TEST(ReportTest, NoLineIsWiderThanTheTable) {
  for (const Outcome outcome : {Outcome::kPass, Outcome::kFail, Outcome::kSkipped, Outcome::kNotChecked}) {
    Report report = Agreeing();
    for (const Interface& interface : Interfaces()) {
      Finding& finding = report.Of(interface.id);
      finding.outcome = outcome;
      finding.blame = Blame::kEither;
      finding.measured = HUGE_VAL;
      finding.limit = 1.23e-05;
      for (int i = 0; i < 60; ++i) {
        finding.detail += " seen";
        finding.cause += " cause";
      }
    }
    report.facts.emplace_back("left out", "1 of 21 golden prompts" + report.Of("masks").detail);
    const std::string text = report.ToText(false);
    EXPECT_THAT(text, HasSubstr("seen\n             seen")) << "under the value, not under its name";
    for (size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
      end = text.find('\n', begin);
      EXPECT_LE(end - begin, 106u) << text.substr(begin, end - begin);
    }
  }
}

TEST(ReportTest, SaysWhatAFindingWasHeldAgainst) {
  Report report = Agreeing();
  EXPECT_EQ(report.Of("fusion").oracle(), Oracle::kOwnPath);
  report.Of("fusion").held_against = Oracle::kBundle;
  EXPECT_EQ(report.Of("fusion").oracle(), Oracle::kBundle);
  EXPECT_THAT(
      report.ToJson(),
      Not(HasSubstr("\"title\": \"projection, then norm with plain weight\",\n      \"oracle\": \"own")));
}

TEST(BlameTest, TheRecordedTargetThatComputesSomethingElseIsTheIntegration) {
  Report report = Agreeing();
  report.target_weights = report.drafter_weights = Weights::kRecorded;
  report.Fail("target", "seen", "the target's layers", Blame::kUnsettled);
  report.Fail("end-to-end", "seen", "cause", Blame::kUnsettled);
  ExpectVerdict(report, VerdictKind::kIntegration, 1, "target");
  EXPECT_EQ(report.Of("end-to-end").blame, Blame::kIntegration);
}

TEST(BlameTest, AnInterfaceThatFailsExplainsWhatFollows) {
  for (const Weights weights : {Weights::kRecorded, Weights::kUnknown, Weights::kOther}) {
    Report report = Agreeing();
    report.target_weights = report.drafter_weights = weights;
    report.Fail("masks", "seen", "causal");
    report.Fail("end-to-end", "seen", "cause", Blame::kUnsettled);
    ExpectVerdict(report, VerdictKind::kIntegration, 1, "masks");
    EXPECT_EQ(report.Of("end-to-end").blame, Blame::kIntegration);
  }
}

TEST(BlameTest, WithoutFingerprintsBothArePossible) {
  for (const char* id : kByWeights) {
    SCOPED_TRACE(id);
    Report report = Agreeing();
    JudgeRevisions(CompareWeights({{{"norm.weight", "a"}}, {}}, {}),
                   CompareWeights({{{"fc.weight", "a"}}, {}}, {}), &report);
    EXPECT_EQ(report.Of("revisions").outcome, Outcome::kNotChecked);
    report.Fail(id, "seen", "cause", Blame::kUnsettled);
    ExpectVerdict(report, VerdictKind::kEither, 6, id);
    EXPECT_THAT(report.verdict().text,
                AllOf(HasSubstr("both are possible"), HasSubstr("weights"), HasSubstr("broken integration")));
  }
}

TEST(RevisionsTest, EveryTensorCounts) {
  const auto compare = [](const std::map<std::string, std::string>& own,
                          const std::map<std::string, std::string>& recorded) {
    return CompareWeights({.samples = own, .whole = {}}, {.samples = recorded, .whole = {}});
  };
  const WeightsComparison some = compare({{"a", "1"}, {"b", "2"}}, {{"a", "1"}});
  EXPECT_EQ(some.outcome(), Weights::kUnknown);
  EXPECT_EQ(some.uncompared, 1);
  EXPECT_EQ(compare({{"a", "1"}, {"b", "2"}}, {{"a", "2"}}).outcome(), Weights::kOther);
  EXPECT_EQ(compare({{"a", "1"}, {"b", "2"}}, {{"a", "1"}, {"b", "2"}}).outcome(), Weights::kSampled);
  EXPECT_EQ(compare({}, {}).outcome(), Weights::kUnknown);
}

// What samples leave out, digests of all bytes do not; those of some tensors make the rest no more than
// sampled.
TEST(RevisionsTest, EveryByteCountsWhereItWasRecorded) {
  const std::map<std::string, std::string> samples = {{"a", "1"}, {"b", "2"}},
                                           whole = {{"a", "3"}, {"b", "4"}};
  const auto outcome = [&](const TensorDigests& own, const TensorDigests& recorded) {
    return CompareWeights(own, recorded).outcome();
  };
  EXPECT_EQ(outcome({samples, whole}, {samples, whole}), Weights::kRecorded);
  EXPECT_EQ(outcome({samples, {{"a", "3"}, {"b", "5"}}}, {samples, whole}), Weights::kOther);
  EXPECT_EQ(outcome({samples, {}}, {samples, whole}), Weights::kSampled);
  EXPECT_EQ(outcome({samples, whole}, {samples, {}}), Weights::kSampled);
  EXPECT_EQ(outcome({samples, whole}, {samples, {{"a", "3"}}}), Weights::kSampled);
  EXPECT_EQ(outcome({samples, whole}, {{}, whole}), Weights::kRecorded);
  EXPECT_EQ(outcome({samples, whole}, {{}, {{"a", "3"}}}), Weights::kUnknown);
}

TEST(BlameTest, FilesThatAreNoneAreBadInput) {
  Report report;
  report.FailInput("files", "no such folder", "--model /nowhere");
  ExpectVerdict(report, VerdictKind::kBadInput, 2, "files");
  EXPECT_THAT(report.verdict().text, AllOf(HasSubstr("--model /nowhere"), HasSubstr("Nothing was examined")));
}

}  // namespace
}  // namespace dflash::doctor
