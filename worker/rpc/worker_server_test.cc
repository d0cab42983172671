#include "worker/rpc/worker_server.h"

#include <grpcpp/grpcpp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <future>
#include <map>

#include "absl/synchronization/mutex.h"
#include "dflash/worker/v1/worker.grpc.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::HasSubstr;
namespace wire = ::dflash::worker::v1;

// An engine whose requests do what the test says.
class ScriptedEngine : public GenerationBackend {
 public:
  void Submit(GenerationRequest request, std::unique_ptr<RequestSink> sink) override {
    absl::MutexLock lock(&mutex_);
    const std::string id = request.id;
    sinks_[id] = std::move(sink);
    requests_[id] = std::move(request);
  }
  void Cancel(const std::string& id, absl::Status reason) override {
    std::unique_ptr<RequestSink> sink = TakeSink(id);
    if (sink != nullptr) sink->OnFailed(reason);
  }
  EngineGauges Gauges() const override {
    return {.running = 1, .waiting = 0, .state_slots = 2, .pages_total = 10, .pages_free = 4};
  }
  // Waits for a request and returns it.
  GenerationRequest WaitFor(const std::string& id) {
    absl::MutexLock lock(&mutex_);
    const auto arrived = [&] { return requests_.count(id) != 0; };
    mutex_.Await(absl::Condition(&arrived));
    return requests_[id];
  }
  std::unique_ptr<RequestSink> TakeSink(const std::string& id) {
    absl::MutexLock lock(&mutex_);
    const auto it = sinks_.find(id);
    if (it == sinks_.end()) return nullptr;
    std::unique_ptr<RequestSink> sink = std::move(it->second);
    sinks_.erase(it);
    return sink;
  }

 private:
  absl::Mutex mutex_;
  std::map<std::string, GenerationRequest> requests_;
  std::map<std::string, std::unique_ptr<RequestSink>> sinks_;
};

class WorkerServerTest : public ::testing::Test {
 protected:
  void Start(absl::Duration silence_limit = absl::Seconds(60)) {
    path_ = testing::TempDir() + "/worker_server_test." + std::to_string(getpid());
    WorkerServer::Options options;
    options.listen = "unix:" + path_;
    options.identity.build = "build-1";
    options.identity.max_sequences = 2;
    options.identity.eos_token_ids = {4090, 4088};
    options.silence_limit = silence_limit;
    options.heartbeat_period = absl::Milliseconds(20);
    options.metrics_period = absl::Milliseconds(20);
    auto server = WorkerServer::Start(options, &engine_, &metrics_,
                                      [this](absl::Status status) { end_.set_value(std::move(status)); });
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    stub_ = wire::WorkerService::NewStub(
        grpc::CreateChannel("unix:" + path_, grpc::InsecureChannelCredentials()));
  }

  void Open() { stream_ = stub_->Serve(&context_); }

  // The next message that is none of the periodic ones.
  wire::ServeResponse Next() {
    wire::ServeResponse message;
    while (stream_->Read(&message)) {
      if (!message.has_heartbeat() && !message.has_metrics()) return message;
    }
    ADD_FAILURE() << "the stream ended";
    return message;
  }

  void Submit(const std::string& id) {
    wire::ServeRequest message;
    message.mutable_submit()->set_id(id);
    message.mutable_submit()->add_prompt_tokens(17);
    message.mutable_submit()->set_temperature(0.5);
    message.mutable_submit()->set_seed(0xfedcba9876543210);
    message.mutable_submit()->set_max_tokens(5);
    message.mutable_submit()->add_stop_strings("END");
    message.mutable_submit()->set_speculate(true);
    message.mutable_submit()->set_deadline_microseconds(3600'000'000);
    ASSERT_TRUE(stream_->Write(message));
  }

  std::string path_;
  ScriptedEngine engine_;
  EngineMetrics metrics_{
      EngineMetrics::Options{.backend = "cpu", .max_drafts = 15, .speculate_by_default = true, .config = {}}};
  std::promise<absl::Status> end_;
  std::unique_ptr<WorkerServer> server_;
  std::unique_ptr<wire::WorkerService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<wire::ServeRequest, wire::ServeResponse>> stream_;
};

TEST_F(WorkerServerTest, SocketIsPrivate) {
  Start();
  struct stat info;
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST_F(WorkerServerTest, TellsWhatItIsToItsOwnBuildOnly) {
  Start();
  wire::GetGroupInfoRequest request;
  wire::GetGroupInfoResponse response;
  {
    grpc::ClientContext context;
    request.set_build("build-2");
    const grpc::Status status = stub_->GetGroupInfo(&context, request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_THAT(status.error_message(), HasSubstr("build-1"));
  }
  grpc::ClientContext context;
  request.set_build("build-1");
  ASSERT_TRUE(stub_->GetGroupInfo(&context, request, &response).ok());
  EXPECT_EQ(response.pid(), getpid());
  EXPECT_EQ(response.max_sequences(), 2u);
  EXPECT_THAT(response.eos_token_ids(), ::testing::ElementsAre(4090, 4088));
  double pages = 0;
  for (const wire::MetricFamily& family : response.metrics().families()) {
    if (family.name() != metrics::kCacheBlocks.name) continue;
    for (const wire::MetricSample& sample : family.samples()) {
      for (const wire::MetricLabel& label : sample.labels())
        pages += label.value() == "kv" ? sample.value() : 0;
    }
  }
  EXPECT_EQ(pages, 10) << "the pools are known before the first snapshot";
}

TEST_F(WorkerServerTest, CarriesARequestThrough) {
  Start();
  Open();
  EXPECT_EQ(Next().credits().granted_total(), 2u);
  Submit("a");
  const GenerationRequest request = engine_.WaitFor("a");
  EXPECT_THAT(request.prompt_tokens, ::testing::ElementsAre(17));
  EXPECT_EQ(request.sampling.temperature, 0.5f);
  EXPECT_EQ(request.sampling.seed, 0xfedcba9876543210u);
  EXPECT_EQ(request.max_tokens, 5);
  EXPECT_THAT(request.stop_strings, ::testing::ElementsAre("END"));
  EXPECT_EQ(request.speculation, SpeculationMode::kDFlash);
  EXPECT_GT(request.deadline, absl::Now() + absl::Minutes(59));
  EXPECT_LT(request.deadline, absl::Now() + absl::Minutes(61));

  auto sink = engine_.TakeSink("a");
  sink->OnStarted({.prompt_tokens = 1, .cached_tokens = 0});
  sink->OnTokens({.tokens = {5, 6}, .text = "\xff", .rounds = {{15, 1}}});
  FinishedReport finished;
  finished.reason = FinishReason::kStopString;
  finished.matched_stop_string = "END";
  finished.accepted_per_position = {1, 0};
  finished.draft_time = absl::Milliseconds(250);
  sink->OnFinished(finished);
  sink.reset();

  EXPECT_EQ(Next().started().prompt_tokens(), 1);
  const wire::ServeResponse tokens = Next();
  EXPECT_EQ(tokens.tokens().id(), "a");
  EXPECT_THAT(tokens.tokens().token_ids(), ::testing::ElementsAre(5, 6));
  EXPECT_EQ(tokens.tokens().text(), "\xff");
  EXPECT_EQ(tokens.tokens().rounds(0).accepted(), 1);
  const wire::ServeResponse end = Next();
  EXPECT_EQ(end.finished().reason(), wire::FINISH_REASON_STOP_STRING);
  EXPECT_EQ(end.finished().matched_stop_string(), "END");
  EXPECT_EQ(end.finished().draft_seconds(), .25);
  EXPECT_EQ(Next().credits().granted_total(), 3u);
}

TEST_F(WorkerServerTest, CancelReachesTheEngine) {
  Start();
  Open();
  Next();
  Submit("a");
  engine_.WaitFor("a");
  wire::ServeRequest message;
  message.mutable_cancel()->set_id("a");
  message.mutable_cancel()->set_code(static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  message.mutable_cancel()->set_message("too late");
  ASSERT_TRUE(stream_->Write(message));
  const wire::ServeResponse failed = Next();
  EXPECT_EQ(failed.failed().id(), "a");
  EXPECT_EQ(failed.failed().code(), static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(failed.failed().message(), "too late");
  EXPECT_EQ(Next().credits().granted_total(), 3u);
}

TEST_F(WorkerServerTest, SendsHeartbeatsAndMetrics) {
  Start();
  Open();
  uint64_t heartbeats = 0;
  wire::MetricsSnapshot snapshot;
  wire::ServeResponse message;
  while (heartbeats == 0 || snapshot.families_size() == 0) {
    ASSERT_TRUE(stream_->Read(&message));
    if (message.has_heartbeat()) heartbeats = message.heartbeat().seq();
    if (message.has_metrics()) snapshot = message.metrics();
  }
  bool found = false;
  for (const auto& family : snapshot.families()) {
    if (family.name() == metrics::kCacheUsage.name) {
      double sum = 0;
      for (const wire::MetricSample& sample : family.samples()) sum += sample.value();
      EXPECT_EQ(sum, .6 + .5) << "pages and slots; no checkpoints";
    }
    if (family.name() != metrics::kSpecAcceptedPerStep.name) continue;
    found = true;
    EXPECT_EQ(family.samples(0).histogram().cumulative_counts_size(), 18) << "17 bounds and +Inf";
  }
  EXPECT_TRUE(found);
}

TEST_F(WorkerServerTest, ServesOneStream) {
  Start();
  Open();
  Next();
  grpc::ClientContext context;
  auto second = stub_->Serve(&context);
  wire::ServeResponse message;
  EXPECT_FALSE(second->Read(&message));
  EXPECT_EQ(second->Finish().error_code(), grpc::StatusCode::FAILED_PRECONDITION);
}

TEST_F(WorkerServerTest, ShutdownIsAGoodEnd) {
  Start();
  Open();
  Next();
  wire::ServeRequest message;
  message.mutable_shutdown();
  ASSERT_TRUE(stream_->Write(message));
  EXPECT_TRUE(end_.get_future().get().ok());
  wire::ServeResponse response;
  while (stream_->Read(&response)) {
  }
  EXPECT_TRUE(stream_->Finish().ok());
}

TEST_F(WorkerServerTest, ABrokenStreamIsALostCoordinator) {
  Start();
  Open();
  Next();
  Submit("a");
  engine_.WaitFor("a");
  context_.TryCancel();
  EXPECT_EQ(end_.get_future().get().code(), absl::StatusCode::kUnavailable);
  engine_.Cancel("a", absl::CancelledError("late"));  // reports into the void
}

TEST_F(WorkerServerTest, SilenceIsALostCoordinator) {
  Start(/*silence_limit=*/absl::Milliseconds(50));
  Open();
  const absl::Status end = end_.get_future().get();
  EXPECT_EQ(end.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(end.message()), HasSubstr("nothing heard"));
}

TEST_F(WorkerServerTest, NamesAnAddressThatItCannotListenOn) {
  WorkerServer::Options options;
  options.listen = "unix:/nonexistent/directory/socket";
  auto server = WorkerServer::Start(options, &engine_, &metrics_, [](absl::Status) {});
  EXPECT_EQ(server.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(server.status().message()), HasSubstr("/nonexistent/directory/socket"));
}

}  // namespace
}  // namespace dflash
