// --log-format json: whatever happens, every line on standard error is one JSON object of one form, whoever
// of our processes, or gRPC in them, writes it.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/integration/server.h"

namespace dflash::integration {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::MatchesRegex;
using Json = nlohmann::json;

// The log of a run, checked line by line.
struct LogLines {
  std::set<std::string> levels, components;
  std::string messages;  // all, one a line
  int grpc = 0;
};
LogLines ReadLog(const std::string& path) {
  LogLines lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const Json entry = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!entry.is_object()) {
      ADD_FAILURE() << "no JSON object: " << line;
      continue;
    }
    for (const char* key : {"ts", "level", "component", "msg"})
      EXPECT_TRUE(entry.contains(key) && entry[key].is_string()) << key << " in " << line;
    EXPECT_THAT(entry.value("ts", ""), MatchesRegex("20[0-9-]+T[0-9:]+[.][0-9]{6}Z"));
    lines.levels.insert(entry.value("level", ""));
    lines.components.insert(entry.value("component", ""));
    const std::string message = entry.value("msg", "");
    lines.messages += message + "\n";
    lines.grpc += message.starts_with("grpc: ");
  }
  return lines;
}

constexpr char kLevelFollowed[] = "\"component\":\"dflash-worker\",\"msg\":\"the log level is now debug\"";
// How many lines of a file have `text`.
int Count(const std::string& path, const std::string& text) {
  int count = 0;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) count += line.find(text) != std::string::npos;
  return count;
}

TEST(LogLines, AreJsonWhateverHappens) {
  const std::string log = ::testing::TempDir() + "log_lines_test." + std::to_string(getpid()) + ".log";
  std::ofstream(log).close();
  // gRPC says something at its start then; that of this process has begun before.
  const auto own = grpc::CreateChannel("localhost:1", grpc::InsecureChannelCredentials());
  setenv("GRPC_VERBOSITY", "DEBUG", 1);
  std::string output;
  {
    Server server({"--log-format", "json", "--log-level", "debug", "--tp", "2", "--threads", "1",
                   "--max-restart-delay", "1"},
                  TinyTarget(), log);
    unsetenv("GRPC_VERBOSITY");
    ASSERT_NE(server.channel(), nullptr);
    EXPECT_EQ(server.GenerateOk(ShortRequest()).token_ids.size(), 4u);
    v1::GenerateRequest bad = ShortRequest();
    bad.mutable_sampling()->set_temperature(-1);
    ctl::Generation nothing;
    EXPECT_FALSE(Generate(server.channel(), bad, kPatience, &nothing).ok());
    EXPECT_EQ(
        RunProgram({DflashctlPath(), "log-level", "debug", "--address", server.admin_address()}).exit_code,
        ctl::kSuccess);
    EXPECT_TRUE(PollUntil([&] { return Count(log, kLevelFollowed) == 2; })) << "both ranks follow";
    const int pid = server.Load().groups(0).leader_pid();
    ASSERT_GT(pid, 1);
    ASSERT_EQ(kill(pid, SIGKILL), 0);
    ASSERT_TRUE(PollUntil([&] { return server.Load().groups(0).leader_pid() != pid; }));
    ASSERT_TRUE(server.WaitUntilServing());
    EXPECT_TRUE(PollUntil([&] { return Count(log, kLevelFollowed) == 4; }))
        << "and so do those of the next life";
    OpenStream stream(server.stub(), EndlessRequest());
    EXPECT_TRUE(stream.ReadFirstTokens());
    server.process().Signal(SIGTERM);
    server.process().Signal(SIGTERM);
    EXPECT_EQ(server.process().WaitForExit(), 0);
    output = server.process().output();
  }
  EXPECT_EQ(Count(log, R"("level":"info","component":"dflashd","msg":"request refused")"), 1);
  EXPECT_EQ(Count(log, R"("end":"INVALID_ARGUMENT","reason":"BAD_PARAMETER","field":"sampling.temperature")"),
            1);
  const LogLines lines = ReadLog(log);
  EXPECT_THAT(std::set<std::string>({"debug", "info", "warn", "error"}), IsSupersetOf(lines.levels));
  EXPECT_THAT(lines.levels, IsSupersetOf({"debug", "info", "warn", "error"}));
  EXPECT_EQ(lines.components, std::set<std::string>({"dflashd", "dflash-worker"}));
  for (const char* message :
       {"takes connections", "loaded; waits for the coordinator", "request ended",
        "the first worker group serves", "group 0 is lost", "admin: SetLogLevel", "draining for at most"}) {
    EXPECT_THAT(lines.messages, HasSubstr(message));
  }
  EXPECT_GT(lines.grpc, 0) << "gRPC has said nothing";
  // Standard output has the two lines that scripts read, and nothing else.
  EXPECT_THAT(output, MatchesRegex("dflashd: listening on [^\n]*\ndflashd: ready\n"));
  std::remove(log.c_str());
}

// A log that nobody reads, and then one whose reader is gone: serving goes on, and ends when it is asked to.
TEST(LogLines, NobodyHasToReadThem) {
  const std::string log = ::testing::TempDir() + "log_lines_test." + std::to_string(getpid()) + ".fifo";
  ASSERT_EQ(mkfifo(log.c_str(), 0600), 0);
  const int reader = open(log.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(reader, 0);
  // As if much had been logged already: there is room for no line.
  ASSERT_EQ(fcntl(reader, F_SETFL, O_NONBLOCK), 0);
  const std::string full(4096, '.');
  while (write(reader, full.data(), full.size()) > 0) {
  }
  {
    Server server({"--log-level", "debug", "--max-restart-delay", "1"}, TinyTarget(), log);
    ASSERT_NE(server.channel(), nullptr);
    for (int i = 0; i < 20; ++i) EXPECT_EQ(server.GenerateOk(ShortRequest()).token_ids.size(), 4u);
    close(reader);
    for (int i = 0; i < 20; ++i) EXPECT_EQ(server.GenerateOk(ShortRequest()).token_ids.size(), 4u);
    const int pid = server.Load().groups(0).leader_pid();
    ASSERT_EQ(kill(pid, SIGKILL), 0);
    ASSERT_TRUE(PollUntil([&] { return server.Load().groups(0).leader_pid() != pid; }));
    ASSERT_TRUE(server.WaitUntilServing()) << "the next worker has nobody to log to from its start";
    EXPECT_EQ(server.GenerateOk(ShortRequest()).token_ids.size(), 4u);
    server.process().Signal(SIGTERM);
    EXPECT_EQ(server.process().WaitForExit(), 0);
  }
  std::remove(log.c_str());
}

// What is wrong with a start is said in the form that was asked for, also before everything was read.
TEST(LogLines, AreJsonWhereAStartFails) {
  const auto last = [](const std::vector<std::string>& command) {
    const Ran ran = RunProgram(command);
    EXPECT_GT(ran.exit_code, 0);
    const Json entry = Json::parse(ran.output, nullptr, /*allow_exceptions=*/false);
    EXPECT_TRUE(entry.is_object()) << ran.output;
    return entry.is_object()
               ? entry.value("component", "") + " " + entry.value("level", "") + " " + entry.value("msg", "")
               : ran.output;
  };
  EXPECT_THAT(last({DflashdPath(), "--log-format", "json", "--modle", "x"}),
              HasSubstr("dflashd error unknown flag --modle"));
  EXPECT_THAT(last({DflashdPath(), "--log-format=json"}), HasSubstr("dflashd error --model is required"));
  EXPECT_THAT(last({WorkerPath(), "--rank", "x", "--log-format", "json"}),
              HasSubstr("dflash-worker error --rank"));
  EXPECT_THAT(last({"/usr/bin/env", "DFLASHD_LOG_FORMAT=json", DflashdPath(), "--modle", "x"}),
              HasSubstr("dflashd error unknown flag"));
  const std::string config = ::testing::TempDir() + "log_lines_test." + std::to_string(getpid()) + ".yaml";
  std::ofstream(config) << "log-format: json\nmodle: x\n";
  EXPECT_THAT(last({DflashdPath(), "--config", config}),
              HasSubstr("dflashd error " + config + ":2: unknown key modle"));
  EXPECT_THAT(last({DflashdPath(), "--config", config, "--tp", "x"}),
              HasSubstr("dflashd error --tp must be"));
  std::remove(config.c_str());
}

}  // namespace
}  // namespace dflash::integration
