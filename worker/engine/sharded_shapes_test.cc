// Groups of 4 and 8 ranks on a random pair with the head counts of the 27B model and its drafter (24 query
// heads, 4 key/value heads that 8 ranks repeat, 16 and 48 linear heads; 32 and 8 in the drafter), a
// vocabulary with padding: the same tokens as one rank, greedy and sampled.
#include <cstdint>
#include <fstream>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "worker/model/testing/temporary_folder.h"
#include "worker/testing/rank_threads.h"

namespace dflash {
namespace {

using testing::GenerationOutcome;
using testing::RankThreads;
using testing::TinyPairOptions;

nlohmann::json ReadJson(const std::string& path) {
  std::ifstream in(testing::SourcePath(path));
  return nlohmann::json::parse(in);
}

class ShapesTest : public ::testing::Test {
 protected:
  // 528 rows of the vocabulary: 66 a rank of eight.
  void SetUp() override {
    nlohmann::json target = ReadJson("models/tiny-qwen3.6/config.json");
    target["text_config"].update({{"vocab_size", 528},
                                  {"hidden_size", 128},
                                  {"intermediate_size", 256},
                                  {"num_attention_heads", 24},
                                  {"num_key_value_heads", 4},
                                  {"head_dim", 16},
                                  {"linear_num_key_heads", 16},
                                  {"linear_num_value_heads", 48},
                                  {"linear_key_head_dim", 8},
                                  {"linear_value_head_dim", 8},
                                  {"bos_token_id", 511},
                                  {"eos_token_id", 511}});
    target["text_config"]["rope_parameters"]["mrope_section"] = {1, 1, 0};
    target_.Write("config.json", target.dump());
    nlohmann::json draft = ReadJson("models/tiny-qwen3.6-dflash/config.json");
    draft.update({{"vocab_size", 528},
                  {"hidden_size", 128},
                  {"intermediate_size", 256},
                  {"num_attention_heads", 32},
                  {"num_key_value_heads", 8},
                  {"head_dim", 16},
                  {"eos_token_id", 511},
                  {"pad_token_id", 511}});
    draft["dflash_config"]["mask_token_id"] = 510;
    draft_.Write("config.json", draft.dump());
  }

  // Rank 0's outcomes; every rank has the same.
  std::vector<GenerationOutcome> Run(int size, int64_t shard_residual_rows, DraftPlacement placement) {
    TinyPairOptions options;
    options.threads = 1;
    options.target_dir = target_.path();
    options.draft_dir = draft_.path();
    options.random_weights = 20;
    options.shard_residual_rows = shard_residual_rows;
    options.draft_placement = placement;
    auto group = RankThreads::Load(size, options);
    EXPECT_TRUE(group.ok()) << group.status();
    if (!group.ok()) return {};
    auto ranks = (*group)->RunRequests(requests_);
    EXPECT_TRUE(ranks.ok()) << ranks.status();
    if (!ranks.ok()) return {};
    for (const auto& outcomes : *ranks) {
      for (size_t i = 0; i < outcomes.size(); ++i) {
        EXPECT_TRUE(outcomes[i].done) << outcomes[i].status;
        EXPECT_EQ(outcomes[i].tokens, (*ranks)[0][i].tokens);
      }
    }
    return (*ranks)[0];
  }

  void MakeRequests() {
    std::mt19937 generator(5);
    const std::vector<SamplingParams> sampling = {
        {},
        {},
        {.temperature = 1, .top_k = 20, .top_p = 0.95f, .seed = 1},
        {.temperature = 1, .top_p = 0.9f, .seed = 2},
        {.temperature = 0.7f, .seed = 3},
        {.temperature = 1, .top_k = 100, .min_p = 0.01f, .seed = 4}};
    const std::vector<int> lengths = {3, 130, 65, 17, 200, 64};
    for (size_t i = 0; i < lengths.size(); ++i) {
      GenerationRequest request;
      for (int n = 0; n < lengths[i]; ++n)
        request.prompt_tokens.push_back(static_cast<int32_t>(generator() % 512));
      request.max_tokens = 32;
      request.sampling = sampling[i];
      requests_.push_back(request);
    }
  }

  TemporaryFolder target_, draft_;
  std::vector<GenerationRequest> requests_;
};

TEST_F(ShapesTest, GroupsGiveTheTokensOfOneRank) {
  constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  MakeRequests();
  const std::vector<GenerationOutcome> one = Run(1, 0, DraftPlacement::kRankZero);
  ASSERT_EQ(one.size(), requests_.size());
  std::set<int32_t> emitted;  // the comparison is not one of a constant
  for (const GenerationOutcome& outcome : one) emitted.insert(outcome.tokens.begin(), outcome.tokens.end());
  EXPECT_GT(emitted.size(), 50u);
  struct Group {
    int size;
    int64_t shard_residual_rows;
    DraftPlacement placement;
  };
  for (const Group& group :
       {Group{4, kNever, DraftPlacement::kRankZero}, Group{4, 1, DraftPlacement::kSharded},
        Group{8, kNever, DraftPlacement::kSharded}, Group{8, 1, DraftPlacement::kRankZero}}) {
    SCOPED_TRACE(::testing::Message()
                 << group.size << " ranks, residual sharded from " << group.shard_residual_rows
                 << " rows, drafter "
                 << (group.placement == DraftPlacement::kSharded ? "on all" : "on rank 0"));
    const std::vector<GenerationOutcome> outcomes =
        Run(group.size, group.shard_residual_rows, group.placement);
    ASSERT_EQ(outcomes.size(), one.size());
    for (size_t i = 0; i < one.size(); ++i) {
      EXPECT_EQ(outcomes[i].tokens, one[i].tokens) << "request " << i;
      EXPECT_EQ(outcomes[i].tokens.size(), 32u);
      EXPECT_GT(outcomes[i].finished.drafted_tokens, 0);
      EXPECT_EQ(outcomes[i].finished.drafted_tokens, one[i].finished.drafted_tokens);
      EXPECT_EQ(outcomes[i].finished.accepted_tokens, one[i].finished.accepted_tokens);
    }
  }
}

}  // namespace
}  // namespace dflash
