// dflashctl, as a program, against a running daemon.
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/integration/server.h"

namespace dflash::integration {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class DflashctlTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = new Server(); }
  static void TearDownTestSuite() {
    delete server_;
    server_ = nullptr;
  }
  void SetUp() override { ASSERT_NE(server_->channel(), nullptr); }

  static Server* server_;
};
Server* DflashctlTest::server_ = nullptr;

constexpr char kQuestion[] = "Count from 19 by 9, 11 numbers in all.";
constexpr char kAnswer[] = "19, 28, 37, 46, 55, 64, 73, 82, 91, 100, 109.";

TEST_F(DflashctlTest, ReplayOfTheGoldenDataFindsNoDifference) {
  const Ran ran = server_->Dflashctl({"replay", SourcePath("tests/golden/golden.json")});
  EXPECT_EQ(ran.exit_code, ctl::kSuccess) << ran.output;
  EXPECT_THAT(ran.output,
              HasSubstr("21/21 outputs identical, 21/21 prompts with all acceptance lengths identical"));
}

TEST_F(DflashctlTest, ReplayManyAtATimeAndWithoutSpeculation) {
  const std::string golden = SourcePath("tests/golden/golden.json");
  const Ran together = server_->Dflashctl({"replay", golden, "--concurrency", "8"});
  EXPECT_EQ(together.exit_code, ctl::kSuccess) << together.output;
  const Ran off = server_->Dflashctl({"replay", golden, "--speculation", "off", "--concurrency", "8"});
  EXPECT_EQ(off.exit_code, ctl::kSuccess) << off.output;
  EXPECT_THAT(off.output, HasSubstr("21/21 outputs identical"));
}

TEST_F(DflashctlTest, ReplayFailsOnAnyDifference) {
  std::ifstream file(SourcePath("tests/golden/golden.json"));
  const nlohmann::json golden = nlohmann::json::parse(file);
  const std::string path =
      std::filesystem::path(::testing::TempDir()) / ("golden." + std::to_string(getpid()) + ".json");
  const auto replay = [&](const nlohmann::json& prompt) {
    std::ofstream(path) << nlohmann::json::array({prompt}).dump();
    return server_->Dflashctl({"replay", path});
  };
  EXPECT_EQ(replay(golden[0]).exit_code, ctl::kSuccess);
  nlohmann::json other_output = golden[0];
  other_output["output_ids"][3] = 5;
  EXPECT_EQ(replay(other_output).exit_code, ctl::kDifferent);
  nlohmann::json other_length = golden[0];
  other_length["acceptance_lengths"][1] = 7;
  const Ran ran = replay(other_length);
  EXPECT_EQ(ran.exit_code, ctl::kDifferent);
  EXPECT_THAT(ran.output, HasSubstr("acceptance length of round 1 is 8, golden 7"));
  std::filesystem::remove(path);
}

TEST_F(DflashctlTest, ChatAnswersOneQuestion) {
  const Ran ran = server_->Dflashctl({"chat", "--no-thinking", "--temperature", "0", "--message", kQuestion});
  EXPECT_EQ(ran.exit_code, ctl::kSuccess);
  EXPECT_THAT(ran.output, StartsWith(std::string(kAnswer) + "\n[46 tokens, 9 rounds, "));
  EXPECT_THAT(ran.output, HasSubstr(" tokens per round, "));
}

TEST_F(DflashctlTest, ChatShowsWhereTextComesFrom) {
  const Ran ran = server_->Dflashctl(
      {"chat", "--no-thinking", "--temperature=0", "--show-rounds", "--message", kQuestion});
  EXPECT_EQ(ran.exit_code, ctl::kSuccess);
  EXPECT_THAT(ran.output, HasSubstr("«"));
  EXPECT_THAT(ran.output, HasSubstr("[accepted by depth: "));
  std::string plain = ran.output.substr(0, ran.output.find('\n'));
  for (const std::string mark : {"«", "»"}) {
    for (size_t at; (at = plain.find(mark)) != std::string::npos;) plain.erase(at, mark.size());
  }
  EXPECT_EQ(plain, kAnswer);
}

TEST_F(DflashctlTest, ChatKeepsItsHistoryUntilReset) {
  const auto tokens_of_last = [](const Ran& ran) { return ran.output.substr(ran.output.rfind("\n[") + 1); };
  const std::vector<std::string> chat = {"chat", "--no-thinking", "--temperature", "0", "--max-tokens", "16"};
  const Ran once = server_->Dflashctl(chat, std::string(kQuestion) + "\n");
  const Ran reset =
      server_->Dflashctl(chat, std::string("Say hello.\n/reset\n") + kQuestion + "\n/quit\nnever\n");
  EXPECT_EQ(once.exit_code, ctl::kSuccess);
  EXPECT_EQ(reset.exit_code, ctl::kSuccess);
  const auto answer_line = [&](const Ran& ran) {
    const std::string before = ran.output.substr(0, ran.output.rfind("\n["));
    return before.substr(before.rfind('\n') == std::string::npos ? 0 : before.rfind('\n') + 1);
  };
  EXPECT_EQ(answer_line(reset), answer_line(once));
  EXPECT_THAT(tokens_of_last(once), HasSubstr("16 tokens"));
}

TEST_F(DflashctlTest, GenerateFromTextTokensAndFiles) {
  const Ran by_tokens = server_->Dflashctl({"generate", "--tokens", "4089,2341,198,1074,552", "--temperature",
                                            "0", "--max-tokens", "4", "--show-tokens"});
  EXPECT_EQ(by_tokens.exit_code, ctl::kSuccess);
  std::string expected;
  for (uint32_t id : server_->GenerateOk(ShortRequest()).token_ids) {
    expected += (expected.empty() ? "" : ",") + std::to_string(id);
  }
  EXPECT_THAT(by_tokens.output, HasSubstr("\n" + expected + "\n"));
  const Ran both = server_->Dflashctl({"generate", "--prompt", "a", "--tokens", "1"});
  EXPECT_EQ(both.exit_code, ctl::kUsage);
  const Ran bad = server_->Dflashctl({"generate", "--tokens", "4096"});
  EXPECT_EQ(bad.exit_code, ctl::kServerError);
  EXPECT_THAT(bad.output, HasSubstr("error: INVALID_ARGUMENT: tokens.ids[0]"));
}

// Output that does not arrive is not success.
TEST_F(DflashctlTest, AFullDiskIsAnError) {
  const std::vector<std::vector<std::string>> commands = {
      {"status"},
      {"status", "--json"},
      {"generate", "--tokens", "4089,2341,198", "--temperature", "0", "--max-tokens", "4", "--show-tokens"},
      {"chat", "--message", "hello", "--max-tokens", "4"},
      {"doctor", "--golden", SourcePath("tests/golden"), "--max-prompts", "1"},
      {"--help"}};
  for (const std::vector<std::string>& command : commands) {
    std::vector<std::string> arguments = {"/bin/sh",       "-c",        "exec \"$0\" \"$@\" > /dev/full",
                                          DflashctlPath(), "--address", server_->address()};
    arguments.insert(arguments.end(), command.begin(), command.end());
    const Ran ran = RunProgram(arguments);
    EXPECT_EQ(ran.exit_code, ctl::kOutputLost) << command[0] << ": " << ran.output;
    EXPECT_THAT(ran.output, HasSubstr("standard output cannot be written"));
  }
}

TEST_F(DflashctlTest, BadFlagsNameThemselves) {
  const auto refused = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), DflashctlPath());
    const Ran ran = RunProgram(arguments);
    EXPECT_EQ(ran.exit_code, ctl::kUsage) << ran.output;
    return ran.output;
  };
  for (const char* address : {"127.0.0.1:99999", "127.0.0.1:0", "127.0.0.1", "host:", ":1"}) {
    EXPECT_THAT(refused({"--address", address, "status"}),
                HasSubstr("--address must be HOST:PORT with a port from 1 to 65535"));
  }
  EXPECT_THAT(refused({"generate", "--tokens", "1,,2"}), HasSubstr("--tokens: '' is not a token id"));
  EXPECT_THAT(refused({"generate", "--tokens", "1", "--timeout", "0"}), HasSubstr("--timeout must be"));
  const Ran seed = server_->Dflashctl(
      {"generate", "--tokens", "4089,2341,198", "--max-tokens", "2", "--seed", "18446744073709551615"});
  EXPECT_EQ(seed.exit_code, ctl::kSuccess) << seed.output;
}

TEST_F(DflashctlTest, StatusForPeopleAndPrograms) {
  const Ran text = server_->Dflashctl({"status"});
  EXPECT_EQ(text.exit_code, ctl::kSuccess);
  EXPECT_THAT(text.output, HasSubstr("serving           yes"));
  EXPECT_THAT(text.output, HasSubstr("taps=1,3,5"));
  const Ran json = server_->Dflashctl({"status", "--json"});
  const nlohmann::json parsed = nlohmann::json::parse(json.output, nullptr, false);
  ASSERT_FALSE(parsed.is_discarded()) << json.output;
  EXPECT_EQ(parsed["load"]["serving"], true);
  EXPECT_EQ(parsed["model"]["drafter"]["block_size"], 16);
}

TEST_F(DflashctlTest, BenchComparesBothWays) {
  const Ran ran = server_->Dflashctl({"bench", "--prompts", SourcePath("tests/golden/golden.json"),
                                      "--requests", "3", "--repeat", "1", "--max-tokens", "16", "--json"});
  ASSERT_EQ(ran.exit_code, ctl::kSuccess) << ran.output;
  const nlohmann::json json = nlohmann::json::parse(ran.output, nullptr, false);
  ASSERT_FALSE(json.is_discarded()) << ran.output;
  EXPECT_EQ(json["arms"][0]["name"], "off");
  EXPECT_EQ(json["arms"][0]["tokens_per_round"], 1.0);
  EXPECT_EQ(json["arms"][1]["name"], "dflash");
  EXPECT_GT(json["arms"][1]["tokens_per_round"], 2.0);
  EXPECT_EQ(json["arms"][0]["tokens"], json["arms"][1]["tokens"]);
}

// The client's process is gone and says no goodbye; its connection ends.
TEST_F(DflashctlTest, AKilledClientFreesItsPlace) {
  ASSERT_TRUE(server_->WaitUntilIdle());
  Process client({DflashctlPath(), "--address", server_->address(), "generate", "--tokens", "4089,2341,198",
                  "--ignore-eos", "--temperature", "0", "--max-tokens", "3000", "--speculation", "off"});
  ASSERT_TRUE(server_->WaitUntilRunning(1));
  client.Signal(SIGKILL);
  EXPECT_TRUE(server_->WaitUntilIdle());
  EXPECT_EQ(server_->GenerateOk(ShortRequest()).token_ids.size(), 4u);
}

TEST_F(DflashctlTest, CtrlCCancels) {
  ASSERT_TRUE(server_->WaitUntilIdle());
  Process chat({DflashctlPath(), "--address", server_->address(), "generate", "--tokens", "4089,2341,198",
                "--ignore-eos", "--temperature", "0", "--max-tokens", "3000", "--speculation", "off"});
  ASSERT_TRUE(server_->WaitUntilRunning(1));
  chat.Signal(SIGINT);
  EXPECT_EQ(chat.WaitForExit(), ctl::kInterrupted);
  EXPECT_TRUE(server_->WaitUntilIdle());
}

}  // namespace
}  // namespace dflash::integration
