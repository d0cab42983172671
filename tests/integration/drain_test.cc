// How a server goes: probes say no, nothing new is taken, what runs finishes; and what operators may change.
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <thread>

#include "gmock/gmock.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "gtest/gtest.h"
#include "tests/integration/server.h"

namespace dflash::integration {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Health = grpc::health::v1::HealthCheckResponse;

// Long enough to be still running a few calls later, and to end by itself.
v1::GenerateRequest LongRequest() {
  v1::GenerateRequest request = EndlessRequest();
  request.mutable_stopping()->set_max_tokens(1500);
  return request;
}

// What grpc.health.v1 pushes about a service.
class Watch {
 public:
  Watch(Server& server, const std::string& service)
      : stub_(grpc::health::v1::Health::NewStub(server.channel())) {
    grpc::health::v1::HealthCheckRequest request;
    request.set_service(service);
    context_.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
    reader_ = stub_->Watch(&context_, request);
  }
  ~Watch() {
    context_.TryCancel();
    Health response;
    while (reader_->Read(&response)) {
    }
    (void)reader_->Finish();
  }
  // The next state; UNKNOWN when the stream ends.
  Health::ServingStatus Next() {
    Health response;
    return reader_->Read(&response) ? response.status() : Health::UNKNOWN;
  }

 private:
  std::unique_ptr<grpc::health::v1::Health::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<Health>> reader_;
};

TEST(DrainTest, TermLetsRunningRequestsFinish) {
  Server server;
  ASSERT_NE(server.channel(), nullptr);
  const std::vector<uint32_t> expected = server.GenerateOk(LongRequest()).token_ids;
  Watch watch(server, "dflash.v1.InferenceService");
  ASSERT_EQ(watch.Next(), Health::SERVING);
  std::vector<uint32_t> tokens;
  grpc::Status status;
  std::thread client([&] {
    ctl::Generation generation;
    status = Generate(server.channel(), LongRequest(), kPatience, &generation);
    tokens = generation.token_ids;
  });
  ASSERT_TRUE(server.WaitUntilRunning(1));
  server.process().Signal(SIGTERM);
  EXPECT_EQ(watch.Next(), Health::NOT_SERVING) << "pushed, not asked for";
  ctl::Generation refused;
  // Whoever is told may be quicker than the refusing: what comes in between is served.
  grpc::Status late;
  ASSERT_TRUE(PollUntil([&] {
    late = Generate(server.channel(), ShortRequest(), kPatience, &refused);
    return !late.ok();
  }));
  EXPECT_EQ(late.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(ctl::Describe(late), HasSubstr("DRAINING, retry in 0"));
  EXPECT_EQ(HttpGet(server.ops_address(), "/readyz"), "");
  EXPECT_EQ(HttpGet(server.ops_address(), "/livez"), "ok\n");
  EXPECT_EQ(HttpGet(server.ops_address(), "/startupz"), "ok\n");
  EXPECT_THAT(server.Metrics(), HasSubstr("dflashd_draining{"));
  client.join();
  EXPECT_TRUE(status.ok()) << ctl::Describe(status);
  EXPECT_EQ(tokens, expected) << "to the last token, as if nothing were";
  EXPECT_EQ(server.process().WaitForExit(), 0);
}

TEST(HealthTest, AWatchSeesTheLossOfTheGroupAndItsReturn) {
  Server server({"--max-restart-delay", "1"});
  ASSERT_NE(server.channel(), nullptr);
  Watch watch(server, "dflash.v1.InferenceService"), process(server, "");
  ASSERT_EQ(watch.Next(), Health::SERVING);
  ASSERT_EQ(process.Next(), Health::SERVING);
  for (int loss = 0; loss < 2; ++loss) {
    const int pid = server.Load().groups(0).leader_pid();
    ASSERT_GT(pid, 1);
    ASSERT_EQ(kill(pid, SIGKILL), 0);
    EXPECT_EQ(watch.Next(), Health::NOT_SERVING);
    EXPECT_EQ(watch.Next(), Health::SERVING);
    EXPECT_NE(server.Load().groups(0).leader_pid(), pid);
    EXPECT_EQ(server.GenerateOk(ShortRequest()).token_ids.size(), 4u);
  }
  server.process().Signal(SIGTERM);
  EXPECT_EQ(watch.Next(), Health::NOT_SERVING);
  EXPECT_EQ(server.process().WaitForExit(), 0);
  EXPECT_EQ(process.Next(), Health::UNKNOWN) << "the process was there to its end";
}

TEST(DrainTest, OperatorsCallsAtTheClientsPortSayWhereTheyGo) {
  Server server;
  ASSERT_NE(server.channel(), nullptr);
  const Ran ran = RunProgram({DflashctlPath(), "log-level", "debug", "--address", server.address()});
  EXPECT_EQ(ran.exit_code, ctl::kServerError);
  EXPECT_THAT(ran.output, AllOf(HasSubstr("nobody at " + server.address()), HasSubstr("--admin-listen")));
}

TEST(DrainTest, NobodyCallsAProcessBackThatGoes) {
  Server server({"--drain-grace-seconds", "600"});
  ASSERT_NE(server.channel(), nullptr);
  server.process().Signal(SIGTERM);
  ASSERT_TRUE(PollUntil([&] { return !server.Load().serving(); }));
  const Ran resumed = RunProgram({DflashctlPath(), "resume", "--address", server.admin_address()});
  EXPECT_EQ(resumed.exit_code, ctl::kServerError);
  EXPECT_THAT(resumed.output, HasSubstr("the process is ending"));
  EXPECT_FALSE(server.Load().serving());
  server.process().Signal(SIGTERM);
  EXPECT_EQ(server.process().WaitForExit(), 0);
}

TEST(DrainTest, WhatDoesNotFinishInTimeIsEnded) {
  Server server({"--drain-seconds", "0.2"});
  ASSERT_NE(server.channel(), nullptr);
  OpenStream stream(server.stub(), EndlessRequest());
  ASSERT_TRUE(stream.ReadFirstTokens());
  server.process().Signal(SIGTERM);
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(ctl::Describe(status), HasSubstr("DRAINING"));
  EXPECT_EQ(server.process().WaitForExit(), 0);
}

TEST(DrainTest, DuringTheGraceRequestsAreStillTaken) {
  Server server({"--drain-grace-seconds", "600"});
  ASSERT_NE(server.channel(), nullptr);
  server.process().Signal(SIGTERM);
  ASSERT_TRUE(PollUntil([&] { return !server.Load().serving(); }));
  EXPECT_EQ(HttpGet(server.ops_address(), "/readyz"), "");
  EXPECT_EQ(server.GenerateOk(ShortRequest()).token_ids.size(), 4u);
  server.process().Signal(SIGTERM);
  EXPECT_EQ(server.process().WaitForExit(), 0);
}

class AdminTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = new Server(); }
  static void TearDownTestSuite() {
    delete server_;
    server_ = nullptr;
  }
  void SetUp() override { ASSERT_NE(server_->channel(), nullptr); }
  // dflashctl COMMAND --address ADMIN ...
  static Ran Admin(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), DflashctlPath());
    arguments.insert(arguments.end(), {"--address", server_->admin_address()});
    return RunProgram(arguments);
  }
  static Server* server_;
};
Server* AdminTest::server_ = nullptr;

TEST_F(AdminTest, DrainAndResume) {
  OpenStream stream(server_->stub(), EndlessRequest());
  ASSERT_TRUE(stream.ReadFirstTokens());
  const Ran drained = Admin({"drain", "--timeout", "0.1"});
  EXPECT_EQ(drained.exit_code, ctl::kSuccess) << drained.output;
  EXPECT_THAT(drained.output, HasSubstr("1 running, 0 waiting, 0 ended\n"));
  EXPECT_THAT(drained.output, HasSubstr("0 running, 0 waiting, 1 ended, done\n"));
  EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_FALSE(server_->Load().serving());
  EXPECT_EQ(Admin({"resume"}).exit_code, ctl::kSuccess);
  EXPECT_TRUE(server_->Load().serving());
  EXPECT_EQ(server_->GenerateOk(ShortRequest()).token_ids.size(), 4u);
  EXPECT_TRUE(
      server_->process().WaitForLine("admin: Drain, timeout 100ms by ipv4:127.0.0.1 from ").has_value());
  EXPECT_TRUE(server_->process().WaitForLine("admin: Resume by ").has_value());
}

TEST_F(AdminTest, SpeculationOfNewRequests) {
  const auto drafted = [&](v1::SpeculationMode mode) {
    v1::GenerateRequest request = ChatRequest("Count from 19 by 9, 11 numbers in all.");
    request.mutable_speculation()->set_mode(mode);
    const ctl::Generation generation = server_->GenerateOk(request);
    int64_t most = 0;
    for (const v1::StepInfo& round : generation.rounds) most = std::max<int64_t>(most, round.drafted());
    EXPECT_EQ(generation.token_ids.size(), 46u);
    return most;
  };
  EXPECT_EQ(Admin({"speculation"}).output, "mode server, at most all drafts a round, revision 1\n");
  EXPECT_EQ(drafted(v1::SPECULATION_MODE_UNSPECIFIED), 15);
  EXPECT_EQ(Admin({"speculation", "--mode", "off"}).output,
            "mode off, at most all drafts a round, revision 2\n");
  EXPECT_EQ(drafted(v1::SPECULATION_MODE_UNSPECIFIED), 0);
  EXPECT_EQ(server_->ModelInfo().default_speculation(), v1::SPECULATION_MODE_OFF);
  EXPECT_EQ(drafted(v1::SPECULATION_MODE_DFLASH), 15) << "it chose";
  EXPECT_EQ(Admin({"speculation", "--mode", "off", "--for-all"}).exit_code, ctl::kSuccess);
  EXPECT_EQ(drafted(v1::SPECULATION_MODE_DFLASH), 0);
  EXPECT_EQ(Admin({"speculation", "--mode", "server", "--max-draft-tokens", "3"}).exit_code, ctl::kSuccess);
  EXPECT_EQ(drafted(v1::SPECULATION_MODE_UNSPECIFIED), 3);
  EXPECT_EQ(Admin({"speculation", "--max-draft-tokens", "0"}).output,
            "mode server, at most all drafts a round, revision 5\n");
  EXPECT_TRUE(server_->process().WaitForLine("admin: SetSpeculation SPECULATION_MODE_OFF").has_value());
}

TEST_F(AdminTest, LogLevel) {
  EXPECT_EQ(Admin({"log-level", "error"}).exit_code, ctl::kSuccess);
  EXPECT_TRUE(server_->process().WaitForLine("admin: SetLogLevel LOG_LEVEL_ERROR by ").has_value());
  EXPECT_EQ(Admin({"log-level", "loud"}).exit_code, ctl::kServerError);
  EXPECT_EQ(Admin({"log-level", "info"}).exit_code, ctl::kSuccess);
  EXPECT_TRUE(server_->process().WaitForLine("admin: SetLogLevel LOG_LEVEL_INFO by ").has_value())
      << "written though the level was error";
}

TEST(AdminSocketTest, DrainWithExitEndsTheProcess) {
  const std::string socket = ::testing::TempDir() + "drain_test." + std::to_string(getpid()) + ".sock";
  std::vector<std::string> command = ServerCommand();
  const auto admin = std::find(command.begin(), command.end(), "--admin-listen");
  ASSERT_LT(admin + 1, command.end());
  *(admin + 1) = "unix:" + socket;
  Process server(command);
  ASSERT_TRUE(server.WaitForLine("admin on unix:" + socket).has_value()) << server.output();
  const Ran ran = RunProgram({DflashctlPath(), "drain", "--exit", "--address", "unix:" + socket});
  EXPECT_THAT(ran.output, HasSubstr("0 running, 0 waiting"));
  EXPECT_EQ(server.WaitForExit(), 0);
}

}  // namespace
}  // namespace dflash::integration
