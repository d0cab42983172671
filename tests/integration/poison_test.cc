// A request that kills whoever runs it, among others: it is found and refused, and it alone.
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/golden_prompts.h"
#include "tests/integration/poisoned_worker.h"
#include "tests/integration/server.h"

namespace dflash::integration {
namespace {

using ::testing::HasSubstr;

TEST(Poison, TheGuiltyOneIsRefusedAndTheOthersGoOn) {
  Server server({"--worker", POISONED_WORKER_PATH, "--max-restart-delay", "1", "--max-sequences", "4"});
  ASSERT_NE(server.channel(), nullptr);
  v1::GenerateRequest innocent = TokenRequest(GoldenTexts().front().prompt_ids, 1500);
  innocent.mutable_stopping()->set_ignore_eos(true);
  innocent.mutable_output()->set_text(true);
  innocent.mutable_sampling()->set_temperature(0.8f);
  innocent.mutable_sampling()->set_seed(5);
  const ctl::Generation undisturbed = server.GenerateOk(innocent);
  ASSERT_EQ(undisturbed.token_ids.size(), 1500u);
  EXPECT_GT(undisturbed.finished.speculation().accepted_tokens(), 0u);

  ctl::Generation result;
  grpc::Status status;
  std::thread client([&] { status = Generate(server.channel(), innocent, kPatience, &result); });
  EXPECT_TRUE(server.WaitUntilRunning(1));
  const v1::GenerateRequest guilty = TokenRequest({1074, 552, kPoison}, 8);
  ctl::Generation nothing;
  const grpc::Status refused = Generate(server.channel(), guilty, kPatience, &nothing);
  client.join();

  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_THAT(ctl::Describe(refused), HasSubstr("POISONED"));
  EXPECT_THAT(refused.error_message(), HasSubstr("died of this request 3 times in a row"));
  EXPECT_TRUE(nothing.token_ids.empty());
  ASSERT_TRUE(status.ok()) << ctl::Describe(status);
  EXPECT_EQ(result.token_ids, undisturbed.token_ids);
  EXPECT_EQ(result.text, undisturbed.text);
  EXPECT_GE(result.finished.replays(), 1u) << "it was there when the group died";
  // Once with the innocent one, then as the only suspect, each time in a group that was sound.
  ASSERT_TRUE(server.WaitUntilServing());
  const std::string page = server.Metrics();
  EXPECT_EQ(SumOfMetric(page, "dflashd_group_reforms_total"), 4);
  EXPECT_EQ(server.GenerateOk(ShortRequest()).token_ids.size(), 4u);
  EXPECT_EQ(server.GenerateOk(innocent).token_ids, undisturbed.token_ids);
  EXPECT_EQ(SumOfMetric(server.Metrics(), "dflashd_group_reforms_total"), 4) << "nobody dies any more";
  EXPECT_TRUE(server.WaitUntilIdle());
}

// Two that would kill, at once: each is blamed for its own deaths, one after the other.
TEST(Poison, TwoOfThemAreBothFound) {
  Server server({"--worker", POISONED_WORKER_PATH, "--max-restart-delay", "1", "--max-sequences", "4"});
  ASSERT_NE(server.channel(), nullptr);
  grpc::Status statuses[2];
  std::thread clients[2];
  for (int i = 0; i < 2; ++i) {
    clients[i] = std::thread([&, i] {
      ctl::Generation nothing;
      statuses[i] =
          Generate(server.channel(), TokenRequest({1074u, 552u + static_cast<uint32_t>(i), kPoison}, 8),
                   kPatience, &nothing);
    });
  }
  for (std::thread& client : clients) client.join();
  for (const grpc::Status& status : statuses) EXPECT_THAT(ctl::Describe(status), HasSubstr("POISONED"));
  ASSERT_TRUE(server.WaitUntilServing());
  EXPECT_EQ(server.GenerateOk(ShortRequest()).token_ids.size(), 4u);
}

}  // namespace
}  // namespace dflash::integration
