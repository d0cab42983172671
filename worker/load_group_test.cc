#include "worker/load_group.h"

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/model/testing/temporary_folder.h"
#include "worker/testing/tiny_pair.h"

namespace dflash {
namespace {

using ::testing::HasSubstr;

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

TEST_F(RandomGroupTest, NeverReplaceRealWeights) {
  options_.draft_model = kModels + "tiny-qwen3.6-dflash";
  const absl::Status status = Load().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("tiny-qwen3.6-dflash holds weights already"));
}

}  // namespace
}  // namespace dflash
