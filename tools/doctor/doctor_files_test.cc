// The doctor over files that are wrong: configurations, templates, bundles; contexts that are too short; exit
// codes.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>

#include "base/dtype.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/doctor.h"
#include "tools/doctor/testing/changed_pair.h"
#include "worker/model/safetensors.h"
#include "worker/model/target_config.h"

namespace dflash::doctor {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(BadFilesTest, AnotherChatTemplateIsNotTheThinkingFlag) {
  const Folder folder("doctor_template");
  WriteTarget(folder.path(), "none", [](bf16*, int64_t) {});
  WriteAll(folder.path() / "chat_template.jinja", "{{ messages[0].content }}");
  DoctorOptions options = Options();
  options.model = folder.path();
  options.stop_at_first_failure = true;
  const absl::StatusOr<Report> report = RunDoctor(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_STREQ(report->verdict().first_failure->interface->id, "template");
  EXPECT_THAT(report->verdict().first_failure->cause, HasSubstr("another chat template"));
}

// --- bundles that are damaged, or of another pair

TEST(BadBundleTest, IsAnErrorThatNamesTheFile) {
  const auto error = [](const std::function<void(Json & bundle, Json & prompts)>& change) {
    const Folder folder("doctor_bad_bundle");
    DoctorOptions options = Options();
    options.golden = CopyBundle(folder, change);
    options.stop_at_first_failure = true;
    const absl::StatusOr<Report> report = RunDoctor(options);
    EXPECT_TRUE(absl::IsInvalidArgument(report.status())) << report.status();
    return std::string(report.status().message());
  };
  EXPECT_THAT(
      error([](Json&, Json& prompts) { prompts[2]["output_ids"] = {5'000'000}; }),
      HasSubstr("golden.json: prompt 2: output_ids: token id 5000000, but the target's vocabulary has 4096"));
  EXPECT_THAT(error([](Json&, Json& prompts) {
                prompts[0]["prompt_ids"] = {1, 2, 4096};
              }),
              HasSubstr("golden_tensors.safetensors: p0."));
  EXPECT_THAT(
      error([](Json& bundle, Json&) { bundle["contract"]["mask_token_id"] = 99999; }),
      HasSubstr("bundle.json: contract: mask_token_id: token id 99999, but the target's vocabulary has"));
  EXPECT_THAT(error([](Json& bundle, Json&) { bundle["drafter_weights"]["no.such.weight"] = "00"; }),
              HasSubstr("bundle.json: drafter_weights: no.such.weight: the drafter has no such tensor"));
  EXPECT_THAT(error([](Json& bundle, Json&) { bundle["target_digests"]["no.such.weight"] = "00"; }),
              HasSubstr("bundle.json: target_digests: no.such.weight: the target has no such tensor"));
}

TEST(BadFilesTest, AnEditedConfigurationFailsAtConfigReading) {
  const Folder folder("doctor_edited_config");
  WriteDrafter(folder.path(), [](const StoredTensor&, bf16*, int64_t) {});
  std::string config = ReadAll(folder.path() / "config.json");
  config.replace(config.find("\"sliding_window\": 64"), 20, "\"sliding_window\": 32");
  WriteAll(folder.path() / "config.json", config);
  DoctorOptions options = Options();
  options.draft_model = folder.path();
  options.stop_at_first_failure = true;
  const absl::StatusOr<Report> report = RunDoctor(options);
  ASSERT_TRUE(report.ok()) << report.status();
  ASSERT_EQ(report->verdict().kind, VerdictKind::kIntegration);
  EXPECT_STREQ(report->verdict().first_failure->interface->id, "config");
  EXPECT_THAT(report->verdict().first_failure->cause, HasSubstr("sliding:32:causal"));
}

TEST(BadFilesTest, AMissingFileIsAFinding) {
  DoctorOptions options = Options();
  const Folder folder("doctor_no_weights");
  fs::copy_file(kSource / "models/tiny-qwen3.6-dflash/config.json", folder.path() / "config.json");
  options.draft_model = folder.path();
  const absl::StatusOr<Report> report = RunDoctor(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_STREQ(report->verdict().first_failure->interface->id, "files");
  EXPECT_EQ(report->Of("masks").outcome, Outcome::kNotChecked);
}

// Files that are none are bad input, not a broken integration; the hint is about the file in question.
TEST(BadFilesTest, AreBadInput) {
  const Folder folder("doctor_bad_files");
  const auto target = [&](const std::string& name, const std::function<void(const fs::path&)>& change) {
    const fs::path to = folder.path() / name;
    fs::copy(Options().model, to);
    change(to);
    return to.string();
  };
  const std::string truncated = target("truncated", [](const fs::path& to) {
    fs::resize_file(to / "model-00001-of-00002.safetensors", 100'000);
  });
  const std::string other_type = target("type", [](const fs::path& to) {
    std::string config = ReadAll(to / "config.json");
    config.replace(config.find("qwen3_5"), 7, "qwen9_9");
    WriteAll(to / "config.json", config);
  });
  const struct {
    std::string model, draft_model, where;
  } cases[] = {{"/nowhere", "", "--model /nowhere"},
               {"", "/nowhere", "--draft-model /nowhere"},
               {truncated, "", "--model " + truncated},
               {other_type, "", "--model " + other_type}};
  for (const auto& [model, draft_model, where] : cases) {
    SCOPED_TRACE(where);
    DoctorOptions options = Options();
    if (!model.empty()) options.model = model;
    if (!draft_model.empty()) options.draft_model = draft_model;
    const absl::StatusOr<Report> report = RunDoctor(options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->verdict().kind, VerdictKind::kBadInput) << report->ToText(false);
    EXPECT_EQ(report->ExitCode(), 2);
    EXPECT_THAT(report->verdict().text, AllOf(HasSubstr(where), Not(HasSubstr("draft_config"))));
  }
}

// A chat that cannot be rendered, by whoever's fault, names template and prompt, and the rest is examined.
TEST(BadFilesTest, AChatThatCannotBeRendered) {
  const Folder model("doctor_throwing"), bundle("doctor_bad_chat");
  WriteTarget(model.path(), "none", [](bf16*, int64_t) {});
  WriteAll(model.path() / "chat_template.jinja", "{{ raise_exception('no') }}");
  DoctorOptions throwing = Options(), malformed = Options();
  throwing.model = model.path();
  malformed.golden = CopyBundle(bundle, [](Json& json, Json&) { json["chats"]["0"]["messages"] = {1}; });
  for (DoctorOptions& options : {std::ref(throwing), std::ref(malformed)}) {
    options.stop_at_first_failure = true;
    const absl::StatusOr<Report> report = RunDoctor(options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->ExitCode(), 2);
    EXPECT_STREQ(report->verdict().first_failure->interface->id, "template");
    EXPECT_THAT(report->verdict().text, AllOf(HasSubstr("the chat of prompt 0 cannot be rendered"),
                                              HasSubstr(options.model), HasSubstr(options.golden)));
    EXPECT_EQ(report->Of("tokenizer").outcome, Outcome::kPass);
  }
}

// --- contexts that are too short

TEST(ContextTest, IsWhatTheTargetHasPositionsFor) {
  TargetConfig target;
  target.max_position_embeddings = 600;
  DoctorOptions options;
  EXPECT_EQ(ContextTokens(options, target).value(), 600);
  target.max_position_embeddings = 262144;
  EXPECT_EQ(ContextTokens(options, target).value(), 4096);
  options.max_context_tokens = 8192;
  EXPECT_EQ(ContextTokens(options, target).value(), 8192);
  target.max_position_embeddings = 600;
  EXPECT_THAT(ContextTokens(options, target).status().message(), HasSubstr("--max-context-tokens 8192"));
}

TEST(ContextTest, GoldenPromptsThatDoNotFitAreLeftOutAloud) {
  DoctorOptions options = Options();
  options.max_context_tokens = 512;
  const Folder folder("doctor_long_prompts");
  options.golden = CopyBundle(folder, [](Json& bundle, Json& prompts) {
    Json& ids = prompts[1]["prompt_ids"];
    for (size_t i = 0; ids.size() < 600; ++i) ids.push_back(Json(ids[i]));
    prompts[1].erase("text");
    prompts = {prompts[1]};
    bundle.erase("chats");
    bundle["tensors"] = "none.safetensors";
  });
  WriteAll(folder.path() / "none.safetensors", std::string("\2\0\0\0\0\0\0\0{}", 10));
  const absl::StatusOr<Report> report = RunDoctor(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_NE(report->verdict().kind, VerdictKind::kIntegration) << report->ToText(false);
  EXPECT_EQ(report->Of("end-to-end").outcome, Outcome::kNotChecked);
  EXPECT_EQ(report->Of("sampling").outcome, Outcome::kPass);
  EXPECT_THAT(report->facts, Contains(::testing::Pair("left out", HasSubstr("1 of 1 golden prompts"))));
}

// --- exit codes

int ExitCodeOf(const std::string& arguments) {
  return WEXITSTATUS(std::system((DFLASH_DOCTOR " " + arguments + " 2> /dev/null").c_str()));
}

TEST(ExitCodeTest, TellsBadInputFromOutputThatIsLost) {
  const Folder folder("doctor_exit_codes");
  const std::string pair = "--model " + Options().model + " --draft-model " + Options().draft_model;
  const std::string golden = Options().golden, loop = folder.path() / "loop";
  fs::create_symlink("loop", loop);
  EXPECT_EQ(ExitCodeOf(pair + " --golden " + loop), 2);
  EXPECT_EQ(ExitCodeOf("record " + pair + " --golden " + loop + " --out " + loop + ".new"), 2);
  EXPECT_EQ(ExitCodeOf("record " + pair + " --golden " + golden + " --out " + folder.path().string()), 2);
  EXPECT_EQ(ExitCodeOf("record --model /nowhere --draft-model /nowhere --golden " + golden + " --out " +
                       loop + ".new"),
            2);
  EXPECT_EQ(ExitCodeOf("compare " + golden + " " + golden + " > /dev/full"), 4);
  EXPECT_EQ(ExitCodeOf("compare " + golden + " " + golden + " > /dev/null"), 0);
}

// Whoever reads JSON gets it, whatever went wrong.
TEST(ExitCodeTest, AnErrorIsJsonWhereThatWasAskedFor) {
  const Folder folder("doctor_json_errors");
  const std::string output = folder.path() / "output";
  const std::string pair = " --model " + Options().model + " --draft-model " + Options().draft_model;
  WriteAll(folder.path() / "bundle.json", "{}");
  const struct {
    std::string arguments, words;
  } cases[] = {{pair + " --golden " + folder.path().string(), "bundle.json: "},
               {pair + " --golden /nowhere", "/nowhere"},
               {pair + " --max-context-tokens 100000", "--max-context-tokens 100000"},
               {"", "--model and --draft-model are required"}};
  for (const auto& [arguments, words] : cases) {
    SCOPED_TRACE(arguments);
    EXPECT_EQ(ExitCodeOf("--json --quiet " + arguments + " > " + output), 2);
    const Json json = Json::parse(ReadAll(output), nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(json.is_object()) << ReadAll(output);
    EXPECT_EQ(json["exit_code"], 2);
    EXPECT_THAT(json["error"].get<std::string>(), HasSubstr(words));
    EXPECT_EQ(ExitCodeOf("--quiet " + arguments + " > " + output), 2);
    EXPECT_EQ(ReadAll(output), "");
  }
}

}  // namespace
}  // namespace dflash::doctor
