// Worker groups that are not the daemon's children: dflash-worker --launch starts their ranks, on one host or
// on two (both on loopback here), and dflashd --connect finds them by address.
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "dflash/worker/v1/worker.pb.h"
#include "gmock/gmock.h"
#include "google/protobuf/descriptor.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/integration/golden_prompts.h"
#include "tests/integration/group_processes.h"
#include "tests/integration/raw_call.h"
#include "tests/integration/server.h"
#include "tools/dflashctl/commands.h"

namespace dflash::integration {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr char kNotEnded[] = "ranks that do not end are killed";

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

  std::vector<std::string> Launcher(const std::string& secret, const std::vector<std::string>& flags,
                                    const std::string& model = TinyTarget()) const {
    std::vector<std::string> command = {WorkerPath(),
                                        "--launch",
                                        "--model",
                                        model,
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
  std::vector<std::string> Host(int index, const std::string& secret,
                                const std::string& model = TinyTarget()) const {
    std::vector<std::string> flags = {"--hosts",        "2",   "--host-index", absl::StrCat(index),
                                      "--group-socket", ranks_};
    if (index == 0) flags.insert(flags.end(), {"--listen", leader_});
    return Launcher(secret, flags, model);
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
  // Neither waits for ranks that nobody ends.
  second->Signal(SIGTERM);
  EXPECT_EQ(second->WaitForExit(), 0);
  EXPECT_EQ(second->output().find(kNotEnded), std::string::npos) << second->output();
}

TEST_F(RemoteGroup, AnEndBeforeAllAreThereDoesNotWaitForThem) {
  Process first(Host(0, secret_));
  ASSERT_TRUE(first.WaitForLine("rank 0 of 2 waits for the others").has_value()) << first.output();
  first.Signal(SIGTERM);
  EXPECT_EQ(first.WaitForExit(), 0) << first.output();
  EXPECT_EQ(first.output().find(kNotEnded), std::string::npos) << first.output();
}

// A copy of the small target with one thing changed, of which everything else looks the same.
class OtherModel {
 public:
  OtherModel() : folder_(::testing::TempDir() + "/remote_group_test.model." + std::to_string(getpid())) {
    fs::remove_all(folder_);
    fs::copy(TinyTarget(), folder_);
  }
  ~OtherModel() { fs::remove_all(folder_); }
  const std::string& path() const { return folder_; }
  void Append(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ + "/" + name, std::ios::app) << text;
  }
  // One bit of the last weight of a layer's matrix.
  void ChangeWeights() const {
    std::fstream file(folder_ + "/model-00002-of-00002.safetensors",
                      std::ios::in | std::ios::out | std::ios::binary);
    uint64_t size = 0;  // of the header
    file.read(reinterpret_cast<char*>(&size), sizeof(size));
    std::string header(size, '\0');
    file.read(header.data(), static_cast<std::streamsize>(size));
    const nlohmann::json tensors = nlohmann::json::parse(header);
    for (const auto& [name, tensor] : tensors.items()) {
      if (!name.ends_with("mlp.down_proj.weight") || name.starts_with("mtp.")) continue;
      const auto place =
          static_cast<std::streamoff>(8 + size + tensor["data_offsets"][1].get<uint64_t>() - 1);
      file.seekg(place);
      const int byte = file.get();
      file.seekp(place);
      file.put(static_cast<char>(byte ^ 1));
      return;
    }
    ADD_FAILURE() << "the model has no such tensor";
  }

 private:
  const std::string folder_;
};

// A group with another tokenizer than the coordinator's would answer nonsense.
TEST_F(RemoteGroup, AGroupWithAnotherTokenizerIsNotAdmitted) {
  const OtherModel other;
  other.Append("tokenizer_config.json", "\n");
  Process launcher(Launcher(secret_, {"--listen", leader_}, other.path()));
  Process daemon(ServerCommand(Connect(secret_)));
  const std::optional<std::string> listening = daemon.WaitForLine("dflashd: listening on ");
  ASSERT_TRUE(listening.has_value()) << daemon.output();
  const auto line = daemon.WaitForLine("refused, it has another model than this server's files: tokenizer (");
  ASSERT_TRUE(line.has_value()) << daemon.output() << launcher.output();
  const size_t begin = listening->find("listening on ") + 13;
  const auto channel = grpc::CreateChannel(listening->substr(begin, listening->find(',') - begin),
                                           grpc::InsecureChannelCredentials());
  v1::GetLoadResponse load;
  grpc::ClientContext context;
  ASSERT_TRUE(v1::InferenceService::NewStub(channel)->GetLoad(&context, {}, &load).ok());
  EXPECT_FALSE(load.serving());
  EXPECT_THAT(load.groups(0).detail(), HasSubstr("another model"));
  ctl::Generation generation;
  EXPECT_EQ(Generate(channel, ShortRequest(), kPatience, &generation).error_code(),
            grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(daemon.output().find("dflashd: ready"), std::string::npos);
}

// The first group decides about weights: a request must not go on in another text.
TEST_F(RemoteGroup, AGroupWithOtherWeightsIsNotAdmittedBesideTheFirst) {
  Server server({"--groups", "1", "--tp", "2", "--threads", "1", "--connect", leader_, "--group-secret-file",
                 secret_, "--max-restart-delay", "1"});
  ASSERT_NE(server.channel(), nullptr);
  const OtherModel other;
  other.ChangeWeights();
  {
    Process launcher(Launcher(secret_, {"--listen", leader_}, other.path()));
    const auto line =
        server.process().WaitForLine("the first group that this server had: target's weights (");
    ASSERT_TRUE(line.has_value()) << server.process().output() << launcher.output();
    EXPECT_THAT(*line, HasSubstr("group 1 is lost"));
    EXPECT_NE(server.Load().groups(1).state(), v1::GROUP_STATE_READY);
    ExpectAnswers(server);
    launcher.Signal(SIGTERM);
    EXPECT_TRUE(launcher.WaitForExit().has_value());
  }
  Process right(Launcher(secret_, {"--listen", leader_}));
  EXPECT_TRUE(PollUntil([&] { return server.Load().groups(1).state() == v1::GROUP_STATE_READY; }))
      << right.output();
}

// Ranks of one group, on two hosts, of which one has an older download.
TEST_F(RemoteGroup, RanksWithOtherWeightsFormNoGroup) {
  const OtherModel other;
  other.ChangeWeights();
  Process first(Host(0, secret_));
  Process second(Host(1, secret_, other.path()));
  EXPECT_TRUE(first.WaitForLine("rank 1 has another").has_value()) << first.output() << second.output();
  EXPECT_EQ(first.WaitForExit(), 65) << "starting again would not help";
  EXPECT_EQ(first.output().find("waits for the coordinator"), std::string::npos);
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
  EXPECT_THAT(output({"--max-prefill-tokens", "10"}), HasSubstr("--max-prefill-tokens must be"));
  EXPECT_THAT(output({"--listen", "nonsense"}), HasSubstr("--listen must be"));
  EXPECT_THAT(output({"--inject-defect", "nonsense"}), HasSubstr("--inject-defect"));
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
