// Worker groups that die under running requests: these go on in the group's next life, and their clients see
// one stream with the text of an undisturbed one.
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/golden_prompts.h"
#include "tests/integration/server.h"

namespace dflash::integration {
namespace {

// Sampled and greedy, with penalties and log probabilities, of several choices, and chats.
std::vector<v1::GenerateRequest> Requests(size_t count) {
  const std::vector<GoldenText> golden = GoldenTexts();
  std::vector<v1::GenerateRequest> requests;
  for (size_t i = 0; i < count; ++i) {
    v1::GenerateRequest request = TokenRequest(golden[i % golden.size()].prompt_ids, 700);
    if (i % 6 == 5) {
      request = ChatRequest("What is the capital of France?");
      request.mutable_chat()->set_enable_thinking(true);
      request.mutable_stopping()->set_max_tokens(700);
      request.mutable_stopping()->set_max_thinking_tokens(200);
      request.mutable_output()->set_parse(true);
    }
    request.mutable_stopping()->set_ignore_eos(true);
    request.mutable_output()->set_text(true);
    if (i % 2 == 1) {
      request.mutable_sampling()->set_temperature(0.8f);
      request.mutable_sampling()->set_seed(100 + i);
    }
    if (i % 3 == 1) request.mutable_sampling()->set_frequency_penalty(0.2f);
    if (i % 3 == 2) request.mutable_output()->set_top_logprobs(2);
    if (i % 3 == 2) request.mutable_output()->set_prompt_logprobs(2);
    if (i % 6 == 4) request.mutable_sampling()->set_n(2);
    if (i % 4 == 3) request.mutable_speculation()->set_mode(v1::SPECULATION_MODE_OFF);
    requests.push_back(std::move(request));
  }
  return requests;
}

void ExpectSameLogProbs(const std::vector<v1::TokenLogprobs>& actual,
                        const std::vector<v1::TokenLogprobs>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(actual[i].logprob(), expected[i].logprob()) << i;
}

void ExpectSame(const ctl::Generation& actual, const ctl::Generation& expected) {
  EXPECT_EQ(actual.token_ids, expected.token_ids);
  EXPECT_EQ(actual.text, expected.text);
  EXPECT_EQ(actual.reasoning, expected.reasoning);
  EXPECT_EQ(actual.finished.reason(), expected.finished.reason());
  EXPECT_EQ(actual.finished.usage().completion_tokens(), expected.token_ids.size());
  ExpectSameLogProbs(actual.logprobs, expected.logprobs);
  ExpectSameLogProbs(actual.prompt_logprobs, expected.prompt_logprobs);
  ASSERT_EQ(actual.others.size(), expected.others.size());
  for (size_t i = 0; i < expected.others.size(); ++i) ExpectSame(actual.others[i], expected.others[i]);
}

// Runs a generation and finds the longest time without a chunk behind the first.
grpc::Status GenerateWatched(Server& server, const v1::GenerateRequest& request, ctl::Generation* result,
                             absl::Duration* pause) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
  absl::Time last = absl::InfiniteFuture();
  return ctl::ReadGeneration(
      *v1::InferenceService::NewStub(server.channel()), &context, request,
      [&](const v1::Chunk&) {
        const absl::Time now = absl::Now();
        *pause = std::max(*pause, now - last);
        last = now;
      },
      result);
}

void GoOnDespiteLosses(const std::vector<std::string>& flags, int losses) {
  std::vector<std::string> all = flags;
  all.insert(all.end(), {"--max-restart-delay", "1", "--max-sequences", "4"});
  Server server(all);
  ASSERT_NE(server.channel(), nullptr);
  const std::vector<v1::GenerateRequest> requests = Requests(6);
  std::vector<ctl::Generation> undisturbed;
  for (const v1::GenerateRequest& request : requests) undisturbed.push_back(server.GenerateOk(request));

  std::vector<ctl::Generation> results(requests.size());
  std::vector<grpc::Status> statuses(requests.size());
  std::vector<absl::Duration> pauses(requests.size());
  std::vector<std::thread> clients;
  for (size_t i = 0; i < requests.size(); ++i) {
    clients.emplace_back([&, i] {
      // The client library checks the stream: no gap, no token twice, Finished once.
      statuses[i] = GenerateWatched(server, requests[i], &results[i], &pauses[i]);
    });
  }
  for (int loss = 0; loss < losses; ++loss) {
    // Anywhere in their outputs: every place is right.
    const uint64_t before = server.Load().generated_tokens();
    ASSERT_TRUE(PollUntil([&] { return server.Load().generated_tokens() > before + 300; }));
    const int pid = server.Load().groups(0).leader_pid();
    ASSERT_GT(pid, 1);
    ASSERT_EQ(kill(pid, SIGKILL), 0);
    const absl::Time killed = absl::Now();
    ASSERT_TRUE(PollUntil([&] { return server.Load().groups(0).leader_pid() != pid; }));
    ASSERT_TRUE(server.WaitUntilServing());
    std::printf("the group serves again %.2f s after its death\n",
                absl::ToDoubleSeconds(absl::Now() - killed));
  }
  for (std::thread& client : clients) client.join();
  uint32_t replays = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE(i);
    ASSERT_TRUE(statuses[i].ok()) << ctl::Describe(statuses[i]);
    ExpectSame(results[i], undisturbed[i]);
    replays += results[i].finished.replays();
    std::printf("request %zu: %u replays, longest pause %.2f s; %.2f s, alone and undisturbed %.2f s\n", i,
                results[i].finished.replays(), absl::ToDoubleSeconds(pauses[i]), results[i].total_seconds,
                undisturbed[i].total_seconds);
  }
  EXPECT_GT(replays, 0u);
  EXPECT_TRUE(server.WaitUntilIdle());
}

TEST(Replay, RequestsOutliveTheirWorker) { GoOnDespiteLosses({}, 2); }
TEST(Replay, RequestsOutliveARankOfTheirGroup) { GoOnDespiteLosses({"--tp", "2", "--threads", "1"}, 1); }

// The client is the memory: what it has of an output is all that another coordinator needs.
TEST(Replay, AClientGoesOnBehindADeadCoordinator) {
  v1::GenerateRequest request = Requests(2)[1];
  Server second({"--threads", "1"});
  ASSERT_NE(second.channel(), nullptr);
  const ctl::Generation undisturbed = second.GenerateOk(request);
  ctl::Generation begun;
  {
    Server first({"--threads", "1"});
    ASSERT_NE(first.channel(), nullptr);
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
    bool killed = false;
    const grpc::Status status = ctl::ReadGeneration(
        first.stub(), &context, request,
        [&](const v1::Chunk& chunk) {
          if (chunk.first_token_offset() > 100 && !std::exchange(killed, true))
            first.process().Signal(SIGKILL);
        },
        &begun);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << ctl::Describe(status);
  }
  ASSERT_GT(begun.token_ids.size(), 100u);
  ASSERT_LT(begun.token_ids.size(), undisturbed.token_ids.size());
  request.mutable_sampling()->set_seed(begun.started.effective_sampling().seed());
  request.mutable_resume()->mutable_output_token_ids()->Add(begun.token_ids.begin(), begun.token_ids.end());
  request.mutable_resume()->set_model_fingerprint(begun.started.model_fingerprint());
  grpc::ClientContext context;
  const auto reader = second.stub().Generate(&context, request);
  std::vector<uint32_t> tokens = begun.token_ids;
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
    EXPECT_TRUE(!response.has_chunk() || response.chunk().first_token_offset() == tokens.size());
    tokens.insert(tokens.end(), response.chunk().token_ids().begin(), response.chunk().token_ids().end());
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(tokens, undisturbed.token_ids);
}

TEST(Replay, OneGroupTakesOverFromAnother) {
  Server server({"--groups", "2", "--max-sequences", "2", "--threads", "1"});
  ASSERT_NE(server.channel(), nullptr);
  ASSERT_TRUE(PollUntil([&] {
    const v1::GetLoadResponse load = server.Load();
    return load.groups_size() == 2 && load.groups(0).state() == v1::GROUP_STATE_READY &&
           load.groups(1).state() == v1::GROUP_STATE_READY;
  }));
  const v1::GenerateRequest request = Requests(1)[0];
  const ctl::Generation undisturbed = server.GenerateOk(request);
  ctl::Generation result;
  grpc::Status status;
  std::thread client([&] { status = Generate(server.channel(), request, kPatience, &result); });
  ASSERT_TRUE(server.WaitUntilRunning(1));
  const v1::GetLoadResponse load = server.Load();
  for (const v1::GroupLoad& group : load.groups()) {
    if (group.running() == 1) {
      EXPECT_EQ(kill(group.leader_pid(), SIGKILL), 0);
    }
  }
  client.join();
  ASSERT_TRUE(status.ok()) << ctl::Describe(status);
  EXPECT_EQ(result.token_ids, undisturbed.token_ids);
  EXPECT_EQ(result.text, undisturbed.text);
}

}  // namespace
}  // namespace dflash::integration
