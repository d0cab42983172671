// A group of ranks computes what one rank computes: the golden replay over 1, 2 and 4 ranks of the tiny pair,
// in both layouts of the residual and with the drafter on one rank or on all. On a GPU all ranks share it.
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/peer_communicator.h"
#include "worker/testing/rank_threads.h"

namespace dflash {
namespace {

using testing::BackendDemands;
using testing::GenerationOutcome;
using testing::GoldenPrompt;
using testing::RankThreads;
using testing::TinyPairOptions;

constexpr int64_t kNeverSharded = std::numeric_limits<int64_t>::max();

struct Group {
  int size = 1;
  int64_t shard_residual_rows = kNeverSharded;
  DraftPlacement placement = DraftPlacement::kRankZero;
  bool peer_memory = false;
};

std::string NameOf(const Group& group) {
  return std::to_string(group.size) + "ranks_" +
         (group.shard_residual_rows == kNeverSharded ? "replicated"
          : group.shard_residual_rows == 1           ? "sharded"
                                                     : "mixed") +
         (group.placement == DraftPlacement::kSharded ? "_drafter_sharded" : "") +
         (group.peer_memory ? "_peer_memory" : "");
}

TinyPairOptions OptionsFor(const Group& group) {
  TinyPairOptions options;
  options.threads = 1;
  options.draft_placement = group.placement;
  options.shard_residual_rows = group.shard_residual_rows;
  return options;
}

class GoldenGroup : public ::testing::TestWithParam<Group> {};
INSTANTIATE_TEST_SUITE_P(TinyPair, GoldenGroup,
                         ::testing::Values(Group{2}, Group{2, 1}, Group{2, 0}, Group{4}, Group{4, 1},
                                           Group{1, 0, DraftPlacement::kSharded},
                                           Group{2, 0, DraftPlacement::kSharded},
                                           Group{2, 1, DraftPlacement::kSharded},
                                           Group{2, 0, DraftPlacement::kRankZero, true},
                                           Group{4, 0, DraftPlacement::kRankZero, true}),
                         [](const auto& info) { return NameOf(info.param); });

TEST_P(GoldenGroup, ReplayIsIdentical) {
  std::vector<GoldenPrompt> prompts = testing::LoadGoldenPrompts().value();
  ASSERT_EQ(prompts.size(), 21u);
  std::vector<GenerationRequest> requests;
  for (const GoldenPrompt& prompt : prompts) requests.push_back(testing::GoldenRequest(prompt));
  auto group = RankThreads::Load(GetParam().size, OptionsFor(GetParam()), {}, GetParam().peer_memory);
  ASSERT_TRUE(group.ok()) << group.status();
  const auto ranks = (*group)->RunRequests(requests);
  ASSERT_TRUE(ranks.ok()) << ranks.status();
  if (GetParam().peer_memory) {
    auto& communicator = static_cast<const PeerCommunicator&>((*group)->pair(0).target->communicator());
    // Of prompts and captures: a graph that is replayed counts once. How many depends on the text.
    EXPECT_GT(communicator.peer_sums(), 100);
    EXPECT_GT(communicator.peer_messages(), 100);
  }
  // Where near ties may fall otherwise, the group's own text without drafts is the reference.
  const bool golden_lengths = BackendDemands().same_tokens;
  if (!golden_lengths) {
    const auto plain = (*group)->RunRequests(requests, /*speculate=*/false);
    ASSERT_TRUE(plain.ok()) << plain.status();
    for (size_t i = 0; i < prompts.size(); ++i) prompts[i].output_ids = (*plain)[0][i].tokens;
  }
  for (int rank = 0; rank < GetParam().size; ++rank) {
    double chat_tokens = 0, chat_rounds = 0;
    for (size_t i = 0; i < prompts.size(); ++i) {
      SCOPED_TRACE(::testing::Message() << "rank " << rank << ", prompt " << i << " " << prompts[i].kind);
      const GenerationOutcome& outcome = (*ranks)[static_cast<size_t>(rank)][i];
      ASSERT_TRUE(outcome.done) << outcome.status;
      EXPECT_EQ(outcome.tokens, prompts[i].output_ids);
      EXPECT_GT(outcome.finished.drafted_tokens, 0);
      EXPECT_GT(outcome.finished.accepted_tokens, 0);
      if (prompts[i].kind == "chat") {
        for (const RoundReport& round : outcome.rounds) chat_tokens += round.accepted + 1;
        chat_rounds += static_cast<double>(outcome.rounds.size());
      }
      if (!golden_lengths) continue;
      // The counting rule of the last round differs (golden/README.md), so it is not compared.
      const std::vector<int64_t>& golden = prompts[i].acceptance_lengths;
      ASSERT_EQ(outcome.rounds.size(), golden.size());
      for (size_t round = 0; round + 1 < golden.size(); ++round) {
        EXPECT_EQ(outcome.rounds[round].accepted + 1, golden[round]) << "round " << round;
      }
    }
    std::printf("rank %d: chat %.3f tokens per round, golden %.3f\n", rank, chat_tokens / chat_rounds,
                testing::kGoldenChatMean);
    EXPECT_NEAR(chat_tokens / chat_rounds, testing::kGoldenChatMean,
                BackendDemands().chat_mean * testing::kGoldenChatMean);
  }
}

// Bytes of the tiny pair's weights that each rank reads: its share of everything but the norms, and of the
// two key/value heads one where there are more ranks. Numbers from the files' headers.
TEST(ShardedLoading, ARankReadsItsShareOnly) {
  const auto bytes = [](int size, DraftPlacement placement) {
    auto group = RankThreads::Load(size, OptionsFor({size, kNeverSharded, placement})).value();
    std::vector<std::pair<int64_t, int64_t>> read;
    for (int rank = 0; rank < size; ++rank)
      read.emplace_back(group->pair(rank).target_bytes_read, group->pair(rank).draft_bytes_read);
    return read;
  };
  using ::testing::Each;
  using ::testing::ElementsAre;
  using ::testing::Pair;
  EXPECT_THAT(bytes(1, DraftPlacement::kRankZero), ElementsAre(Pair(15974720, 5642240)));
  EXPECT_THAT(bytes(2, DraftPlacement::kRankZero), ElementsAre(Pair(7992352, 5642240), Pair(7992352, 0)));
  EXPECT_THAT(bytes(2, DraftPlacement::kSharded), Each(Pair(7992352, 2824192)));
  EXPECT_THAT(bytes(4, DraftPlacement::kRankZero),
              ElementsAre(Pair(4066704, 5642240), Pair(4066704, 0), Pair(4066704, 0), Pair(4066704, 0)));
}

TEST(ShardedLoading, AGroupThatDoesNotDivideNamesTheKey) {
  const auto error = [](int size, DraftPlacement placement) {
    return std::string(
        RankThreads::Load(size, OptionsFor({size, kNeverSharded, placement})).status().message());
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(error(8, DraftPlacement::kRankZero),
              HasSubstr("tiny-qwen3.6/config.json: num_attention_heads 4 does not divide by the 8 ranks"));
  EXPECT_THAT(
      error(4, DraftPlacement::kSharded),
      HasSubstr("tiny-qwen3.6-dflash/config.json: num_attention_heads 6 does not divide by the 4 ranks"));
}

}  // namespace
}  // namespace dflash
