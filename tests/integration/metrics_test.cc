// The metrics page, read by a real Prometheus and checked by promtool.
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/integration/golden_prompts.h"
#include "tests/integration/process.h"
#include "tests/integration/server.h"

namespace dflash::integration {
namespace {

namespace fs = std::filesystem;

constexpr char kPrometheus[] = "/usr/bin/prometheus";
constexpr char kPromtool[] = "/usr/bin/promtool";

class MetricsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(kPrometheus) || !fs::exists(kPromtool)) {
      GTEST_SKIP() << "prometheus is not installed (tools/install-packages test)";
    }
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  const fs::path folder_ = fs::path(::testing::TempDir()) / ("metrics_test." + std::to_string(getpid()));
};

// A Prometheus that scrapes one target every second.
class Prometheus {
 public:
  Prometheus(const fs::path& folder, const std::string& target)
      : process_({kPrometheus, "--config.file=" + WriteConfig(folder, target),
                  "--storage.tsdb.path=" + (folder / "data").string(), "--web.listen-address=127.0.0.1:0"}) {
    const std::optional<std::string> line = process_.WaitForLine("msg=\"Listening on\"");
    if (!line) {
      ADD_FAILURE() << "Prometheus does not start:\n" << process_.output();
      return;
    }
    const size_t begin = line->find("127.0.0.1:");
    address_ = line->substr(begin, line->find_first_not_of("0123456789", begin + 10) - begin);
  }

  // The value of a query that yields one sample; nullopt otherwise. `query` needs no escaping.
  std::optional<double> Value(const std::string& query) const {
    const nlohmann::json answer =
        nlohmann::json::parse(HttpGet(address_, "/api/v1/query?query=" + query), nullptr, false);
    if (answer.is_discarded() || answer.value("status", "") != "success") return std::nullopt;
    const nlohmann::json& result = answer["data"]["result"];
    if (result.size() != 1) return std::nullopt;
    return std::stod(result[0]["value"][1].get<std::string>());
  }

 private:
  static std::string WriteConfig(const fs::path& folder, const std::string& target) {
    const std::string path = (folder / "prometheus.yml").string();
    std::ofstream(path) << "global:\n  scrape_interval: 1s\n  scrape_timeout: 1s\n"
                        << "scrape_configs:\n  - job_name: dflashd\n    static_configs:\n      - targets: ['"
                        << target << "']\n";
    return path;
  }

  Process process_;
  std::string address_;
};

TEST_F(MetricsTest, PrometheusSeesRequestsStepsAndSpeculation) {
  Server server;
  ASSERT_NE(server.channel(), nullptr);
  // What clients were told, to compare with what Prometheus was told.
  double tokens = 0, prompt_tokens = 0, rounds = 0, drafted = 0, accepted = 0;
  int requests = 0, stopped = 0;
  for (const GoldenText& golden : GoldenTexts()) {
    if (golden.kind != "chat" || requests == 5) continue;
    const ctl::Generation generation = server.GenerateOk(TokenRequest(golden.prompt_ids, 128));
    ++requests;
    stopped += generation.finished.reason() == v1::FINISH_REASON_EOS ? 1 : 0;
    tokens += static_cast<double>(generation.token_ids.size());
    prompt_tokens += static_cast<double>(golden.prompt_ids.size());
    rounds += generation.finished.speculation().rounds();
    drafted += generation.finished.speculation().drafted_tokens();
    accepted += generation.finished.speculation().accepted_tokens();
  }
  ctl::Generation refused;
  v1::GenerateRequest bad = ShortRequest();
  bad.mutable_stopping()->set_max_tokens(0);
  ASSERT_FALSE(Generate(server.channel(), bad, kPatience, &refused).ok());

  const Prometheus prometheus(folder_, server.ops_address());
  const auto expect = [&](const std::string& query, double value) {
    std::optional<double> seen;
    EXPECT_TRUE(PollUntil([&] { return (seen = prometheus.Value(query)) == value; }))
        << query << " is " << (seen ? std::to_string(*seen) : "nothing") << ", expected " << value;
  };
  expect("up", 1);
  expect("dflashd_ready", 1);
  expect("sum(dflashd_requests_total%7Boutcome=%22stop%22%7D)", stopped);
  expect("sum(dflashd_requests_total%7Boutcome=%22length%22%7D)", requests - stopped);
  expect("sum(dflashd_requests_total%7Boutcome=%22rejected%22%7D)", 1);
  expect("sum(dflashd_requests_rejected_total%7Breason=%22invalid%22%7D)", 1);
  expect("dflashd_requests_running", 0);
  expect("dflashd_requests_waiting", 0);
  expect("sum(dflashd_generated_tokens_total)", tokens);
  expect("sum(dflashd_prompt_tokens_total)", prompt_tokens);
  expect("sum(dflashd_time_to_first_token_seconds_count)", requests);
  expect("sum(dflashd_request_seconds_count)", requests);
  expect("sum(dflashd_spec_decode_num_drafts_total%7Bmethod=%22dflash%22%7D)", rounds);
  expect("sum(dflashd_spec_decode_num_draft_tokens_total)", drafted);
  expect("sum(dflashd_spec_decode_num_accepted_tokens_total)", accepted);
  expect("sum(dflashd_spec_decode_num_accepted_tokens_per_pos_total)", accepted);
  expect("sum(dflashd_spec_decode_accepted_per_step_count)", rounds);
  expect("sum(dflashd_spec_decode_accepted_per_step_sum)", accepted);
  expect("sum(dflashd_engine_steps_total%7Bkind=%22prefill%22%7D)%3E=bool%205", 1);
  // One sequence at a time: every verify step is one round, and more where drafts did not fit.
  EXPECT_GE(prometheus.Value("sum(dflashd_engine_steps_total%7Bkind=%22verify%22%7D)").value_or(0), rounds);
  expect("sum(dflashd_engine_step_seconds_count)==bool%20sum(dflashd_engine_steps_total)", 1);
  expect("count(dflashd_group_info)", 1);
  expect("count(dflashd_build_info)", 1);
}

TEST_F(MetricsTest, PromtoolFindsNothingToSay) {
  Server server;
  ASSERT_NE(server.channel(), nullptr);
  server.GenerateOk(ChatRequest("Count from 19 by 9, 11 numbers in all."));
  // The worker's series come with its first snapshot.
  ASSERT_TRUE(PollUntil(
      [&] { return server.Metrics().find("dflashd_spec_decode_num_drafts_total") != std::string::npos; }));
  const std::string page = (folder_ / "page").string();
  std::ofstream(page) << server.Metrics();
  const Ran ran = RunProgram({"/bin/sh", "-c", std::string(kPromtool) + " check metrics < \"$0\"", page});
  EXPECT_EQ(ran.exit_code, 0);
  EXPECT_EQ(ran.output, "");
}

}  // namespace
}  // namespace dflash::integration
