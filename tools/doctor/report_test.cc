// Who is to blame: the integration, the model, either, or the files that were given.
#include "tools/doctor/report.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/doctor/revisions.h"

namespace dflash::doctor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

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
    JudgeRevisions(CompareWeights({{"norm.weight", "a"}}, {{"norm.weight", "b"}}),
                   CompareWeights({{"fc.weight", "a"}}, {{"fc.weight", "a"}}), &report);
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

TEST(BlameTest, WithTheRecordedWeightsAndInterfacesThatNobodySawItIsTheIntegration) {
  Report report = Agreeing();
  report.target_weights = report.drafter_weights = Weights::kRecorded;
  report.NotChecked("masks", "not visible from outside");
  report.Fail("end-to-end", "seen", "cause", Blame::kUnsettled);
  ExpectVerdict(report, VerdictKind::kIntegration, 1, "end-to-end");
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
    JudgeRevisions(CompareWeights({{"norm.weight", "a"}}, {}), CompareWeights({{"fc.weight", "a"}}, {}),
                   &report);
    EXPECT_EQ(report.Of("revisions").outcome, Outcome::kNotChecked);
    report.Fail(id, "seen", "cause", Blame::kUnsettled);
    ExpectVerdict(report, VerdictKind::kEither, 6, id);
    EXPECT_THAT(report.verdict().text,
                AllOf(HasSubstr("both are possible"), HasSubstr("weights"), HasSubstr("broken integration")));
  }
}

TEST(RevisionsTest, EveryTensorCounts) {
  const WeightsComparison some = CompareWeights({{"a", "1"}, {"b", "2"}}, {{"a", "1"}});
  EXPECT_EQ(some.outcome(), Weights::kUnknown);
  EXPECT_EQ(some.uncompared, 1);
  EXPECT_EQ(CompareWeights({{"a", "1"}, {"b", "2"}}, {{"a", "2"}}).outcome(), Weights::kOther);
  EXPECT_EQ(CompareWeights({{"a", "1"}, {"b", "2"}}, {{"a", "1"}, {"b", "2"}}).outcome(), Weights::kRecorded);
  EXPECT_EQ(CompareWeights({}, {}).outcome(), Weights::kUnknown);
}

TEST(BlameTest, FilesThatAreNoneAreBadInput) {
  Report report;
  report.FailInput("files", "no such folder", "--model /nowhere");
  ExpectVerdict(report, VerdictKind::kBadInput, 2, "files");
  EXPECT_THAT(report.verdict().text, HasSubstr("--model /nowhere"));
}

}  // namespace
}  // namespace dflash::doctor
