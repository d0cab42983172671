// The doctor of a running server, and the self-test of a starting one: healthy, and with known defects in the
// worker (defective_worker: dflash-worker with everything that can be planted).
#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/integration/server.h"

namespace dflash::integration {
namespace {

using ::testing::Contains;
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

Diagnosis Examine(Server& server, const std::string& prompts) {
  const Ran ran = server.Dflashctl({"doctor", "--golden", Golden(), "--admin-address", server.admin_address(),
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
  for (const char* id : {"files", "revisions", "config", "tokenizer", "template", "block-size", "prefix",
                         "batching", "sampling", "limits", "metrics", "calibration", "end-to-end"}) {
    EXPECT_EQ(diagnosis.Outcome(id), "pass") << diagnosis.Text(id);
  }
  EXPECT_EQ(diagnosis.Outcome("masks"), "not checked") << "what needs tensors is not claimed";
  EXPECT_THAT(diagnosis.Text("revisions"), HasSubstr("5 tensors"));
  EXPECT_THAT(diagnosis.report.dump(), HasSubstr("self-test passed"));
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
  const Ran nobody = server.Dflashctl(
      {"doctor", "--golden", Golden(), "--max-prompts", "2", "--admin-address", server.ops_address()});
  EXPECT_EQ(nobody.exit_code, ctl::kServerError);
  EXPECT_THAT(nobody.output, HasSubstr("the operators' port " + server.ops_address()));
}

TEST(RunningDoctorTest, PlantedDefectsAreNamed) {
  const struct {
    const char* defect;
    const char* first;  // interface
    const char* words;
  } cases[] = {{"offset0", "config", "taps=0,2,4 instead of taps=1,3,5"},
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
  }
}

// Nothing in the files, the contract or the coverage shows it: the drafter's own confidence does.
TEST(RunningDoctorTest, ConfidentAndRejectedIsSeenLive) {
  Server server(With("rejected-kept", {}));
  ASSERT_NE(server.channel(), nullptr);
  const Diagnosis diagnosis = Examine(server, "10");
  EXPECT_EQ(diagnosis.exit_code, 1);
  EXPECT_THAT(diagnosis.Failed(), Contains("calibration")) << diagnosis.report.dump(1);
  EXPECT_EQ(diagnosis.Outcome("config"), "pass");
  EXPECT_THAT(server.Dflashctl({"status"}).output, HasSubstr("BROKEN: confident_and_rejected"));
  EXPECT_TRUE(IsOne(server.Metrics(), "dflashd_spec_decode_health{", "reason=\"confident_and_rejected\""));
  EXPECT_FALSE(IsOne(server.Metrics(), "dflashd_spec_decode_health{", "reason=\"none\""));
}

v1::GenerateRequest Strict() {
  v1::GenerateRequest request = ShortRequest();
  request.mutable_speculation()->set_mode(v1::SPECULATION_MODE_DFLASH);
  request.mutable_speculation()->set_strict(true);
  return request;
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
}

}  // namespace
}  // namespace dflash::integration
