// The doctor of a running server, and the self-test of a starting one: healthy, and with known defects in the
// worker (defective_worker: dflash-worker with everything that can be planted).
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/integration/golden_prompts.h"
#include "tests/integration/server.h"

namespace dflash::integration {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Json = nlohmann::json;

std::string Golden() { return SourcePath("tests/golden"); }

struct Diagnosis {
  int exit_code = -1;
  Json report;

  std::string Outcome(const std::string& id) const {
    for (const Json& finding : report["interfaces"]) {
      if (finding["id"] == id) return finding["outcome"];
    }
    return "no such interface";
  }
  std::string Text(const std::string& id) const {
    for (const Json& finding : report["interfaces"]) {
      if (finding["id"] == id) return finding.dump();
    }
    return {};
  }
  std::vector<std::string> Failed() const {
    std::vector<std::string> ids;
    for (const Json& finding : report["interfaces"]) {
      if (finding["outcome"] == "fail") ids.push_back(finding["id"]);
    }
    return ids;
  }
};

v1::GenerateRequest Strict() {
  v1::GenerateRequest request = ShortRequest();
  request.mutable_speculation()->set_mode(v1::SPECULATION_MODE_DFLASH);
  request.mutable_speculation()->set_strict(true);
  return request;
}

Diagnosis Examine(Server& server, const std::string& prompts, const std::string& golden = Golden()) {
  const Ran ran = server.Dflashctl({"doctor", "--golden", golden, "--admin-address", server.admin_address(),
                                    "--max-prompts", prompts, "--json"});
  Diagnosis diagnosis = {.exit_code = ran.exit_code,
                         .report = Json::parse(ran.output, nullptr, /*allow_exceptions=*/false)};
  EXPECT_FALSE(diagnosis.report.is_discarded()) << ran.output;
  return diagnosis;
}

// Whether a metrics page says 1 for the series of that name with that label.
bool IsOne(const std::string& page, const std::string& name, const std::string& label) {
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(name) && line.find(label) != std::string::npos) return line.ends_with("} 1");
  }
  ADD_FAILURE() << "no " << name << " with " << label;
  return false;
}

std::vector<std::string> With(const std::string& defect, std::vector<std::string> flags) {
  flags.insert(flags.end(), {"--worker", DEFECTIVE_WORKER_PATH, "--inject-defect", defect});
  return flags;
}

TEST(RunningDoctorTest, AHealthyServerFailsNothing) {
  Server server({"--golden", Golden()});
  ASSERT_NE(server.channel(), nullptr);
  const Diagnosis diagnosis = Examine(server, "21");
  EXPECT_EQ(diagnosis.exit_code, 0);
  EXPECT_THAT(diagnosis.Failed(), IsEmpty()) << diagnosis.report.dump(1);
  for (const char* id :
       {"files", "revisions", "config", "tokenizer", "template", "block-size", "context-update", "prefix",
        "batching", "sampling", "limits", "metrics", "calibration", "end-to-end"}) {
    EXPECT_EQ(diagnosis.Outcome(id), "pass") << diagnosis.Text(id);
  }
  EXPECT_EQ(diagnosis.Outcome("masks"), "not checked") << "what needs tensors is not claimed";
  EXPECT_THAT(diagnosis.Text("revisions"), HasSubstr("156 tensors"));
  EXPECT_THAT(diagnosis.Text("prefix"), Not(HasSubstr(" 0 of 200")));
  EXPECT_THAT(diagnosis.report.dump(), HasSubstr("self-test passed"));
  EXPECT_THAT(diagnosis.report["verdict"].dump(), HasSubstr("--model DIR --draft-model DIR"));
  // Rounds of the self-test are nobody's requests.
  const Ran status = server.Dflashctl({"status"});
  EXPECT_THAT(status.output, HasSubstr("self-test passed: tokens per round of 4 golden prompts"));
  EXPECT_THAT(status.output, Not(HasSubstr("BROKEN")));
}

TEST(RunningDoctorTest, WithoutTheOperatorsPortLessIsSaid) {
  Server server;
  ASSERT_NE(server.channel(), nullptr);
  const Ran ran = server.Dflashctl({"doctor", "--golden", Golden(), "--max-prompts", "2", "--json"});
  EXPECT_EQ(ran.exit_code, 0) << ran.output;
  const Diagnosis diagnosis = {.exit_code = 0, .report = Json::parse(ran.output)};
  EXPECT_EQ(diagnosis.Outcome("revisions"), "not checked");
  EXPECT_EQ(diagnosis.Outcome("calibration"), "not checked");
  EXPECT_THAT(server.Dflashctl({"status"}).output,
              HasSubstr("self-test skipped: no golden bundle was given"));
  const Ran nobody = server.Dflashctl(
      {"doctor", "--golden", Golden(), "--max-prompts", "2", "--admin-address", server.ops_address()});
  EXPECT_EQ(nobody.exit_code, ctl::kServerError);
  EXPECT_THAT(nobody.output, HasSubstr("the operators' port " + server.ops_address()));
}

// Whoever reads JSON gets it, whatever went wrong: standard error is for people.
TEST(RunningDoctorTest, AnErrorIsJsonWhereThatWasAskedFor) {
  const struct {
    std::string golden, address, words;
    int exit_code;
  } cases[] = {{SourcePath("docs"), "localhost:1", "bundle.json", ctl::kUsage},
               {"", "localhost:1", "--golden DIR", ctl::kUsage},
               {Golden(), "127.0.0.1:1", "127.0.0.1:1", ctl::kServerError}};
  for (const auto& [golden, address, words, exit_code] : cases) {
    SCOPED_TRACE(golden);
    const Ran ran = RunProgram({"/bin/sh", "-c",
                                DflashctlPath() + " doctor --json --address " + address +
                                    (golden.empty() ? "" : " --golden " + golden) + " 2> /dev/null"});
    EXPECT_EQ(ran.exit_code, exit_code);
    const Json json = Json::parse(ran.output, nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(json.is_object()) << ran.output;
    EXPECT_EQ(json["exit_code"], exit_code);
    EXPECT_THAT(json["error"].get<std::string>(), HasSubstr(words));
  }
}

// Penalties and constraints change what the target says; the drafter is sound.
void LoadWithRules(Server& server) {
  int sent = 0;
  for (const GoldenText& golden : GoldenTexts()) {
    if (golden.kind != "chat") continue;
    for (const bool json : {false, true}) {
      v1::GenerateRequest request;
      request.mutable_tokens()->mutable_ids()->Assign(golden.prompt_ids.begin(), golden.prompt_ids.end());
      request.mutable_sampling()->set_temperature(0);
      request.mutable_stopping()->set_max_tokens(96);
      if (json) {
        request.mutable_constraint()->set_json_object(true);
      } else {
        request.mutable_sampling()->set_frequency_penalty(2);
        request.mutable_stopping()->set_ignore_eos(true);
      }
      const ctl::Generation generation = server.GenerateOk(request);
      sent += static_cast<int>(generation.finished.speculation().rounds());
    }
  }
  EXPECT_GT(sent, 300) << "rounds";
}

TEST(RunningDoctorTest, RulesOfRequestsAreNoDefectAndHideNone) {
  {
    Server server;
    ASSERT_NE(server.channel(), nullptr);
    LoadWithRules(server);
    const Diagnosis diagnosis = Examine(server, "21");
    EXPECT_EQ(diagnosis.exit_code, 0) << diagnosis.report.dump(1);
    EXPECT_EQ(diagnosis.Outcome("calibration"), "pass") << diagnosis.Text("calibration");
    EXPECT_THAT(server.Dflashctl({"status"}).output, Not(HasSubstr("BROKEN")));
  }
  Server broken(With("rejected-kept", {}));
  ASSERT_NE(broken.channel(), nullptr);
  LoadWithRules(broken);
  const Diagnosis diagnosis = Examine(broken, "17");
  EXPECT_EQ(diagnosis.Outcome("calibration"), "fail") << diagnosis.Text("calibration");
}

// A prompt that the drafter is sure of, and wrong: of however many requests, that is one accident.
TEST(RunningDoctorTest, ARequestThatOthersSendAgainIsNoDefect) {
  Server server;
  ASSERT_NE(server.channel(), nullptr);
  v1::GenerateRequest request;
  request.set_text("<|im_start|>user\nTell me the capi");
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stopping()->set_max_tokens(96);
  uint64_t rounds = 0, accepted = 0;
  for (int i = 0; i < 80; ++i) {
    const ctl::Generation generation = server.GenerateOk(request);
    rounds += generation.finished.speculation().rounds();
    accepted += generation.finished.speculation().accepted_tokens();
  }
  EXPECT_GT(rounds, 128u);
  EXPECT_LT(accepted, rounds);
  const Diagnosis diagnosis = Examine(server, "4");
  EXPECT_EQ(diagnosis.exit_code, 0) << diagnosis.report.dump(1);
  EXPECT_EQ(diagnosis.Outcome("calibration"), "not checked");
  EXPECT_THAT(diagnosis.Text("calibration"), HasSubstr("too_few_rounds"));
  EXPECT_THAT(server.Dflashctl({"status"}).output, Not(HasSubstr("BROKEN")));
}

// A copy of the drafter with what `change` makes of the file of its weights.
std::string ChangedDrafter(const std::function<void(std::string& bytes)>& change) {
  namespace fs = std::filesystem;
  const fs::path source = SourcePath("models/tiny-qwen3.6-dflash");
  const fs::path folder =
      fs::path(::testing::TempDir()) / ("running_doctor_drafter." + std::to_string(getpid()));
  fs::remove_all(folder);
  fs::create_directories(folder);
  fs::copy_file(source / "config.json", folder / "config.json");
  std::ifstream file(source / "model.safetensors", std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  change(bytes);
  std::ofstream(folder / "model.safetensors", std::ios::binary) << bytes;
  return folder;
}

// Other weights than the bundle's: the layers are there, in another order.
void SwapLayers(std::string& bytes) {
  for (const char* part : {"k_proj", "v_proj"}) {
    const std::string first = std::string("layers.0.self_attn.") + part,
                      second = std::string("layers.1.self_attn.") + part;
    const std::string nowhere = std::string("layers.9.self_attn.") + part;
    for (const auto& [from, to] :
         {std::pair(first, nowhere), std::pair(second, first), std::pair(nowhere, second)})
      bytes.replace(bytes.find(from), from.size(), to);
  }
}

// Row 20 of a matrix of layer 1, which no fingerprint samples, times 2 to the 20th.
void PlantOutliers(std::string& bytes) {
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  const Json tensor = Json::parse(bytes.substr(8, header_bytes))["layers.1.mlp.down_proj.weight"];
  ASSERT_EQ(tensor["dtype"], "BF16");
  const auto width = tensor["shape"][1].get<size_t>();
  char* row = bytes.data() + 8 + header_bytes + tensor["data_offsets"][0].get<size_t>() + 20 * width * 2;
  for (size_t i = 0; i < width; ++i) {
    uint16_t element = 0;
    std::memcpy(&element, row + 2 * i, sizeof(element));
    if ((element & 0x7f80) != 0) element = static_cast<uint16_t>(element + (20 << 7));
    std::memcpy(row + 2 * i, &element, sizeof(element));
  }
}

// A copy of the golden bundle in which `change` got one of its files.
std::string ChangedBundle(const std::string& name, const std::function<void(Json& json)>& change) {
  namespace fs = std::filesystem;
  const fs::path folder =
      fs::path(::testing::TempDir()) / ("running_doctor_bundle." + std::to_string(getpid()));
  fs::remove_all(folder);
  fs::copy(Golden(), folder);
  std::ifstream file(folder / name);
  Json json = Json::parse(file);
  change(json);
  std::ofstream(folder / name) << json.dump();
  return folder;
}

TEST(RunningDoctorTest, OtherWeightsAreAModelProblem) {
  const std::string drafter = ChangedDrafter(SwapLayers);
  {
    Server server({"--draft-model", drafter});
    ASSERT_NE(server.channel(), nullptr);
    const Diagnosis diagnosis = Examine(server, "10");
    EXPECT_EQ(diagnosis.exit_code, 5) << diagnosis.report.dump(1);
    EXPECT_EQ(diagnosis.report["verdict"]["kind"], "model problem");
    EXPECT_EQ(diagnosis.report["verdict"]["first_failure"], "revisions");
    EXPECT_THAT(diagnosis.Failed(), Contains("end-to-end"));
    EXPECT_THAT(diagnosis.Text("revisions"), HasSubstr("drafter layers.0.self_attn.k_proj.weight"));
    // From outside alone nobody can tell.
    const Ran ran = server.Dflashctl({"doctor", "--golden", Golden(), "--max-prompts", "10", "--json"});
    const Json report = Json::parse(ran.output);
    EXPECT_EQ(ran.exit_code, 6);
    EXPECT_EQ(report["verdict"]["kind"], "integration or model problem");
    EXPECT_THAT(report["verdict"]["text"].get<std::string>(), HasSubstr("both are possible"));
  }
  std::filesystem::remove_all(drafter);
}

// As the doctor of the pair says: every byte of the drafter is compared. Where the bundle has fingerprints
// alone, which do not sample it, it may be either.
TEST(RunningDoctorTest, OutliersBetweenTheSamplesAreNotTheIntegrations) {
  const std::string drafter = ChangedDrafter(PlantOutliers);
  const std::string sampled = ChangedBundle("bundle.json", [](Json& bundle) {
    bundle.erase("target_digests");
    bundle.erase("drafter_digests");
  });
  {
    Server server({"--draft-model", drafter});
    ASSERT_NE(server.channel(), nullptr);
    const Diagnosis diagnosis = Examine(server, "10");
    EXPECT_EQ(diagnosis.exit_code, 5) << diagnosis.report.dump(1);
    EXPECT_EQ(diagnosis.report["verdict"]["first_failure"], "revisions");
    EXPECT_THAT(diagnosis.Text("revisions"),
                HasSubstr("other weights than recorded: drafter layers.1.mlp.down_proj.weight"));
    const Diagnosis of_samples = Examine(server, "10", sampled);
    EXPECT_EQ(of_samples.exit_code, 6) << of_samples.report.dump(1);
    EXPECT_EQ(of_samples.Outcome("revisions"), "pass");
    EXPECT_THAT(of_samples.report["verdict"]["text"].get<std::string>(),
                AllOf(HasSubstr("both are possible"), HasSubstr("only samples of the weights")));
  }
  std::filesystem::remove_all(drafter);
  std::filesystem::remove_all(sampled);
}

// A running server as the reference of another one.
TEST(RunningDoctorTest, AServerIsComparedWithAnother) {
  const std::string reference = ::testing::TempDir() + "running_doctor_reference." + std::to_string(getpid());
  std::filesystem::remove_all(reference);
  {
    Server trusted({"--max-context-tokens", "512"});
    ASSERT_NE(trusted.channel(), nullptr);
    const Ran recorded = trusted.Dflashctl({"golden", "record", "--golden", Golden(), "--out", reference,
                                            "--admin-address", trusted.admin_address()});
    ASSERT_EQ(recorded.exit_code, 0) << recorded.output;
    EXPECT_THAT(recorded.output, HasSubstr("2 prompts do not fit"));
    const Ran twice = trusted.Dflashctl({"golden", "record", "--golden", Golden(), "--out", reference});
    EXPECT_EQ(twice.exit_code, ctl::kUsage);
    EXPECT_THAT(twice.output, HasSubstr(reference + " exists"));
  }
  const auto examine = [&](Server& server) {
    const Ran ran = server.Dflashctl({"doctor", "--golden", reference, "--admin-address",
                                      server.admin_address(), "--max-prompts", "10", "--json"});
    return Diagnosis{.exit_code = ran.exit_code, .report = Json::parse(ran.output, nullptr, false)};
  };
  {
    Server alike;
    ASSERT_NE(alike.channel(), nullptr);
    const Diagnosis diagnosis = examine(alike);
    EXPECT_EQ(diagnosis.exit_code, 0) << diagnosis.report.dump(1);
    EXPECT_EQ(diagnosis.Outcome("end-to-end"), "pass");
    EXPECT_EQ(diagnosis.Outcome("revisions"), "pass");
    EXPECT_THAT(diagnosis.report["facts"].dump(), HasSubstr("a running server"));
  }
  Server broken(With("rejected-kept", {}));
  ASSERT_NE(broken.channel(), nullptr);
  const Diagnosis diagnosis = examine(broken);
  EXPECT_EQ(diagnosis.exit_code, 1);
  EXPECT_THAT(diagnosis.Failed(), Contains("end-to-end"));
  std::filesystem::remove_all(reference);
}

TEST(RunningDoctorTest, PromptsThatDoNotFitAreLeftOut) {
  Server server({"--max-context-tokens", "512"});
  ASSERT_NE(server.channel(), nullptr);
  const Diagnosis diagnosis = Examine(server, "21");
  EXPECT_EQ(diagnosis.exit_code, 0) << diagnosis.report.dump(1);
  EXPECT_EQ(diagnosis.Outcome("end-to-end"), "pass");
  EXPECT_THAT(diagnosis.report["facts"].dump(),
              HasSubstr("2 golden prompts, with their outputs longer than"));
}

// Of ten and more tokens per round blocks of eight rows have fewer: the operator's wish, no defect.
TEST(RunningDoctorTest, BlocksThatTheRowLimitCutsAreNotComparedWithWholeOnes) {
  Server server({"--golden", Golden(), "--max-verify-rows", "8"});
  ASSERT_NE(server.channel(), nullptr);
  EXPECT_THAT(server.process().output(), Not(HasSubstr("SELF-TEST FAILED")));
  EXPECT_THAT(server.Dflashctl({"status"}).output,
              HasSubstr("blocks, also the recorded ones, cut to 8 of 16 rows by --max-verify-rows"));
  const ctl::Generation drafted = server.GenerateOk(Strict());
  EXPECT_GT(drafted.finished.speculation().accepted_tokens(), 0u);
  const Diagnosis diagnosis = Examine(server, "4");
  EXPECT_EQ(diagnosis.exit_code, 0) << diagnosis.report.dump(1);
  EXPECT_THAT(diagnosis.Failed(), IsEmpty());
  for (const char* id : {"end-to-end", "prefix"}) {
    EXPECT_EQ(diagnosis.Outcome(id), "not checked");
    EXPECT_THAT(diagnosis.Text(id), HasSubstr("blocks were cut to 8 of 16 rows (--max-verify-rows"));
  }
  for (const char* id : {"batching", "sampling", "limits", "metrics"})
    EXPECT_EQ(diagnosis.Outcome(id), "pass") << diagnosis.Text(id);
  // Nor is it recorded as if they had been whole.
  const std::string reference = ::testing::TempDir() + "running_doctor_cut." + std::to_string(getpid());
  std::filesystem::remove_all(reference);
  const Ran recorded =
      server.Dflashctl({"golden", "record", "--golden", Golden(), "--out", reference, "--max-tokens", "32"});
  EXPECT_EQ(recorded.exit_code, 0);
  EXPECT_THAT(recorded.output, HasSubstr("prompts are recorded without acceptance"));
  std::filesystem::remove_all(reference);
}

TEST(RunningDoctorTest, PlantedDefectsAreNamed) {
  const struct {
    const char* defect;
    const char* first;  // interface
    const char* words;
  } cases[] = {{"offset0", "config", "otherwise than recorded: group 0: taps=0,2,4 instead of taps=1,3,5"},
               {"dropprefix", "prefix", "positions before the anchors are not in the drafter's context"},
               {"zero-head", "head", "equally probable"}};
  for (const auto& [defect, first, words] : cases) {
    SCOPED_TRACE(defect);
    Server server(With(defect, {}));
    ASSERT_NE(server.channel(), nullptr);
    const Diagnosis diagnosis = Examine(server, "6");
    EXPECT_EQ(diagnosis.exit_code, 1);
    const std::vector<std::string> failed = diagnosis.Failed();
    ASSERT_FALSE(failed.empty());
    EXPECT_EQ(failed.front(), first) << diagnosis.report.dump(1);
    EXPECT_THAT(diagnosis.Text(first), HasSubstr(words));
    for (const Json& finding : diagnosis.report["interfaces"]) {
      if (finding["outcome"] != "fail" || finding["measured"].is_null()) continue;
      EXPECT_GT(finding["measured"].get<double>(), finding["limit"].get<double>()) << finding.dump(1);
    }
  }
}

// Nothing in the files, the contract or the coverage shows it: the drafter's own confidence does.
TEST(RunningDoctorTest, ConfidentAndRejectedIsSeenLive) {
  Server server(With("rejected-kept", {}));
  ASSERT_NE(server.channel(), nullptr);
  const Diagnosis diagnosis = Examine(server, "17");
  EXPECT_EQ(diagnosis.exit_code, 1);
  EXPECT_THAT(diagnosis.Failed(), Contains("calibration")) << diagnosis.report.dump(1);
  EXPECT_EQ(diagnosis.Outcome("config"), "pass");
  // Where it is, the same tokens as a prompt tell.
  EXPECT_EQ(diagnosis.Failed().front(), "context-update") << diagnosis.report.dump(1);
  EXPECT_THAT(diagnosis.Text("context-update"), HasSubstr("rows of rejected drafts stay"));
  EXPECT_THAT(diagnosis.Text("calibration"), HasSubstr("--model DIR --draft-model DIR"));
  EXPECT_THAT(server.Dflashctl({"status"}).output, HasSubstr("BROKEN: confident_and_rejected"));
  EXPECT_TRUE(IsOne(server.Metrics(), "dflashd_spec_decode_health{", "reason=\"confident_and_rejected\""));
  EXPECT_FALSE(IsOne(server.Metrics(), "dflashd_spec_decode_health{", "reason=\"none\""));
}

TEST(SelfTestAtStartTest, AFailedOneRefusesSpeculationAndSaysWhy) {
  Server server(With("zero-head", {"--golden", Golden()}));
  ASSERT_NE(server.channel(), nullptr);
  const ctl::Generation plain = server.GenerateOk(ShortRequest());
  EXPECT_GT(plain.token_ids.size(), 0u);
  EXPECT_EQ(plain.finished.speculation().drafted_tokens(), 0u);
  ctl::Generation refused;
  const grpc::Status status = Generate(server.channel(), Strict(), kPatience, &refused);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << status.error_message();
  EXPECT_THAT(server.process().output(), HasSubstr("SELF-TEST FAILED: tokens per round of 4 golden prompts"));
  EXPECT_THAT(server.Dflashctl({"status"}).output,
              HasSubstr("REFUSED: self_test_failed; self-test failed: tokens per round"));
  const std::string metrics = server.Metrics();
  EXPECT_TRUE(IsOne(metrics, "dflashd_spec_decode_self_test{", "result=\"failed\""));
  EXPECT_TRUE(IsOne(metrics, "dflashd_spec_decode_health{", "verdict=\"refused\""));
  EXPECT_FALSE(IsOne(metrics, "dflashd_spec_decode_enabled{", "method=\"dflash\""));
  // The doctor says so and goes on with what the server knows of itself.
  const Diagnosis diagnosis = Examine(server, "2");
  EXPECT_EQ(diagnosis.exit_code, 1) << diagnosis.report.dump(1);
  EXPECT_THAT(diagnosis.Failed(), ElementsAre("end-to-end"));
  EXPECT_THAT(diagnosis.Text("end-to-end"),
              HasSubstr("its self-test failed: tokens per round of 4 golden prompts"));
  for (const char* id : {"files", "revisions", "config", "tokenizer", "template"})
    EXPECT_EQ(diagnosis.Outcome(id), "pass") << diagnosis.Text(id);
}

// One rule: a bundle that can be read and does not fit is a failed self-test, not the end of the start.
TEST(SelfTestAtStartTest, ABundleThatDoesNotFitRefusesSpeculation) {
  const struct {
    std::function<void(Json&)> change;
    const char* words;
  } cases[] = {{[](Json& prompts) { prompts[1]["output_ids"][0] = 5'000'000; },
                "prompt 1: output_ids: token id 5000000"},
               {[](Json& prompts) {
                  for (Json& prompt : prompts) prompt.erase("acceptance_lengths");
                },
                "no prompt with acceptance_lengths"}};
  for (const auto& [change, words] : cases) {
    const std::string bundle = ChangedBundle("golden.json", change);
    for (const bool warn : {false, true}) {
      std::vector<std::string> flags = {"--golden", bundle};
      if (warn) flags.insert(flags.end(), {"--self-test", "warn"});
      Server server(flags);
      ASSERT_NE(server.channel(), nullptr);
      const ctl::Generation generation = server.GenerateOk(ShortRequest());
      EXPECT_GT(generation.token_ids.size(), 0u);
      EXPECT_EQ(generation.finished.speculation().drafted_tokens() > 0, warn);
      EXPECT_THAT(server.process().output(),
                  AllOf(HasSubstr("SELF-TEST FAILED"), HasSubstr(bundle), HasSubstr(words)));
    }
    std::filesystem::remove_all(bundle);
  }
}

TEST(SelfTestAtStartTest, AnOverriddenOneDrafts) {
  Server server(With("rejected-kept", {"--golden", Golden(), "--self-test", "warn"}));
  ASSERT_NE(server.channel(), nullptr);
  const ctl::Generation generation = server.GenerateOk(Strict());
  EXPECT_GT(generation.finished.speculation().drafted_tokens(), 0u);
  EXPECT_THAT(server.process().output(), HasSubstr("SELF-TEST FAILED"));
  EXPECT_THAT(server.Dflashctl({"status"}).output, HasSubstr("self-test overridden: tokens per round"));
}

TEST(SelfTestAtStartTest, ABundleThatIsNoneEndsTheStart) {
  Process process(ServerCommand({"--golden", SourcePath("docs")}));
  EXPECT_EQ(process.WaitForExit(), 65) << process.output();
  EXPECT_THAT(process.output(), HasSubstr("bundle.json"));
  // With a warning instead, where that was asked for.
  Server server({"--golden", SourcePath("docs"), "--self-test", "warn"});
  ASSERT_NE(server.channel(), nullptr);
  EXPECT_GT(server.GenerateOk(Strict()).finished.speculation().drafted_tokens(), 0u);
  EXPECT_THAT(server.process().output(), HasSubstr("SELF-TEST NOT RUN"));
}

TEST(DefectsTest, AWorkerRefusesWhatItWouldNotPlant) {
  Process process(ServerCommand(With("thinking-flag", {})));
  EXPECT_NE(process.WaitForExit(), 0);
  EXPECT_THAT(process.output(), HasSubstr("thinking-flag is one of the prompt"));
}

}  // namespace
}  // namespace dflash::integration
