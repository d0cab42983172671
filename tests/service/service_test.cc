// Slow clients, silent workers, and the whole list of metrics.
#include <atomic>
#include <future>
#include <regex>
#include <set>

#include "base/status.h"
#include "dflash/worker/v1/worker.grpc.pb.h"
#include "gmock/gmock.h"
#include "google/protobuf/stubs/logging.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "tests/service/scripted_service.h"

namespace dflash {
namespace {

using ::testing::HasSubstr;

std::string ReasonOf(const grpc::Status& status) {
  google::rpc::Status details;
  google::rpc::ErrorInfo info;
  if (!details.ParseFromString(status.error_details()) || details.details_size() == 0 ||
      !details.details(0).UnpackTo(&info)) {
    return "";
  }
  return info.reason();
}

v1::GenerateRequest TokenRequest(uint32_t max_tokens) {
  v1::GenerateRequest request;
  request.mutable_tokens()->add_ids(1);
  request.mutable_stopping()->set_max_tokens(max_tokens);
  request.mutable_output()->set_text(true);
  return request;
}

// A client that reads only when told to.
struct Stream {
  Stream(ScriptedService& service, const v1::GenerateRequest& request)
      : reader(service.stub().Generate(&context, request)) {}
  ~Stream() {
    if (reader == nullptr) return;
    context.TryCancel();
    End();
  }

  // Reads all that comes, checks what must hold for any stream, and returns how it ends.
  grpc::Status End() {
    v1::GenerateResponse message;
    while (reader->Read(&message)) {
      EXPECT_EQ(message.seq(), messages++);
      if (message.has_chunk()) {
        const v1::Chunk& chunk = message.chunk();
        EXPECT_EQ(chunk.first_token_offset(), tokens.size());
        tokens.insert(tokens.end(), chunk.token_ids().begin(), chunk.token_ids().end());
        text += chunk.text();
        steps.insert(steps.end(), chunk.steps().begin(), chunk.steps().end());
        ++chunks;
      }
      finished |= message.has_finished();
    }
    grpc::Status status = reader->Finish();
    reader = nullptr;
    return status;
  }

  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> reader;
  uint64_t messages = 0;
  int chunks = 0;
  std::vector<uint32_t> tokens;
  std::string text;
  std::vector<v1::StepInfo> steps;
  bool finished = false;
};

// One step with 4 tokens out of a round, and as much text as asked for.
TokensReport Step(size_t text_bytes) {
  return {.tokens = {7, 8, 9, 10}, .text = std::string(text_bytes, 'x'), .rounds = {{15, 3}}};
}

TEST(SlowClient, GetsEverythingInFewerChunks) {
  ScriptedService service({.max_unsent_bytes = 64 << 20});
  Stream stream(service, TokenRequest(100'000));
  const std::string id = service.engine().Await(1);
  service.engine().Start(id);
  constexpr int kSteps = 500;
  constexpr size_t kBytes = 4000;  // 2 MB in all: far more than the connection takes unread
  for (int i = 0; i < kSteps; ++i) service.engine().Emit(id, Step(kBytes));
  FinishedReport finished;
  finished.completion_tokens = 4 * kSteps;
  service.engine().Finish(id, finished);
  service.AwaitSnapshot();  // sent behind all that

  const grpc::Status status = stream.End();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(stream.finished);
  EXPECT_EQ(stream.tokens.size(), 4u * kSteps);
  EXPECT_EQ(stream.text.size(), kSteps * kBytes);
  ASSERT_EQ(stream.steps.size(), static_cast<size_t>(kSteps)) << "one entry for every round";
  for (size_t i = 0; i < stream.steps.size(); ++i) {
    EXPECT_EQ(stream.steps[i].first_token_offset(), 4 * i);
    EXPECT_EQ(stream.steps[i].token_count(), 4u);
  }
  EXPECT_LT(stream.chunks, kSteps / 2) << "nothing was merged";
}

TEST(SlowClient, IsCutOffWhenTooMuchWaits) {
  ScriptedService service({.max_unsent_bytes = 100'000});
  Stream stream(service, TokenRequest(100'000));
  const std::string id = service.engine().Await(1);
  service.engine().Start(id);
  while (service.engine().Emit(id, Step(4000))) {
  }
  const absl::Status reason = service.engine().AwaitCancel(id);
  EXPECT_EQ(reason.code(), absl::StatusCode::kResourceExhausted);
  // Its place is free at once, though it has not read a byte.
  Stream next(service, TokenRequest(10));
  Stream third(service, TokenRequest(10));
  service.engine().Await(3);
  // When it reads at last, it learns why.
  const grpc::Status status = stream.End();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_EQ(ReasonOf(status), "SLOW_CONSUMER");
  EXPECT_FALSE(stream.finished);
}

TEST(SlowClient, IsCutOffWhenItTakesNothingForTooLong) {
  ScriptedService service({.max_unsent_bytes = 64 << 20, .stall_limit = absl::Seconds(100)});
  Stream stream(service, TokenRequest(100'000));
  const std::string id = service.engine().Await(1);
  service.engine().Start(id);
  for (int i = 0; i < 500; ++i) service.engine().Emit(id, Step(4000));
  service.AwaitSnapshot();
  service.service().Tick(absl::Now() + absl::Seconds(50));
  EXPECT_TRUE(service.engine().Emit(id, Step(1)));
  service.service().Tick(absl::Now() + absl::Seconds(101));
  EXPECT_EQ(service.engine().AwaitCancel(id).code(), absl::StatusCode::kResourceExhausted);
  // Still not reading: the call itself is taken away.
  service.service().Tick(absl::Now() + absl::Seconds(202));
  const grpc::Status status = stream.End();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(status.error_message(), "the client reads too slowly: it took nothing for 1m40s");
}

TEST(SlowClient, AFinishedOutputThatNobodyReadsIsLetGo) {
  ScriptedService service({.max_unsent_bytes = 64 << 20, .stall_limit = absl::Seconds(100)});
  Stream stream(service, TokenRequest(100'000));
  const std::string id = service.engine().Await(1);
  service.engine().Start(id);
  for (int i = 0; i < 500; ++i) service.engine().Emit(id, Step(4000));
  service.engine().Finish(id, {});
  service.AwaitSnapshot();
  service.service().Tick(absl::Now() + absl::Seconds(101));
  EXPECT_EQ(stream.End().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_FALSE(stream.finished);
}

TEST(Service, CancellationAndDeadlineReachTheEngine) {
  ScriptedService service({});
  Stream cancelled(service, TokenRequest(10));
  const std::string first = service.engine().Await(1);
  cancelled.context.TryCancel();
  EXPECT_EQ(service.engine().AwaitCancel(first).code(), absl::StatusCode::kCancelled);

  v1::GenerateRequest request = TokenRequest(10);
  request.set_request_id("by-id");
  Stream by_id(service, request);
  const std::string second = service.engine().Await(2);
  grpc::ClientContext context;
  v1::CancelRequest cancel;
  v1::CancelResponse response;
  cancel.set_request_id("by-id");
  ASSERT_TRUE(service.stub().Cancel(&context, cancel, &response).ok());
  EXPECT_TRUE(response.found());
  EXPECT_EQ(service.engine().AwaitCancel(second).code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(by_id.End().error_code(), grpc::StatusCode::CANCELLED);

  grpc::ClientContext short_context;
  short_context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(1)));
  auto reader = service.stub().Generate(&short_context, TokenRequest(10));
  const std::string third = service.engine().Await(3);
  EXPECT_LE(service.engine().request(third).deadline, absl::Now() + absl::Seconds(2));
  EXPECT_EQ(service.engine().AwaitCancel(third).code(), absl::StatusCode::kDeadlineExceeded);
  v1::GenerateResponse message;
  EXPECT_FALSE(reader->Read(&message));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
}

TEST(Service, AnErrorOfOneRequestReachesItsClientOnly) {
  ScriptedService service({});
  Stream bad(service, TokenRequest(10));
  const std::string id = service.engine().Await(1);
  Stream good(service, TokenRequest(10));
  const std::string other = service.engine().Await(2);
  service.engine().Cancel(id, absl::InternalError("not a number"));
  const grpc::Status status = bad.End();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_THAT(status.error_message(), HasSubstr("not a number"));
  service.engine().Start(other);
  service.engine().Finish(other, {});
  EXPECT_TRUE(good.End().ok());
}

TEST(Service, TheWorkersReasonReachesTheClient) {
  ScriptedService service({});
  Stream stream(service, TokenRequest(10));
  const std::string id = service.engine().Await(1);
  service.engine().Cancel(id, WithReason(absl::InternalError("not a number"), "NUMERIC_FAULT"));
  const grpc::Status status = stream.End();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(ReasonOf(status), "NUMERIC_FAULT");
}

// Refused before gRPC hands a message over, yet answered by us and counted.
TEST(Service, WhatDoesNotParseIsAnsweredAndCounted) {
  google::protobuf::SetLogHandler(nullptr);  // of the client
  ScriptedService service({});
  v1::GenerateRequest request;
  request.set_text("a\xff");
  Stream stream(service, request);
  const grpc::Status status = stream.End();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(ReasonOf(status), "BAD_PARAMETER");
  EXPECT_EQ(status.error_message(), "text: is not valid UTF-8");

  v1::CancelRequest cancel;
  cancel.GetReflection()->MutableUnknownFields(&cancel)->AddVarint(77, 1);
  grpc::ClientContext context;
  v1::CancelResponse response;
  EXPECT_EQ(service.stub().Cancel(&context, cancel, &response).error_code(), grpc::StatusCode::UNIMPLEMENTED);

  const std::string page = service.exporter().Text();
  EXPECT_THAT(page,
              HasSubstr("dflashd_requests_total{api=\"grpc\",outcome=\"rejected\",model=\"tiny\"} 1\n"));
  EXPECT_THAT(page, HasSubstr("method=\"Generate\",service=\"dflash.v1.InferenceService\""));
  EXPECT_THAT(page, HasSubstr("code=\"UNIMPLEMENTED\",method=\"Cancel\""));
}

// The series of the table are those of the page, both ways.
TEST(Service, ExportsExactlyWhatTheTableLists) {
  ScriptedService service({});
  Stream stream(service, TokenRequest(10));
  const std::string id = service.engine().Await(1);
  service.engine().Start(id);
  service.engine().Emit(id, Step(3));
  service.engine().Finish(id, {});
  ASSERT_TRUE(stream.End().ok());
  service.AwaitSnapshot();

  std::set<std::string> exported;
  const std::string page = service.exporter().Text();
  static const std::regex kType("# TYPE (\\S+) (\\S+)\n");
  for (std::sregex_iterator it(page.begin(), page.end(), kType), end; it != end; ++it) {
    const std::string name = (*it)[1];
    exported.insert(name);
    const MetricInfo* info = metrics::Find(name);
    ASSERT_NE(info, nullptr) << name << " is not in base/metric_names.h";
    const std::string type = info->type == MetricType::kCounter ? "counter"
                             : info->type == MetricType::kGauge ? "gauge"
                                                                : "histogram";
    EXPECT_EQ((*it)[2], type) << name;
  }
  // What the programs themselves know, dflashd at a scrape; tests/deploy sees them.
  const std::set<std::string_view> of_the_program = {metrics::kRequestsRunning.name,
                                                     metrics::kRequestsWaiting.name,
                                                     metrics::kWaitingPromptTokens.name,
                                                     metrics::kQueueLimit.name,
                                                     metrics::kOldestWaitingSeconds.name,
                                                     metrics::kReady.name,
                                                     metrics::kDraining.name,
                                                     metrics::kWorkerUp.name,
                                                     metrics::kWorkerHeartbeatAge.name,
                                                     metrics::kGroupState.name,
                                                     metrics::kGroupEpoch.name,
                                                     metrics::kGroupReforms.name,
                                                     metrics::kBuildInfo.name,
                                                     metrics::kMemoryBytes.name,
                                                     metrics::kCertificateExpiry.name,
                                                     metrics::kTraceSpans.name};
  for (const MetricInfo* info : metrics::kAll) {
    EXPECT_EQ(exported.count(std::string(info->name)) + of_the_program.count(info->name), 1u) << info->name;
  }
  EXPECT_THAT(page, HasSubstr("dflashd_requests_total{api=\"grpc\",outcome=\"length\",model=\"tiny\"} 1\n"));
  EXPECT_THAT(page, HasSubstr("dflashd_generated_tokens_total{model=\"tiny\"} 4\n"));
}

// A leader that answers what it is and then says nothing more.
class MuteWorker final : public worker::v1::WorkerService::Service {
 public:
  grpc::Status GetGroupInfo(grpc::ServerContext*, const worker::v1::GetGroupInfoRequest* request,
                            worker::v1::GetGroupInfoResponse* response) override {
    response->set_build(request->build());
    response->set_vocabulary_size(10);
    response->set_max_context_tokens(10);
    response->set_max_sequences(1);
    response->mutable_metrics()->add_families()->set_name(std::string(metrics::kCacheBlocks.name));
    return grpc::Status::OK;
  }
  grpc::Status Serve(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<worker::v1::ServeResponse, worker::v1::ServeRequest>* stream) override {
    worker::v1::ServeRequest message;
    while (!leaves && stream->Read(&message)) heartbeats += message.has_heartbeat();
    return context->IsCancelled() ? grpc::Status::CANCELLED : grpc::Status::OK;
  }
  std::atomic<int> heartbeats = 0;
  std::atomic<bool> leaves = false;  // ends its stream at once
};

// Hears of the group's loss.
class LossListener final : public GroupEvents {
 public:
  void OnReady(Group*, const GroupInfo&) override {
    ready = true;
    on_ready();
  }
  void OnCredits(Group*, uint64_t) override {}
  void OnStarted(Group*, const std::string&, const StartedOutput&) override {}
  void OnTokens(Group*, const std::string&, StepOutput) override {}
  void OnFinished(Group*, const std::string&, const FinishedOutput&) override {}
  void OnFailed(Group*, const std::string&, const absl::Status&) override {}
  void OnLost(Group*, const std::string& why) override { lost.set_value(why); }
  std::atomic<bool> ready = false;
  std::function<void()> on_ready = [] {};
  std::promise<std::string> lost;
};

TEST(GroupClient, ASilentWorkerIsLost) {
  MuteWorker mute;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&mute);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  LossListener events;
  std::atomic<bool> silence = false;
  std::atomic<int> snapshots_when_ready = -1, snapshots = 0;
  events.on_ready = [&] { snapshots_when_ready = snapshots.load(); };
  GroupClient client({.name = "0",
                      .address = "127.0.0.1:" + std::to_string(port),
                      .build = "b",
                      .heartbeat_period = absl::Milliseconds(20),
                      .silence_limit = absl::Milliseconds(200),
                      .on_silence = [&] { silence = true; }},
                     &events, [&](std::vector<prometheus::MetricFamily>) { ++snapshots; });
  client.Start();
  EXPECT_THAT(events.lost.get_future().get(), HasSubstr("said nothing for 200ms"));
  EXPECT_EQ(snapshots_when_ready, 1) << "the first metrics come with the group itself";
  EXPECT_TRUE(events.ready);
  EXPECT_TRUE(silence);
  EXPECT_GT(mute.heartbeats, 0);
  server->Shutdown();
}

TEST(GroupClient, AStreamThatTheWorkerEndsIsBroken) {
  MuteWorker leaving;
  leaving.leaves = true;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&leaving);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  LossListener events;
  std::atomic<int> silent = 0;
  GroupClient client({.name = "0",
                      .address = "127.0.0.1:" + std::to_string(port),
                      .build = "b",
                      .on_silence = [&] { ++silent; }},
                     &events, [](std::vector<prometheus::MetricFamily>) {});
  client.Start();
  EXPECT_EQ(events.lost.get_future().get(), "the worker ended the stream");
  EXPECT_EQ(silent, 0);
  server->Shutdown();
}

TEST(GroupClient, AWorkerThatNeverComesIsGivenUpOnDemand) {
  LossListener events;
  GroupClient client({.name = "0", .address = "unix:/nonexistent/socket", .build = "b"}, &events,
                     [](std::vector<prometheus::MetricFamily>) {});
  client.Start();
  client.Disconnect("nobody waits for it");
  EXPECT_EQ(events.lost.get_future().get(), "nobody waits for it");
}

}  // namespace
}  // namespace dflash
