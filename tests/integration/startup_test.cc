// Command lines and model folders that cannot work: the daemon ends at once and says what is wrong.
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string_view>

#include "base/exit_codes.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/process.h"
#include "tests/integration/server.h"

namespace dflash::integration {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// A copy of the small target that a test may damage.
class ModelCopy {
 public:
  ModelCopy() : folder_(fs::path(::testing::TempDir()) / ("startup_test." + std::to_string(getpid()))) {
    fs::remove_all(folder_);
    fs::copy(SourcePath("models/tiny-qwen3.6"), folder_);
  }
  ~ModelCopy() { fs::remove_all(folder_); }
  std::string path(const std::string& name = "") const { return (folder_ / name).string(); }

 private:
  const fs::path folder_;
};

// Runs the daemon until it ends; it must fail.
std::string Failure(const std::vector<std::string>& command) {
  const Ran ran = RunProgram(command);
  EXPECT_GT(ran.exit_code, 0) << ran.output;
  EXPECT_LT(ran.exit_code, 128) << "ended by a signal:\n" << ran.output;
  return ran.output;
}

std::vector<std::string> CommandFor(const std::string& model) {
  std::vector<std::string> command = ServerCommand();
  command[2] = model;
  return command;
}

TEST(Startup, BadFlags) {
  EXPECT_THAT(Failure({DflashdPath(), "--modle", "x"}),
              HasSubstr("unknown flag --modle (did you mean --model?)"));
  EXPECT_THAT(Failure({DflashdPath()}), HasSubstr("--model"));
  EXPECT_THAT(Failure(ServerCommand({"--backend", "abacus"})), HasSubstr("--backend must be one of"));
  EXPECT_THAT(Failure(ServerCommand({"--speculation", "guess"})), HasSubstr("--speculation must be one of"));
  EXPECT_THAT(Failure(ServerCommand({"--instruction-set", "neon"})),
              HasSubstr("--instruction-set must be one of"));
  EXPECT_THAT(Failure(ServerCommand({"--tp", "0"})), HasSubstr("--tp must be"));
  EXPECT_THAT(Failure(ServerCommand({"--model", "x"})), HasSubstr("--model is given twice"));
  std::vector<std::string> bad_port = ServerCommand();
  bad_port[6] = "127.0.0.1:99999";
  EXPECT_THAT(Failure(bad_port), HasSubstr("99999"));
}

TEST(Startup, ConfigurationFile) {
  const std::string path =
      fs::path(::testing::TempDir()) / ("startup_test." + std::to_string(getpid()) + ".yaml");
  std::ofstream(path) << "max-sequences: 3\nmax-queued-request: 4\n";
  EXPECT_THAT(Failure(ServerCommand({"--config", path})),
              HasSubstr(path + ":2: unknown key max-queued-request (did you mean max-queued-requests?)"));
  std::ofstream(path) << "max-sequences: 3\nmax-queued-requests: 4\n";
  const Ran ran = RunProgram(ServerCommand({"--config", path, "--print-config"}));
  EXPECT_EQ(ran.exit_code, 0);
  EXPECT_THAT(ran.output,
              AllOf(HasSubstr("max-sequences: 3  # file\n"), HasSubstr("listen: '127.0.0.1:0'  # flag\n")));
  {
    Server server({"--config", path});
    ASSERT_NE(server.channel(), nullptr);
    EXPECT_EQ(server.ModelInfo().max_sequences(), 3u);
    EXPECT_EQ(server.Load().max_waiting(), 4u);
  }
  fs::remove(path);
}

TEST(Startup, MissingFolders) {
  EXPECT_THAT(Failure(CommandFor("/nonexistent/model")), HasSubstr("/nonexistent/model"));
  std::vector<std::string> no_drafter = ServerCommand();
  no_drafter[4] = "/nonexistent/drafter";
  EXPECT_THAT(Failure(no_drafter), HasSubstr("/nonexistent/drafter"));
}

TEST(Startup, TruncatedWeights) {
  const ModelCopy model;
  const std::string shard = model.path("model-00002-of-00002.safetensors");
  fs::resize_file(shard, fs::file_size(shard) - 100);
  EXPECT_THAT(Failure(CommandFor(model.path())), HasSubstr("model-00002-of-00002.safetensors"));
  fs::resize_file(shard, 3);
  EXPECT_THAT(Failure(CommandFor(model.path())), HasSubstr("model-00002-of-00002.safetensors"));
  fs::remove(shard);
  EXPECT_THAT(Failure(CommandFor(model.path())), HasSubstr("model-00002-of-00002.safetensors"));
}

// Without a golden bundle, too: no client has to find it.
TEST(Startup, WeightsThatAreNoNumbers) {
  const ModelCopy model;
  const std::string shard = model.path("model-00002-of-00002.safetensors");
  {
    std::fstream file(shard, std::ios::in | std::ios::out | std::ios::binary);
    uint64_t header = 0;
    file.read(reinterpret_cast<char*>(&header), sizeof(header));
    const auto begin = static_cast<std::streamoff>(sizeof(header) + header);
    file.seekp(begin);
    const std::string nans(fs::file_size(shard) - static_cast<size_t>(begin), '\xff');
    file.write(nans.data(), static_cast<std::streamsize>(nans.size()));
  }
  const Ran ran = RunProgram(CommandFor(model.path()));
  EXPECT_EQ(ran.exit_code, kExitBadModel);
  EXPECT_THAT(ran.output, HasSubstr("the target's logits at position 1 are not numbers"));
}

TEST(Startup, DamagedConfiguration) {
  const ModelCopy model;
  const std::string config = model.path("config.json");
  std::string text;
  {
    std::ifstream file(config);
    text.assign(std::istreambuf_iterator<char>(file), {});
  }
  const size_t key = text.find("\"rope_theta\"");
  ASSERT_NE(key, std::string::npos);
  std::ofstream(config) << std::string(text).replace(key, 12, "\"rope_tetha\"");
  EXPECT_THAT(Failure(CommandFor(model.path())), AllOf(HasSubstr("config.json"), HasSubstr("rope_t")));
  std::ofstream(config) << text.substr(0, text.size() / 2);
  EXPECT_THAT(Failure(CommandFor(model.path())), HasSubstr("config.json"));
}

TEST(Startup, AnAddressInUse) {
  Server first;
  ASSERT_NE(first.channel(), nullptr);
  std::vector<std::string> command = ServerCommand();
  command[6] = first.address();
  EXPECT_THAT(Failure(command), AllOf(HasSubstr("--listen"), HasSubstr(first.address()),
                                      HasSubstr("Address already in use"), Not(HasSubstr("grpc:"))));
  command[6] = "127.0.0.1:0";
  command[8] = first.ops_address();
  EXPECT_THAT(Failure(command), AllOf(HasSubstr("--ops-listen"), HasSubstr("Address already in use")));
  command[6] = "192.0.2.1:8500";  // nobody's address
  EXPECT_THAT(Failure(command), HasSubstr("Cannot assign requested address"));
}

// What a killed daemon leaves behind goes when the next one starts.
TEST(Startup, LeftoversOfAKilledDaemonAreRemoved) {
  const fs::path runtime = fs::path(::testing::TempDir()) / ("startup_runtime." + std::to_string(getpid()));
  fs::remove_all(runtime);
  fs::create_directories(runtime);
  setenv("XDG_RUNTIME_DIR", runtime.c_str(), 1);
  const auto names = [&] {
    std::set<std::string> found;
    for (const auto& entry : fs::directory_iterator(runtime)) found.insert(entry.path().filename());
    return found;
  };
  std::set<std::string> left;
  {
    Server killed;
    ASSERT_NE(killed.channel(), nullptr);
    killed.process().Signal(SIGKILL);
    ASSERT_TRUE(killed.process().WaitForExit().has_value());
    left = names();
    EXPECT_EQ(left.size(), 1u);
  }
  {
    Server next;
    ASSERT_NE(next.channel(), nullptr);
    EXPECT_EQ(names().size(), 1u);
    EXPECT_NE(names(), left);
    EXPECT_EQ(next.GenerateOk(ShortRequest()).token_ids.size(), 4u);
  }
  EXPECT_TRUE(names().empty());
  unsetenv("XDG_RUNTIME_DIR");
  fs::remove_all(runtime);
}

// Without a drafter the daemon serves, and a request that insists on one is refused.
TEST(Startup, WithoutDrafter) {
  std::vector<std::string> flags;
  Server server({"--speculation", "off"});
  ASSERT_NE(server.channel(), nullptr);
  v1::GenerateRequest request = ShortRequest();
  const ctl::Generation generation = server.GenerateOk(request);
  EXPECT_EQ(generation.finished.speculation().rounds(), 0u);
  EXPECT_EQ(server.ModelInfo().default_speculation(), v1::SPECULATION_MODE_OFF);
}

// The flag reaches the worker; a machine that lacks the set says so.
TEST(Startup, InstructionSets) {
  std::vector<uint32_t> first;
  for (const char* set : {"scalar", "avx2", "avx512"}) {
    SCOPED_TRACE(set);
    if (!__builtin_cpu_supports("avx512bw") && std::string_view(set) == "avx512") {
      EXPECT_THAT(Failure(ServerCommand({"--instruction-set", set})),
                  HasSubstr("--instruction-set: this machine has no avx512"));
      continue;
    }
    Server server({"--instruction-set", set});
    ASSERT_NE(server.channel(), nullptr);
    const ctl::Generation generation = server.GenerateOk(ShortRequest());
    const std::vector<uint32_t> tokens(generation.token_ids.begin(), generation.token_ids.end());
    ASSERT_FALSE(tokens.empty());
    if (first.empty()) first = tokens;
    EXPECT_EQ(tokens, first);
  }
}

TEST(Startup, HelpAndVersion) {
  const Ran help = RunProgram({DflashdPath(), "--help"});
  EXPECT_EQ(help.exit_code, 0);
  for (const char* flag : {"--model", "--draft-model", "--listen", "--ops-listen", "--tp", "--backend",
                           "--speculation", "127.0.0.1:8500", "127.0.0.1:8503"}) {
    EXPECT_THAT(help.output, HasSubstr(flag));
  }
  const Ran version = RunProgram({DflashdPath(), "--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_THAT(version.output, AllOf(HasSubstr("dflashd"), Not(HasSubstr("Usage"))));
}

// What the system does to a program that writes beyond its limit is end it, unless it says otherwise.
TEST(Startup, ALogThatMayNotGrowChangesNothing) {
  const std::string log = ::testing::TempDir() + "startup_test." + std::to_string(getpid()) + ".log";
  std::ofstream(log) << std::string(1024, '.');
  std::vector<std::string> command = {"/bin/sh", "-c", "ulimit -f 1; log=$0; exec \"$@\" 2>>\"$log\"", log};
  for (const std::string& word : ServerCommand()) command.push_back(word);
  Process server(command);
  const std::optional<std::string> line = server.WaitForLine("dflashd: listening on ");
  ASSERT_TRUE(line.has_value() && server.WaitForLine("dflashd: ready").has_value()) << server.output();
  const size_t begin = line->find("listening on ") + 13;
  const std::string address = line->substr(begin, line->find(',') - begin);
  ctl::Generation generation;
  const grpc::Status status = Generate(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()),
                                       ShortRequest(), kPatience, &generation);
  EXPECT_TRUE(status.ok()) << ctl::Describe(status);
  EXPECT_EQ(generation.token_ids.size(), 4u);
  server.Signal(SIGTERM);
  EXPECT_EQ(server.WaitForExit(), 0);
  EXPECT_EQ(fs::file_size(log), 1024u) << "it may not grow";
  fs::remove(log);
}

// A worker that still loads has no request that it would have to end.
TEST(Startup, AnEndDuringTheLoadDoesNotWaitForTheWorker) {
  Process server(ServerCommand());
  ASSERT_TRUE(server.WaitForLine("dflashd: listening on ").has_value()) << server.output();
  server.Signal(SIGTERM);
  (void)server.WaitForExit();
  EXPECT_THAT(server.output(), ::testing::Not(::testing::HasSubstr("does not end"))) << server.output();
}

}  // namespace
}  // namespace dflash::integration
