// A daemon and its worker as clients see them: answers, concurrency, the ends of requests, health,
// reflection.
#include <csignal>

#include "daemon/traces/testing/trace_collector.h"
#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/integration/golden_prompts.h"
#include "tests/integration/server.h"
#include "tools/dflashctl/commands.h"

namespace dflash::integration {
namespace {

using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class ServingTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = new Server(); }
  static void TearDownTestSuite() {
    delete server_;
    server_ = nullptr;
  }
  void SetUp() override {
    ASSERT_NE(server_->channel(), nullptr);
    ASSERT_TRUE(server_->WaitUntilIdle());
  }
  Server& server() { return *server_; }

 private:
  static Server* server_;
};
Server* ServingTest::server_ = nullptr;

TEST_F(ServingTest, ChatStreamsTheGoldenAnswer) {
  const GoldenText golden = GoldenTexts().front();
  size_t chunks = 0;
  ctl::Generation answer;
  grpc::ClientContext context;
  const grpc::Status status = ctl::ReadGeneration(
      server().stub(), &context, ChatRequest("Count from 19 by 9, 11 numbers in all."),
      [&](const v1::Chunk&) { ++chunks; }, &answer);
  ASSERT_TRUE(status.ok()) << ctl::Describe(status);
  EXPECT_EQ(answer.token_ids, golden.output_ids);
  EXPECT_EQ(answer.text + "<|im_end|>", golden.output_text);
  EXPECT_GE(chunks, 2u);  // it came in pieces
  EXPECT_EQ(answer.started.prompt_tokens(), golden.prompt_ids.size());
  EXPECT_EQ(answer.finished.reason(), v1::FINISH_REASON_EOS);
  EXPECT_EQ(answer.finished.matched_stop_token(), golden.output_ids.back());
  EXPECT_EQ(answer.finished.usage().completion_tokens(), golden.output_ids.size());
  const v1::SpeculationSummary& speculation = answer.finished.speculation();
  EXPECT_EQ(speculation.mode(), v1::SPECULATION_MODE_DFLASH);
  EXPECT_GT(speculation.accepted_tokens(), 0u);
  EXPECT_EQ(speculation.rounds(), answer.rounds.size());
  EXPECT_DOUBLE_EQ(speculation.mean_acceptance_length(),
                   1 + static_cast<double>(speculation.accepted_tokens()) / speculation.rounds());
}

TEST_F(ServingTest, TextAndTokensAndTokenizeAgree) {
  for (const GoldenText& golden : GoldenTexts()) {
    grpc::ClientContext context;
    v1::TokenizeRequest request;
    request.set_text(golden.text);
    v1::TokenizeResponse response;
    const grpc::Status status = server().stub().Tokenize(&context, request, &response);
    ASSERT_TRUE(status.ok()) << ctl::Describe(status);
    EXPECT_EQ(std::vector<uint32_t>(response.token_ids().begin(), response.token_ids().end()),
              golden.prompt_ids);
  }
  v1::GenerateRequest by_text = ShortRequest();
  by_text.set_text(GoldenTexts()[1].text);
  EXPECT_EQ(server().GenerateOk(by_text).token_ids,
            server().GenerateOk(TokenRequest(GoldenTexts()[1].prompt_ids, 4)).token_ids);
}

TEST_F(ServingTest, ConcurrentRequestsGiveTheSameOutputsAsAlone) {
  std::vector<v1::GenerateRequest> requests;
  for (const GoldenText& golden : GoldenTexts()) {
    for (const double temperature : {0.0, 0.8}) {
      v1::GenerateRequest request = TokenRequest(golden.prompt_ids, 24);
      request.mutable_sampling()->set_temperature(static_cast<float>(temperature));
      request.mutable_sampling()->set_seed(requests.size());
      requests.push_back(request);
    }
  }
  const auto run = [&](int64_t concurrency) {
    std::vector<std::vector<uint32_t>> outputs(requests.size());
    const grpc::Status status =
        ctl::RunConcurrently(static_cast<int64_t>(requests.size()), concurrency, [&](int64_t i) {
          ctl::Generation generation;
          const grpc::Status answered =
              Generate(server().channel(), requests[static_cast<size_t>(i)], kPatience, &generation);
          outputs[static_cast<size_t>(i)] = generation.token_ids;
          return answered;
        });
    EXPECT_TRUE(status.ok()) << ctl::Describe(status);
    return outputs;
  };
  const std::vector<std::vector<uint32_t>> alone = run(1);
  EXPECT_EQ(run(8), alone);
  for (const auto& output : alone) EXPECT_FALSE(output.empty());
}

TEST_F(ServingTest, SpeculationDoesNotChangeTheText) {
  const GoldenText golden = GoldenTexts()[16];  // code: most drafts are rejected
  const std::vector<uint32_t> expected(golden.output_ids.begin(), golden.output_ids.begin() + 32);
  for (const v1::SpeculationMode mode : {v1::SPECULATION_MODE_OFF, v1::SPECULATION_MODE_DFLASH}) {
    for (const uint32_t max_drafts : {1u, 7u, 15u}) {
      v1::GenerateRequest request = TokenRequest(golden.prompt_ids, 32);
      request.mutable_speculation()->set_mode(mode);
      request.mutable_speculation()->set_max_draft_tokens(max_drafts);
      const ctl::Generation generation = server().GenerateOk(request);
      EXPECT_EQ(generation.token_ids, expected);
      for (const v1::StepInfo& round : generation.rounds) {
        EXPECT_LE(round.drafted(), mode == v1::SPECULATION_MODE_OFF ? 0 : max_drafts);
      }
    }
  }
}

TEST_F(ServingTest, ADroppedClientFreesItsPlace) {
  {
    OpenStream stream(server().stub(), EndlessRequest());
    ASSERT_TRUE(stream.ReadFirstTokens());
    EXPECT_TRUE(server().WaitUntilRunning(1));
    stream.Cancel();
    EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_TRUE(server().WaitUntilIdle());
  EXPECT_EQ(server().GenerateOk(ShortRequest()).token_ids.size(), 4u);
}

TEST_F(ServingTest, CancelByIdEndsAStream) {
  v1::GenerateRequest request = EndlessRequest();
  request.set_request_id("to-be-cancelled");
  OpenStream stream(server().stub(), request);
  ASSERT_TRUE(stream.ReadFirstTokens());
  // The id is taken while it runs.
  ctl::Generation second;
  EXPECT_EQ(Generate(server().channel(), request, kPatience, &second).error_code(),
            grpc::StatusCode::ALREADY_EXISTS);
  v1::CancelRequest cancel;
  cancel.set_request_id("to-be-cancelled");
  for (const bool found : {true, false}) {
    grpc::ClientContext context;
    v1::CancelResponse response;
    ASSERT_TRUE(server().stub().Cancel(&context, cancel, &response).ok());
    EXPECT_EQ(response.found(), found);
    if (found) {
      EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::CANCELLED);
    }
  }
  EXPECT_TRUE(server().WaitUntilIdle());
}

TEST_F(ServingTest, ADeadlineEndsAStream) {
  ctl::Generation generation;
  const grpc::Status status =
      Generate(server().channel(), EndlessRequest(), absl::Milliseconds(300), &generation);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << ctl::Describe(status);
  EXPECT_TRUE(server().WaitUntilIdle());
  EXPECT_EQ(server().GenerateOk(ShortRequest()).token_ids.size(), 4u);
}

TEST_F(ServingTest, Health) {
  const auto health = grpc::health::v1::Health::NewStub(server().channel());
  for (const char* service : {"", "dflash.v1.InferenceService"}) {
    grpc::ClientContext context;
    grpc::health::v1::HealthCheckRequest request;
    request.set_service(service);
    grpc::health::v1::HealthCheckResponse response;
    ASSERT_TRUE(health->Check(&context, request, &response).ok());
    EXPECT_EQ(response.status(), grpc::health::v1::HealthCheckResponse::SERVING) << service;
  }
  grpc::ClientContext context;
  grpc::health::v1::HealthCheckRequest request;
  request.set_service("nobody");
  grpc::health::v1::HealthCheckResponse response;
  EXPECT_EQ(health->Check(&context, request, &response).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ServingTest, ReflectionListsTheServiceAndItsFiles) {
  namespace reflection = grpc::reflection::v1alpha;
  const auto stub = reflection::ServerReflection::NewStub(server().channel());
  grpc::ClientContext context;
  const auto stream = stub->ServerReflectionInfo(&context);
  reflection::ServerReflectionRequest request;
  request.set_list_services("");
  reflection::ServerReflectionResponse response;
  ASSERT_TRUE(stream->Write(request) && stream->Read(&response));
  std::vector<std::string> services;
  for (const auto& service : response.list_services_response().service()) services.push_back(service.name());
  EXPECT_THAT(services, Contains("dflash.v1.InferenceService"));
  request.set_file_containing_symbol("dflash.v1.GenerateRequest");
  ASSERT_TRUE(stream->Write(request) && stream->Read(&response));
  EXPECT_GT(response.file_descriptor_response().file_descriptor_proto_size(), 0);
  stream->WritesDone();
  while (stream->Read(&response)) {
  }
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ServingTest, ModelInfoNamesTheContract) {
  const v1::GetModelInfoResponse info = server().ModelInfo();
  EXPECT_EQ(info.backend(), "cpu");
  EXPECT_EQ(info.vocabulary_size(), 4096u);
  EXPECT_EQ(info.drafter().block_size(), 16u);
  EXPECT_THAT(info.feature_contract(), HasSubstr("taps=1,3,5"));
  EXPECT_EQ(std::vector<uint32_t>(info.eos_token_ids().begin(), info.eos_token_ids().end()),
            (std::vector<uint32_t>{4090, 4088}));
  EXPECT_FLOAT_EQ(info.default_sampling().temperature(), 0.6f);
  EXPECT_GE(info.same_text_rows(), 64u);
}

// A full queue refuses at once, says when to come back, and takes requests again when there is room.
TEST(QueueTest, OverflowIsRefusedWithAHint) {
  Server server({"--max-sequences", "1", "--max-queued-requests", "1"});
  ASSERT_NE(server.channel(), nullptr);
  OpenStream running(server.stub(), EndlessRequest());
  ASSERT_TRUE(running.ReadFirstTokens());
  OpenStream waiting(server.stub(), EndlessRequest());
  ASSERT_TRUE(PollUntil([&] { return server.Load().waiting() == 1; }));

  ctl::Generation refused;
  const grpc::Status status = Generate(server.channel(), ShortRequest(), kPatience, &refused);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(ctl::Describe(status), HasSubstr("(QUEUE_FULL, retry in "));

  waiting.Cancel();
  EXPECT_EQ(waiting.Finish().error_code(), grpc::StatusCode::CANCELLED);
  running.Cancel();
  EXPECT_EQ(running.Finish().error_code(), grpc::StatusCode::CANCELLED);
  ASSERT_TRUE(server.WaitUntilIdle());
  EXPECT_EQ(server.GenerateOk(ShortRequest()).token_ids.size(), 4u);
}

TEST(LossTest, AKilledWorkerIsReportedAtOnce) {
  Server server({"--replay-seconds", "0"});
  ASSERT_NE(server.channel(), nullptr);
  const v1::GetLoadResponse before = server.Load();
  ASSERT_EQ(before.groups_size(), 1);
  OpenStream stream(server.stub(), EndlessRequest());
  ASSERT_TRUE(stream.ReadFirstTokens());

  ASSERT_GT(before.groups(0).leader_pid(), 1);
  ASSERT_EQ(kill(before.groups(0).leader_pid(), SIGKILL), 0);
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << ctl::Describe(status);
  EXPECT_THAT(ctl::Describe(status), HasSubstr("WORKER_LOST"));
  // From the end of the process or of its connection, not from missing heartbeats.
  EXPECT_THAT(ctl::Describe(status), Not(HasSubstr("said nothing")));

  // It comes back by itself, as another process.
  EXPECT_TRUE(server.process().WaitForLine("is lost: its worker process was killed by signal 9").has_value());
  ASSERT_TRUE(server.WaitUntilServing());
  EXPECT_NE(server.Load().groups(0).leader_pid(), before.groups(0).leader_pid());
  EXPECT_EQ(server.GenerateOk(ShortRequest()).token_ids.size(), 4u);
  EXPECT_THAT(server.Metrics(), ContainsRegex("dflashd_group_epoch[{][^}]*[}] 2"));
  EXPECT_THAT(server.Metrics(), HasSubstr("cause=\"worker_exit\""));
}

// Work is shared, and one group's loss is its own clients' only.
TEST(GroupsTest, TheOtherGroupServesOn) {
  Server server({"--groups", "2", "--max-sequences", "1"});
  ASSERT_NE(server.channel(), nullptr);
  ASSERT_TRUE(PollUntil([&] {
    const v1::GetLoadResponse load = server.Load();
    return load.groups_size() == 2 && load.groups(0).state() == v1::GROUP_STATE_READY &&
           load.groups(1).state() == v1::GROUP_STATE_READY;
  }));
  OpenStream first(server.stub(), EndlessRequest()), second(server.stub(), EndlessRequest());
  ASSERT_TRUE(first.ReadFirstTokens() && second.ReadFirstTokens()) << "both run though a group has one slot";
  const v1::GetLoadResponse load = server.Load();
  EXPECT_EQ(load.groups(0).running(), 1u);
  EXPECT_EQ(load.groups(1).running(), 1u);
  ASSERT_NE(load.groups(0).leader_pid(), load.groups(1).leader_pid());

  ASSERT_EQ(kill(load.groups(1).leader_pid(), SIGKILL), 0);
  OpenStream* const streams[] = {&first, &second};
  int lost = 0;
  ASSERT_TRUE(PollUntil([&] { return server.Load().groups(1).state() != v1::GROUP_STATE_READY; }));
  EXPECT_TRUE(server.Load().serving());
  EXPECT_EQ(server.Load().groups(0).running(), 1u);
  for (OpenStream* stream : streams) stream->Cancel();
  for (OpenStream* stream : streams) lost += stream->Finish().error_code() == grpc::StatusCode::UNAVAILABLE;
  EXPECT_LE(lost, 1);
  EXPECT_EQ(server.GenerateOk(ShortRequest()).token_ids.size(), 4u);
}

TEST(LossTest, AStoppedWorkerIsLostAndKilled) {
  Server server({"--replay-seconds", "0"});
  ASSERT_NE(server.channel(), nullptr);
  const int worker = server.Load().groups(0).leader_pid();
  OpenStream stream(server.stub(), EndlessRequest());
  ASSERT_TRUE(stream.ReadFirstTokens());
  ASSERT_GT(worker, 1);
  ASSERT_EQ(kill(worker, SIGSTOP), 0);
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << ctl::Describe(status);
  EXPECT_THAT(ctl::Describe(status), HasSubstr("said nothing for 5s"));
  EXPECT_TRUE(PollUntil([&] { return kill(worker, 0) != 0; })) << "it is left over";
  EXPECT_TRUE(server.process().WaitForLine("is lost: the worker said nothing for 5s").has_value())
      << "the kill was ours and explains nothing";
  ASSERT_TRUE(server.WaitUntilServing());
  EXPECT_EQ(HttpGet(server.ops_address(), "/livez"), "ok\n");
  EXPECT_EQ(server.GenerateOk(ShortRequest()).token_ids.size(), 4u);
}

TEST(LossTest, AWorkerThatOnlyLeavesItsStreamIsKilled) {
  Server server({"--worker", LeavingWorkerPath()});
  ASSERT_NE(server.channel(), nullptr);
  int worker = 0;
  ASSERT_TRUE(PollUntil([&] {
    const v1::GetLoadResponse load = server.Load();
    worker = load.groups_size() == 1 ? load.groups(0).leader_pid() : 0;
    return worker > 1;
  }));
  EXPECT_TRUE(server.process().WaitForLine("the worker ended the stream").has_value());
  EXPECT_TRUE(PollUntil([&] { return kill(worker, 0) != 0; })) << "it is left over";
}

// One JSON line for each request, in the caller's trace, without a word of what was said.
TEST(LogTest, ARequestIsOneLineInItsCallersTrace) {
  Server server({"--log-format", "json"});
  ASSERT_NE(server.channel(), nullptr);
  grpc::ClientContext context;
  context.AddMetadata("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
  v1::GenerateRequest request = ChatRequest("Count from 19 by 9, 11 numbers in all.");
  request.set_request_id("logged");
  ctl::Generation generation;
  ASSERT_TRUE(ctl::ReadGeneration(server.stub(), &context, request, nullptr, &generation).ok());
  const auto returned = context.GetServerInitialMetadata().find("traceparent");
  ASSERT_NE(returned, context.GetServerInitialMetadata().end());
  EXPECT_THAT(std::string(returned->second.data(), returned->second.size()),
              ContainsRegex("^00-4bf92f3577b34da6a3ce929d0e0e4736-[0-9a-f]{16}-01$"));
  const auto line = server.process().WaitForLine("\"msg\":\"request ended\"");
  ASSERT_TRUE(line.has_value());
  const nlohmann::json entry = nlohmann::json::parse(*line, nullptr, false);
  ASSERT_TRUE(entry.is_object()) << *line;
  EXPECT_EQ(entry["request_id"], "logged");
  EXPECT_EQ(entry["trace_id"], "4bf92f3577b34da6a3ce929d0e0e4736");
  EXPECT_EQ(entry["end"], "OK");
  EXPECT_EQ(entry["output_tokens"], generation.token_ids.size());
  EXPECT_EQ(entry["rounds"], generation.finished.speculation().rounds());
  EXPECT_EQ(entry["accepted"], generation.finished.speculation().accepted_tokens());
  EXPECT_GT(entry["accepted"], 0);
  EXPECT_GT(entry["total_s"], 0);
  EXPECT_EQ(server.process().output().find("Count from"), std::string::npos);
  const Ran top = server.Dflashctl({"top", "--count", "1", "--interval", "0.1"});
  EXPECT_EQ(top.exit_code, ctl::kSuccess);
  EXPECT_THAT(top.output, HasSubstr("requests/s by end: stop"));
}

// A request as spans in its caller's trace, if the caller records it; without a caller by
// --otlp-sample-ratio.
TEST(TraceTest, ACollectorSeesRequestsInTheirCallersTraces) {
  testing::TraceCollector collector;
  Server server({"--otlp-endpoint", collector.url(), "--otlp-sample-ratio", "0"});
  ASSERT_NE(server.channel(), nullptr);
  const auto generate = [&](const char* id, const char* traceparent, uint32_t max_tokens) {
    grpc::ClientContext context;
    if (traceparent != nullptr) context.AddMetadata("traceparent", traceparent);
    v1::GenerateRequest request = ChatRequest("Count from 19 by 9, 11 numbers in all.");
    request.set_request_id(id);
    request.mutable_stopping()->set_max_tokens(max_tokens);
    ctl::Generation generation;
    (void)ctl::ReadGeneration(server.stub(), &context, request, nullptr, &generation);
    const auto returned = context.GetServerInitialMetadata().find("traceparent");
    return returned == context.GetServerInitialMetadata().end()
               ? std::string()
               : std::string(returned->second.data(), returned->second.size());
  };
  generate("unsampled", "00-00000000000000000000000000000001-00f067aa0ba902b7-00", 4);
  generate("own", nullptr, 4);
  generate("refused", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", 0);
  const std::string returned =
      generate("sampled", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", 40);
  // prepare, queue, prefill, decode and the call; of the refused one the call alone.
  const std::vector<nlohmann::json> spans = collector.AwaitSpans(6);
  EXPECT_EQ(collector.complaint(), "");
  ASSERT_EQ(spans.size(), 6u);
  std::map<std::string, nlohmann::json> parts;
  nlohmann::json call, refused;
  for (const nlohmann::json& span : spans) {
    EXPECT_EQ(span["traceId"], "4bf92f3577b34da6a3ce929d0e0e4736");
    if (span["name"] != "generate") {
      parts[span["name"]] = span;
    } else {
      EXPECT_EQ(span["parentSpanId"], "00f067aa0ba902b7");
      (testing::AttributeOf(span, "dflashd.request_id") == "sampled" ? call : refused) = span;
    }
  }
  ASSERT_FALSE(call.is_null());
  ASSERT_FALSE(refused.is_null());
  EXPECT_EQ(returned, "00-4bf92f3577b34da6a3ce929d0e0e4736-" + call["spanId"].get<std::string>() + "-01");
  EXPECT_EQ(testing::AttributeOf(call, "gen_ai.usage.output_tokens"), "40");
  EXPECT_EQ(testing::AttributeOf(call, "rpc.grpc.status_code"), "0");
  EXPECT_NE(testing::AttributeOf(call, "dflashd.accepted_tokens"), nullptr);
  EXPECT_TRUE(call["status"].empty());
  EXPECT_EQ(refused["status"]["message"], "INVALID_ARGUMENT BAD_PARAMETER");
  EXPECT_EQ(testing::AttributeOf(refused, "rpc.grpc.status_code"), "3");
  ASSERT_EQ(parts.size(), 4u);
  // They follow each other without a gap, from the beginning of the call to its end.
  nlohmann::json end = call["startTimeUnixNano"];
  for (const char* name : {"prepare", "queue", "prefill", "decode"}) {
    const nlohmann::json& part = parts[name];
    EXPECT_EQ(part["parentSpanId"], call["spanId"]);
    EXPECT_NE(part["spanId"], call["spanId"]);
    EXPECT_EQ(part["startTimeUnixNano"], end) << name;
    end = part["endTimeUnixNano"];
    EXPECT_LE(std::stoll(part["startTimeUnixNano"].get<std::string>()), std::stoll(end.get<std::string>()));
  }
  EXPECT_EQ(end, call["endTimeUnixNano"]);
  EXPECT_THAT(server.Metrics(), HasSubstr("dflashd_trace_spans_total"));
}

// What ended just before the process did is told too.
TEST(TraceTest, SpansOfTheLastRequestsReachTheCollector) {
  testing::TraceCollector collector;
  {
    Server server({"--otlp-endpoint", collector.url()});
    ASSERT_NE(server.channel(), nullptr);
    EXPECT_EQ(server.GenerateOk(ShortRequest()).token_ids.size(), 4u);
    server.process().Signal(SIGTERM);
    EXPECT_EQ(server.process().WaitForExit(), 0);
  }
  EXPECT_EQ(collector.AwaitSpans(5).size(), 5u);
}

TEST(ProbeTest, ListsConditions) {
  Server server;
  ASSERT_NE(server.channel(), nullptr);
  EXPECT_THAT(HttpGet(server.ops_address(), "/readyz?verbose"),
              ::testing::MatchesRegex("\\[\\+\\]timer: .*\n\\[\\+\\]admission: open .*\n\\[\\+\\]group 0: "
                                      "ready for .*, life 1, heard .* ago\nok\n"));
  EXPECT_EQ(HttpGet(server.ops_address(), "/readyz"), "ok\n");
}

TEST(LoadTest, PagesAreKnownAsSoonAsTheServerServes) {
  Server server;
  ASSERT_NE(server.channel(), nullptr);
  const v1::GetLoadResponse load = server.Load();
  ASSERT_EQ(load.groups_size(), 1);
  EXPECT_EQ(load.groups(0).cache_pages_total(), 8u * 4096 / 64);
  EXPECT_EQ(load.groups(0).cache_pages_free(), load.groups(0).cache_pages_total());
}

// What a prompt shares with earlier ones is not run again; the client, GetLoad and the metrics say so, and
// the answer is the same. A salt of one's own, or none of it, is respected.
TEST(PrefixCacheTest, PromptsBeginWithWhatIsCached) {
  Server server;
  ASSERT_NE(server.channel(), nullptr);
  std::vector<uint32_t> prompt;
  for (const GoldenText& golden : GoldenTexts())
    prompt.insert(prompt.end(), golden.prompt_ids.begin(), golden.prompt_ids.end());
  ASSERT_GT(prompt.size(), 700u);
  prompt.resize(700);
  const auto run = [&](const std::string& salt, bool no_cache) {
    v1::GenerateRequest request = TokenRequest(prompt, 16);
    if (!salt.empty()) request.mutable_scheduling()->set_cache_salt(salt);
    request.mutable_scheduling()->set_no_prefix_cache(no_cache);
    const ctl::Generation generation = server.GenerateOk(request);
    EXPECT_EQ(generation.started.cached_tokens(), generation.finished.usage().cached_tokens());
    return generation;
  };
  const ctl::Generation cold = run("", false), warm = run("", false);
  EXPECT_EQ(cold.started.cached_tokens(), 0u);
  EXPECT_EQ(warm.started.cached_tokens(), 640u);
  EXPECT_EQ(warm.token_ids, cold.token_ids);
  EXPECT_GT(warm.finished.speculation().drafted_tokens(), 0u);
  EXPECT_EQ(warm.finished.speculation().accepted_tokens(), cold.finished.speculation().accepted_tokens());
  EXPECT_EQ(run("tenant", false).started.cached_tokens(), 0u);
  EXPECT_EQ(run("tenant", false).started.cached_tokens(), 640u);
  EXPECT_EQ(run("", true).started.cached_tokens(), 0u);
  prompt.back() ^= 1;
  EXPECT_EQ(run("", false).started.cached_tokens(), 640u);
  prompt.front() ^= 1;
  EXPECT_EQ(run("", false).started.cached_tokens(), 0u);

  EXPECT_TRUE(PollUntil([&] {
    const std::string page = server.Metrics();
    for (const char* line :
         {"dflashd_prefix_cache_queried_tokens_total{model=\"tiny-qwen3.6\",group=\"0\"} 4200",
          "{pool=\"effective\",model=\"tiny-qwen3.6\",group=\"0\"} 1920",
          "{pool=\"draft_full\",model=\"tiny-qwen3.6\",group=\"0\"} 1920",
          "{source=\"cached\",model=\"tiny-qwen3.6\"} 1920"}) {
      if (page.find(line) == std::string::npos) return false;
    }
    return true;
  })) << server.Metrics();
  EXPECT_TRUE(PollUntil([&] {
    const v1::GroupLoad group = server.Load().groups(0);
    return group.cache_pages_free() == group.cache_pages_total() && group.running() == 0;
  })) << "what is only cached counts as free";
}

TEST(ShutdownTest, TermEndsTheDaemonAndItsWorker) {
  Server server;
  ASSERT_NE(server.channel(), nullptr);
  const int worker = server.Load().groups(0).leader_pid();
  OpenStream stream(server.stub(), EndlessRequest());
  ASSERT_TRUE(stream.ReadFirstTokens());
  server.process().Signal(SIGTERM);
  ASSERT_TRUE(PollUntil([&] { return !server.Load().serving(); }));
  server.process().Signal(SIGTERM);  // at once
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(ctl::Describe(status), HasSubstr("(DRAINING, retry in 0)"));
  EXPECT_EQ(server.process().WaitForExit(), 0);
  EXPECT_TRUE(PollUntil([&] { return kill(worker, 0) != 0; }));
}

}  // namespace
}  // namespace dflash::integration
