#include "worker/load_group.h"

#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/device/memory.h"
#include "worker/comm/host_communicator.h"
#include "worker/memory_plan.h"
#include "worker/model/testing/temporary_folder.h"
#include "worker/testing/tiny_pair.h"

namespace dflash {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kModels = std::string(DFLASHD_SOURCE_DIR) + "/models/";

// Configurations of the tiny pair, without weights and tokenizer.
class RandomGroupTest : public ::testing::Test {
 protected:
  RandomGroupTest() {
    target_.Link("config.json", kModels + "tiny-qwen3.6/config.json");
    target_.Link("generation_config.json", kModels + "tiny-qwen3.6/generation_config.json");
    drafter_.Link("config.json", kModels + "tiny-qwen3.6-dflash/config.json");
    options_.model = target_.path();
    options_.draft_model = drafter_.path();
    options_.random_weights = 5;
    options_.threads = 2;
    options_.max_sequences = 2;
    options_.cache_tokens = 1000;
  }

  absl::StatusOr<Group> Load() {
    return LoadGroup(options_, [this](const std::string& line) { log_ += line + "\n"; });
  }

  const TemporaryFolder target_, drafter_;
  GroupOptions options_;
  std::string log_;
};

TEST_F(RandomGroupTest, GeneratesTheSameTokensWithAndWithoutDrafts) {
  options_.adaptive_blocks =
      false;  // few of a random drafter's drafts are accepted, so blocks would get short
  const auto group = Load();
  ASSERT_TRUE(group.ok()) << group.status();
  EXPECT_EQ(group->tokenizer, nullptr);
  EXPECT_EQ(group->vocabulary, 4096);
  EXPECT_THAT(log_, HasSubstr("random weights of seed 5"));
  EXPECT_THAT(log_, HasSubstr("no tokenizer"));
  EXPECT_THAT(log_, HasSubstr("loaded target"));
  const auto engine = group->MakeEngine(256, nullptr);
  ASSERT_TRUE(engine.ok()) << engine.status();
  std::vector<GenerationRequest> requests(2);
  for (GenerationRequest& request : requests) {
    request.prompt_tokens = {17, 4, 1999, 4095, 0, 256};
    request.max_tokens = 40;
    request.return_text = false;
  }
  requests[0].id = "drafts";
  requests[1].id = "plain";
  requests[1].speculation = SpeculationMode::kOff;
  const auto outcomes = testing::RunAll(**engine, requests);
  ASSERT_TRUE(outcomes.ok()) << outcomes.status();
  const auto& drafts = (*outcomes)[0];
  const auto& plain = (*outcomes)[1];
  EXPECT_TRUE(drafts.done && plain.done) << drafts.status << plain.status;
  EXPECT_EQ(plain.tokens.size(), 40u);
  EXPECT_EQ(drafts.tokens, plain.tokens);
  int drafted = 0;
  for (const RoundReport& round : drafts.rounds) drafted += round.drafted;
  EXPECT_GT(drafted, 100);
}

// The memory that a group may use decides about its pages.
TEST_F(RandomGroupTest, TheCacheTakesWhatItsShareOfTheMemoryLeaves) {
  const double total = static_cast<double>(GetDeviceMemory(*Stream::Create({.threads = 1})).value().total);
  options_.cache_tokens = 0;
  const int64_t whole = Load()->table->pages();
  EXPECT_EQ(whole, 2 * 4096 / 64);
  const auto pages_with = [&](int64_t bytes) {
    options_.memory_fraction = static_cast<double>(kMemoryReserve + bytes) / total;
    return Load()->table->pages();
  };
  const int64_t some = pages_with(int64_t{150} << 20);
  const int64_t more = pages_with(int64_t{182} << 20);
  EXPECT_GT(some, 64);
  // Of the tiny pair's pages: 2 attention layers and 3 of the drafter (keys and values of 64 tokens,
  // float32).
  MemoryDemand page;
  page.target = *TargetConfig::Load(options_.model);
  page.drafter = *DraftConfig::Load(options_.draft_model);
  page.activation = ActivationDType();
  page.pages = 2;
  const int64_t two = PlanMemory(page).total();
  page.pages = 1;
  EXPECT_NEAR(static_cast<double>(more - some),
              static_cast<double>(int64_t{32} << 20) / static_cast<double>(two - PlanMemory(page).total()),
              1);

  options_.memory_fraction = 1e-6;
  const absl::Status status = Load().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("--memory-fraction 1e-06 leaves no room"));
}

// Sizes that are said outright are held against the memory of the machine before any weight is made.
TEST_F(RandomGroupTest, PoolsThatNoMachineHoldsAreRefusedAtOnce) {
  const auto refused = [&] {
    log_.clear();
    const absl::Status status = Load().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(log_, Not(HasSubstr("loading target")));
    return std::string(status.message());
  };
  options_.cache_tokens = 99999999999;
  EXPECT_THAT(refused(), AllOf(HasSubstr("less with --cache-tokens"), HasSubstr("(--cache-tokens ")));
  options_.cache_tokens = 1000;
  options_.checkpoints = int64_t{1} << 30;
  EXPECT_THAT(refused(),
              AllOf(HasSubstr("less with --prefix-checkpoints"), HasSubstr("(--prefix-checkpoints ")));
}

// Two ranks share a machine. What one of them could have alone is too much for both.
TEST_F(RandomGroupTest, RanksOfOneMachineShareItsMemory) {
  const DeviceMemory memory = GetDeviceMemory(*Stream::Create({.threads = 1})).value();
  ASSERT_TRUE(memory.shared_by_ranks);
  auto communicators = HostCommunicator::CreateGroup({.size = 2}).value();
  options_.communicator = communicators[1].get();
  MemoryDemand demand;
  demand.target = *RankConfig(*TargetConfig::Load(options_.model), GroupRank{.rank = 1, .size = 2});
  demand.activation = ActivationDType();
  demand.sequences = options_.max_sequences;
  demand.pages = PagesThatFit(demand, memory.total * 3 / 4);
  ASSERT_LT(PlanMemory(demand).total(), memory.total);
  options_.cache_tokens = demand.pages * 64;
  const absl::Status status = Load().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("all that this machine, or its control group, has"));
}

// Rank 0 has the drafter and so less room, and it has what all have.
TEST_F(RandomGroupTest, RanksAgreeOnTheirPages) {
  const double total = static_cast<double>(GetDeviceMemory(*Stream::Create({.threads = 1})).value().total);
  options_.cache_tokens = 0;
  options_.threads = 1;
  options_.memory_fraction = 2 * static_cast<double>(kMemoryReserve + (int64_t{150} << 20)) / total;
  auto communicators = HostCommunicator::CreateGroup({.size = 2}).value();
  std::vector<int64_t> pages(2);
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      GroupOptions own = options_;
      own.communicator = communicators[rank].get();
      const auto group = LoadGroup(own, [](const std::string&) {});
      ASSERT_TRUE(group.ok()) << group.status();
      pages[rank] = group->table->pages();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(pages[0], 64);
  EXPECT_EQ(pages[0], pages[1]);
}

TEST_F(RandomGroupTest, RealWeightsNeedATokenizer) {
  options_.random_weights.reset();
  options_.draft_model.clear();
  for (const char* file : {"model.safetensors.index.json", "model-00001-of-00002.safetensors",
                           "model-00002-of-00002.safetensors"}) {
    target_.Link(file, kModels + "tiny-qwen3.6/" + file);
  }
  EXPECT_EQ(Load().status().code(), absl::StatusCode::kNotFound);
  target_.Link("tokenizer.json", kModels + "tiny-qwen3.6/tokenizer.json");
  EXPECT_TRUE(Load().ok());
}

// Progress is that of the rank's own bytes, whatever share of the files they are.
TEST_F(RandomGroupTest, EveryRankLoadsItsShareAndReachesAHundredPercent) {
  options_.random_weights.reset();
  options_.model = kModels + "tiny-qwen3.6";
  options_.draft_model = kModels + "tiny-qwen3.6-dflash";
  const auto whole = Load();
  ASSERT_TRUE(whole.ok()) << whole.status();
  auto communicators = HostCommunicator::CreateGroup({.size = 2}).value();
  int64_t bytes = 0;
  for (const auto& communicator : communicators) {
    log_.clear();
    options_.communicator = communicator.get();
    const auto group = Load();
    ASSERT_TRUE(group.ok()) << group.status();
    EXPECT_THAT(log_, HasSubstr("loading target: 100% of"));
    EXPECT_THAT(log_, Not(HasSubstr("110%")));
    EXPECT_LT(group->bytes_read, whole->bytes_read);
    bytes += group->bytes_read;
  }
  // Nothing is read by nobody; norms and key-value heads that both need are read twice.
  EXPECT_GE(bytes, whole->bytes_read);
  EXPECT_LT(bytes, whole->bytes_read * 11 / 10);
}

TEST_F(RandomGroupTest, NeverReplaceRealWeights) {
  options_.draft_model = kModels + "tiny-qwen3.6-dflash";
  const absl::Status status = Load().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("tiny-qwen3.6-dflash holds weights already"));
}

}  // namespace
}  // namespace dflash
