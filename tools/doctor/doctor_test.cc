// The doctor over the tiny pair: healthy, and with every known defect planted. Each defect must be the first
// failing interface, by its own name and with its own cause. In doctor_drafters_test.cc,
// doctor_targets_test.cc and doctor_files_test.cc what is merely bad: a drafter, a target, files.
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tools/doctor/checks.h"
#include "tools/doctor/doctor.h"
#include "tools/doctor/testing/changed_pair.h"
#include "worker/defects/defects.h"

namespace dflash::doctor {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST(DoctorTest, HealthyPairPassesEverything) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    DoctorOptions options = Options();
    options.ranks = ranks;
    if (ranks == 2) options.max_prompts = 18;
    const absl::StatusOr<Report> report = RunDoctor(options);
    ASSERT_TRUE(report.ok()) << report.status();
    const Verdict verdict = report->verdict();
    EXPECT_EQ(verdict.kind, VerdictKind::kHealthy) << report->ToText(false);
    EXPECT_EQ(report->ExitCode(), 0);
    EXPECT_THAT(Ids(*report, Outcome::kFail), IsEmpty());
    EXPECT_THAT(Ids(*report, Outcome::kNotChecked), IsEmpty());
    EXPECT_EQ(Ids(*report, Outcome::kSkipped),
              ranks == 1 ? std::vector<std::string>{"ranks"} : std::vector<std::string>{});
    for (const char* id :
         {"injection", "rope", "masks", "window", "paging", "draft-layers", "head", "positions"})
      EXPECT_EQ(report->Of(id).limit, GatesFor(DType::kF32).stage) << id;
    // Nothing passes for want of a number.
    EXPECT_GT(report->Of("target").measured, 0);
    EXPECT_GT(report->Of("masks").measured, 0);
    EXPECT_GT(report->Of("window").measured, 0);
    EXPECT_THAT(report->Of("preemption").detail, Not(HasSubstr(" 0 preemptions")));
    EXPECT_THAT(report->Of("prefix").detail, Not(HasSubstr(" 0 of "))) << "nothing came from the cache";
    const auto json = nlohmann::json::parse(report->ToJson());
    EXPECT_EQ(json["verdict"]["kind"], "healthy");
    EXPECT_EQ(json["interfaces"].size(), Interfaces().size());
  }
}

struct Case {
  const char* defect;
  const char* interface;  // the first to fail
  const char* cause;
};

class PlantedDefect : public ::testing::TestWithParam<Case> {};

TEST_P(PlantedDefect, IsTheFirstFailingInterface) {
  DoctorOptions options = Options();
  options.defect = GetParam().defect;
  options.stop_at_first_failure = true;
  const absl::StatusOr<Report> report = RunDoctor(options);
  ASSERT_TRUE(report.ok()) << report.status();
  const Verdict verdict = report->verdict();
  ASSERT_EQ(verdict.kind, VerdictKind::kIntegration) << report->ToText(false);
  EXPECT_STREQ(verdict.first_failure->interface->id, GetParam().interface) << report->ToText(false);
  EXPECT_THAT(verdict.first_failure->cause, HasSubstr(GetParam().cause));
  EXPECT_EQ(report->ExitCode(), 1);
}

constexpr Case kCases[] = {
    {"offset0", "tap-layer", "layer ids are read one too low"},
    {"permuted-taps", "tap-order", "another order"},
    {"noswa", "window", "the sliding windows are dropped"},
    {"window-off-by-one", "window", "off by one"},
    {"noncausal", "masks", "sliding layers run bidirectional"},
    {"full-causal", "masks", "full layers run causal"},
    {"vllm0201", "tap-layer", "layer ids are read one too low"},
    {"target-norm", "fusion", "(1 + w)"},
    {"theta", "rope", "theta is read from the wrong place: 1e+07 instead of 1e+06"},
    {"partial-rotary", "rope", "partial_rotary_factor leaked"},
    {"dropprefix", "prefix", "restored without drafter context"},
    {"last-chunk", "chunked-prefill", "only the last prefill chunk's taps"},
    {"shifted-context", "context-update", "shifted by the number of rejected drafts"},
    {"rejected-kept", "context-update", "rows of rejected drafts stay"},
    {"zero-head", "head", "the drafter's head is zero"},
    {"mask-stripped", "mask-token", "stripped"},
    {"thinking-flag", "template", "the thinking flag"},
};
INSTANTIATE_TEST_SUITE_P(All, PlantedDefect, ::testing::ValuesIn(kCases), [](const auto& info) {
  std::string name = info.param.defect;
  std::erase(name, '-');
  return name;
});

TEST(DoctorTest, TheTableHasEveryDefect) {
  std::vector<std::string> names;
  for (const Case& entry : kCases) names.emplace_back(entry.defect);
  EXPECT_THAT(names, ::testing::UnorderedElementsAreArray(DefectNames()));
}

TEST(DoctorTest, TheClassicThreeTogetherAreToldApart) {
  DoctorOptions options = Options();
  options.defect = "vllm0201";
  options.max_prompts = 4;
  const absl::StatusOr<Report> report = RunDoctor(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(Ids(*report, Outcome::kFail),
              AllOf(Contains("tap-layer"), Contains("masks"), Contains("window"), Contains("end-to-end"),
                    Not(Contains("target")), Not(Contains("rope")), Not(Contains("rollback"))));
  EXPECT_THAT(report->Of("masks").cause, HasSubstr("bidirectional"));
  EXPECT_THAT(report->Of("window").cause, HasSubstr("dropped"));
  EXPECT_THAT(report->verdict().text,
              AllOf(HasSubstr("one too low"), HasSubstr("masks"), HasSubstr("window")));
}

// What shares the reader of the configuration cannot judge it: without a bundle nothing about it passes.
TEST(DoctorTest, WithoutABundleConfigurationIsNotChecked) {
  for (const char* defect : {"", "noswa"}) {
    DoctorOptions options = Options();
    options.golden.clear();
    options.defect = defect;
    const absl::StatusOr<Report> report = RunDoctor(options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->verdict().kind, VerdictKind::kIncomplete) << report->ToText(false);
    for (const char* id :
         {"revisions", "config", "tokenizer", "template", "target", "tap-layer", "tap-order", "rope",
          "embedding", "masks", "window", "positions", "block-size", "draft-logits", "end-to-end"}) {
      EXPECT_EQ(report->Of(id).outcome, Outcome::kNotChecked) << id;
    }
    for (const char* id :
         {"fusion", "injection", "head", "acceptance", "context-update", "chunked-prefill", "sampling"}) {
      EXPECT_EQ(report->Of(id).outcome, Outcome::kPass) << id;
    }
    EXPECT_THAT(report->Of("window").detail, HasSubstr(*defect == '\0' ? "window 64" : "causal, no window"));
  }
}

// A window that no context reaches is not checked, whatever agrees.
TEST(DoctorTest, AWindowOutOfReachIsNotChecked) {
  const Folder drafter("doctor_wide_window"), bundle("doctor_wide_bundle");
  WriteDrafter(drafter.path(), [](const StoredTensor&, bf16*, int64_t) {});
  Json config = Json::parse(ReadAll(drafter.path() / "config.json"));
  config["sliding_window"] = 2048;
  WriteAll(drafter.path() / "config.json", config.dump());
  DoctorOptions options = Options();
  options.draft_model = drafter.path();
  options.max_prompts = 2;
  options.golden = CopyBundle(bundle, [](Json& json, Json&) {
    for (Json& layer : json["contract"]["layers"]) {
      if (layer["window"] != 0) layer["window"] = 2048;
    }
  });
  const absl::StatusOr<Report> report = RunDoctor(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->Of("window").outcome, Outcome::kNotChecked) << report->ToText(false);
  EXPECT_THAT(report->Of("window").detail, HasSubstr("does not reach the window of 2048"));
}

// With short golden prompts alone the prefix cache is reached all the same.
TEST(DoctorTest, ShortPromptsLeaveNothingOut) {
  const Folder bundle("doctor_short_bundle");
  DoctorOptions options = Options();
  options.golden = CopyBundle(bundle, [&](Json&, Json& prompts) {
    for (size_t i = 0; i < prompts.size(); ++i) {
      if (prompts[i]["prompt_ids"].size() >= 64 && i > 3 && i != 16) prompts[i] = prompts[3];
    }
  });
  options.max_prompts = 2;
  const absl::StatusOr<Report> report = RunDoctor(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->Of("prefix").outcome, Outcome::kPass) << report->ToText(false);
  EXPECT_THAT(report->Of("prefix").detail, AllOf(Not(HasSubstr(" 0 of ")), HasSubstr("128 of 147")));
  EXPECT_THAT(report->Of("preemption").detail, HasSubstr("0 of 2 choices of one prompt"));
  EXPECT_THAT(report->Of("limits").detail, HasSubstr("stops inside an accepted run"));
}

// --- builds

bool Holds(const fs::path& program, const std::string& text) {
  const std::string bytes = ReadAll(program);
  EXPECT_GT(bytes.size(), 100'000u) << program;
  return bytes.find(text) != std::string::npos;
}

TEST(DefectsTest, AreAbsentFromReleasePrograms) {
  // The name of a class in worker/defects/defects.cc, which its type information carries into every program
  // that can plant defects; in two halves, so that this test is not one that holds it anyway.
  const std::string name = std::string("KeepsRejected") + "Rows";
  EXPECT_TRUE(Holds("/proc/self/exe", name)) << "the search must be able to find it";
  for (const char* program : {DFLASH_DOCTOR, DFLASH_WORKER}) EXPECT_FALSE(Holds(program, name)) << program;

  const std::string arguments = " --model " + Options().model + " --draft-model " + Options().draft_model +
                                " --inject-defect noswa 2>&1";
  const std::string socket =
      " --listen unix:" + ::testing::TempDir() + "/doctor_test." + std::to_string(getpid());
  for (const std::string& command : {DFLASH_DOCTOR + arguments, DFLASH_WORKER + socket + arguments}) {
    FILE* pipe = popen(command.c_str(), "r");
    ASSERT_NE(pipe, nullptr);
    std::string output;
    char buffer[4096];
    while (std::fgets(buffer, sizeof(buffer), pipe) != nullptr) output += buffer;
    EXPECT_NE(pclose(pipe), 0);
    EXPECT_THAT(output, HasSubstr("only in builds of the preset `defects`"));
  }
}

}  // namespace
}  // namespace dflash::doctor
