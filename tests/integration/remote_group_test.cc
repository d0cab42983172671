// Worker groups that are not the daemon's children: dflash-worker --launch starts their ranks, on one host or
// on two (both on loopback here), and dflashd --connect finds them by address.
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "dflash/worker/v1/worker.pb.h"
#include "gmock/gmock.h"
#include "google/protobuf/descriptor.h"
#include "gtest/gtest.h"
#include "tests/integration/golden_prompts.h"
#include "tests/integration/group_processes.h"
#include "tests/integration/raw_call.h"
#include "tests/integration/server.h"
#include "tools/dflashctl/commands.h"

namespace dflash::integration {
namespace {

using ::testing::HasSubstr;

// Process id of a rank as the launcher's log says it, in its last life.
int PidOf(const Process& launcher, int rank) {
  const std::string output = launcher.output();
  const std::string head = absl::StrCat("started rank ", rank, " as process ");
  const size_t at = output.rfind(head);
  int pid = 0;
  if (at == std::string::npos) return 0;
  const size_t begin = at + head.size();
  EXPECT_TRUE(absl::SimpleAtoi(output.substr(begin, output.find('\n', begin) - begin), &pid));
  return pid;
}

class RemoteGroup : public ::testing::Test {
 protected:
  RemoteGroup() : chat_(GoldenTexts().front()) {
    chat_.output_ids.resize(24);
    secret_ = NewSecret("one secret of the group\n");
    wrong_secret_ = NewSecret("quite another secret\n");
    leader_ = absl::StrCat("127.0.0.1:", FreePort());
    ranks_ = absl::StrCat("tcp:127.0.0.1:", FreePort());
  }
  ~RemoteGroup() override {
    for (const std::string& path : {secret_, wrong_secret_}) std::remove(path.c_str());
  }

  std::string NewSecret(const std::string& text) {
    const std::string path =
        absl::StrCat(::testing::TempDir(), "/remote_group_test.", getpid(), ".", ++secrets_);
    std::ofstream(path) << text;
    EXPECT_EQ(chmod(path.c_str(), 0600), 0);
    return path;
  }

  std::vector<std::string> Launcher(const std::string& secret, const std::vector<std::string>& flags) const {
    std::vector<std::string> command = {WorkerPath(),
                                        "--launch",
                                        "--model",
                                        TinyTarget(),
                                        "--draft-model",
                                        SourcePath("models/tiny-qwen3.6-dflash"),
                                        "--tp",
                                        "2",
                                        "--formation-timeout",
                                        "20",
                                        "--max-restart-delay",
                                        "1",
                                        "--group-secret-file",
                                        secret};
    command.insert(command.end(), flags.begin(), flags.end());
    return command;
  }
  // Host `index` of two.
  std::vector<std::string> Host(int index, const std::string& secret) const {
    std::vector<std::string> flags = {"--hosts",        "2",   "--host-index", absl::StrCat(index),
                                      "--group-socket", ranks_};
    if (index == 0) flags.insert(flags.end(), {"--listen", leader_});
    return Launcher(secret, flags);
  }
  std::vector<std::string> Connect(const std::string& secret) const {
    return {"--connect",           leader_, "--group-secret-file", secret,
            "--max-restart-delay", "1",     "--replay-seconds",    "0"};
  }

  void ExpectAnswers(Server& server) const {
    const ctl::Generation answer =
        server.GenerateOk(TokenRequest(chat_.prompt_ids, static_cast<uint32_t>(chat_.output_ids.size())));
    EXPECT_EQ(answer.token_ids, chat_.output_ids);
    EXPECT_GT(answer.finished.speculation().accepted_tokens(), 0u);
  }

  // Ends a process of the group while it works for a client, who hears it.
  void EndWhileAtWork(Server& server, int pid) const {
    OpenStream stream(server.stub(), EndlessRequest());
    ASSERT_TRUE(stream.ReadFirstTokens());
    ASSERT_EQ(kill(pid, SIGKILL), 0);
    EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  }

  GoldenText chat_;
  std::string secret_, wrong_secret_, leader_, ranks_;
  int secrets_ = 0;
};

TEST_F(RemoteGroup, OnOneHostComesBackAfterFaultsAndServesTheNextDaemon) {
  Process launcher(Launcher(secret_, {"--listen", leader_}));
  {
    Server server(Connect(secret_));
    ASSERT_NE(server.channel(), nullptr) << launcher.output();
    ExpectAnswers(server);
    EXPECT_EQ(server.ModelInfo().tensor_parallel_size(), 2u);
    for (const int rank : {1, 0}) {
      SCOPED_TRACE(rank);
      const int pid = PidOf(launcher, rank);
      EndWhileAtWork(server, pid);
      ASSERT_TRUE(server.WaitUntilServing()) << launcher.output();
      EXPECT_TRUE(IsGone(pid));
      ExpectAnswers(server);
    }
  }
  // The daemon is gone, and with it this life of the group; the next one waits for the next daemon.
  Server next(Connect(secret_));
  ASSERT_NE(next.channel(), nullptr) << launcher.output();
  ExpectAnswers(next);
  const std::vector<int> ranks = {PidOf(launcher, 0), PidOf(launcher, 1)};
  launcher.Signal(SIGTERM);
  EXPECT_EQ(launcher.WaitForExit(), 0) << launcher.output();
  for (const int pid : ranks) EXPECT_TRUE(IsGone(pid));
}

TEST_F(RemoteGroup, OnTwoHostsEachMayBeLostAndComeBack) {
  Process first(Host(0, secret_));
  auto second = std::make_unique<Process>(Host(1, secret_));
  Server server(Connect(secret_));
  ASSERT_NE(server.channel(), nullptr) << first.output() << second->output();
  ExpectAnswers(server);
  EndWhileAtWork(server, PidOf(*second, 1));
  ASSERT_TRUE(server.WaitUntilServing()) << first.output() << second->output();
  ExpectAnswers(server);
  // A whole host: its rank goes with its launcher.
  const int rank = PidOf(*second, 1);
  EndWhileAtWork(server, second->pid());
  EXPECT_TRUE(PollUntil([&] { return IsGone(rank); }));
  second = std::make_unique<Process>(Host(1, secret_));
  ASSERT_TRUE(server.WaitUntilServing()) << first.output() << second->output();
  ExpectAnswers(server);
}

TEST_F(RemoteGroup, StrangersAreRefused) {
  Process first(Host(0, secret_));
  {
    Process stranger(Host(1, wrong_secret_));
    EXPECT_TRUE(stranger.WaitForLine("the proof of the group secret is wrong").has_value())
        << stranger.output();
  }
  Process second(Host(1, secret_));
  ASSERT_TRUE(first.WaitForLine("waits for the coordinator").has_value()) << first.output();
  {
    Process daemon(ServerCommand(Connect(wrong_secret_)));
    EXPECT_TRUE(daemon.WaitForLine("the proof of the group secret is missing or wrong").has_value());
    EXPECT_EQ(daemon.output().find("dflashd: ready"), std::string::npos);
  }
  // And so is anybody else, whatever they call.
  const auto port = grpc::CreateChannel(leader_, grpc::InsecureChannelCredentials());
  const google::protobuf::ServiceDescriptor& service =
      *worker::v1::GetGroupInfoRequest::descriptor()->file()->FindServiceByName("WorkerService");
  ASSERT_GE(service.method_count(), 2);
  for (int i = 0; i < service.method_count(); ++i) {
    const std::string method = absl::StrCat("/", service.full_name(), "/", service.method(i)->name());
    EXPECT_EQ(CallEmpty(port, method).error_code(), grpc::StatusCode::UNAUTHENTICATED) << method;
    for (const std::string wrong : {"", "00", "one secret of the group"}) {
      EXPECT_EQ(CallEmpty(port, method, {"dflash-group-proof", wrong}).error_code(),
                grpc::StatusCode::UNAUTHENTICATED)
          << method << wrong;
    }
  }
  for (const char* method :
       {"/grpc.health.v1.Health/Check", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"}) {
    EXPECT_EQ(CallEmpty(port, method).error_code(), grpc::StatusCode::UNIMPLEMENTED) << method;
  }
  Server server(Connect(secret_));
  ASSERT_NE(server.channel(), nullptr) << first.output();
  ExpectAnswers(server);
}

TEST_F(RemoteGroup, BadCommandLines) {
  const auto output = [&](const std::vector<std::string>& flags) {
    std::vector<std::string> command = {WorkerPath(), "--launch", "--model", TinyTarget()};
    command.insert(command.end(), flags.begin(), flags.end());
    const Ran ran = RunProgram(command);
    EXPECT_EQ(ran.exit_code, 64);
    return ran.output;
  };
  EXPECT_THAT(output({}), HasSubstr("--listen is required"));
  EXPECT_THAT(output({"--rank", "1"}), HasSubstr("--rank is the launcher's to say"));
  EXPECT_THAT(output({"--tp", "3", "--hosts", "2"}), HasSubstr("--tp 3 does not divide by --hosts 2"));
  EXPECT_THAT(output({"--tp", "2", "--hosts", "2"}), HasSubstr("--group-socket tcp:HOST:PORT"));
  EXPECT_THAT(output({"--tp", "2", "--hosts", "2", "--group-socket", ranks_}),
              HasSubstr("--group-secret-file"));
  EXPECT_THAT(output({"--listen", leader_}), HasSubstr("--listen over TCP needs --group-secret-file"));
  const Ran ran = RunProgram(ServerCommand({"--connect", leader_}));
  EXPECT_EQ(ran.exit_code, 64);
  EXPECT_THAT(ran.output, HasSubstr("--connect needs --group-secret-file"));
}

}  // namespace
}  // namespace dflash::integration
