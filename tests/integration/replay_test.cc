// Worker groups that die under running requests: these go on in the group's next life, and their clients see
// one stream with the text of an undisturbed one.
#include <csignal>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/golden_prompts.h"
#include "tests/integration/server.h"

namespace dflash::integration {
namespace {

// Sampled and greedy, with penalties, stop strings and log probabilities.
std::vector<v1::GenerateRequest> Requests(size_t count) {
  const std::vector<GoldenText> golden = GoldenTexts();
  std::vector<v1::GenerateRequest> requests;
  for (size_t i = 0; i < count; ++i) {
    v1::GenerateRequest request = TokenRequest(golden[i % golden.size()].prompt_ids, 1000);
    request.mutable_stopping()->set_ignore_eos(true);
    request.mutable_output()->set_text(true);
    if (i % 2 == 1) {
      request.mutable_sampling()->set_temperature(0.8f);
      request.mutable_sampling()->set_seed(100 + i);
    }
    if (i % 3 == 1) request.mutable_sampling()->set_frequency_penalty(0.2f);
    if (i % 3 == 2) request.mutable_output()->set_top_logprobs(2);
    if (i % 4 == 3) request.mutable_speculation()->set_mode(v1::SPECULATION_MODE_OFF);
    requests.push_back(std::move(request));
  }
  return requests;
}

void GoOnDespiteLosses(const std::vector<std::string>& flags, int losses) {
  std::vector<std::string> all = flags;
  all.insert(all.end(), {"--max-restart-delay", "1", "--max-sequences", "4"});
  Server server(all);
  ASSERT_NE(server.channel(), nullptr);
  const std::vector<v1::GenerateRequest> requests = Requests(4);
  std::vector<ctl::Generation> undisturbed;
  for (const v1::GenerateRequest& request : requests) undisturbed.push_back(server.GenerateOk(request));

  std::vector<ctl::Generation> results(requests.size());
  std::vector<grpc::Status> statuses(requests.size());
  std::vector<std::thread> clients;
  for (size_t i = 0; i < requests.size(); ++i) {
    clients.emplace_back([&, i] {
      // The client library checks the stream: no gap, no token twice, Finished once.
      statuses[i] = Generate(server.channel(), requests[i], kPatience, &results[i]);
    });
  }
  for (int loss = 0; loss < losses; ++loss) {
    // Anywhere in their outputs: every place is right.
    const uint64_t before = server.Load().generated_tokens();
    ASSERT_TRUE(PollUntil([&] { return server.Load().generated_tokens() > before + 300; }));
    const int pid = server.Load().groups(0).leader_pid();
    ASSERT_GT(pid, 1);
    ASSERT_EQ(kill(pid, SIGKILL), 0);
    ASSERT_TRUE(PollUntil([&] { return server.Load().groups(0).leader_pid() != pid; }));
    ASSERT_TRUE(server.WaitUntilServing());
  }
  for (std::thread& client : clients) client.join();
  uint32_t replays = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE(i);
    ASSERT_TRUE(statuses[i].ok()) << ctl::Describe(statuses[i]);
    EXPECT_EQ(results[i].token_ids, undisturbed[i].token_ids);
    EXPECT_EQ(results[i].text, undisturbed[i].text);
    EXPECT_EQ(results[i].finished.usage().completion_tokens(), undisturbed[i].token_ids.size());
    ASSERT_EQ(results[i].logprobs.size(), undisturbed[i].logprobs.size());
    for (size_t k = 0; k < results[i].logprobs.size(); ++k)
      EXPECT_EQ(results[i].logprobs[k].logprob(), undisturbed[i].logprobs[k].logprob());
    replays += results[i].finished.replays();
    std::printf("request %zu: %u replays, %.2f s, undisturbed %.2f s\n", i, results[i].finished.replays(),
                results[i].total_seconds, undisturbed[i].total_seconds);
  }
  EXPECT_GT(replays, 0u);
  EXPECT_TRUE(server.WaitUntilIdle());
}

TEST(Replay, RequestsOutliveTheirWorker) { GoOnDespiteLosses({}, 2); }
TEST(Replay, RequestsOutliveARankOfTheirGroup) { GoOnDespiteLosses({"--tp", "2", "--threads", "1"}, 1); }

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
