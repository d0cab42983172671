// How many drafts a round wants of a proposal changes none of them: what is left out of the last layer and of
// the head are rows that nobody asked for.
#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device_matrix.h"
#include "worker/draft/dflash_drafter.h"
#include "worker/model/state_export.h"
#include "worker/testing/tiny_pair.h"

namespace dflash {
namespace {

using testing::GoldenPrompt;
using testing::LoadGoldenPrompts;
using testing::LoadTinyPair;
using testing::TinyPair;

constexpr int32_t kUnwritten = -77;

struct Proposed {
  std::vector<int32_t> tokens;
  std::vector<float> confidences, logits;
};

class ProposalDepthTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<TinyPair> pair = LoadTinyPair();
    ASSERT_TRUE(pair.ok()) << pair.status();
    pair_ = *std::move(pair);
    const std::vector<GoldenPrompt> prompts = *LoadGoldenPrompts();
    states_.resize(static_cast<size_t>(pair_.table->slots()));
    for (size_t i = 0; i < 3; ++i) Open(prompts[i]);
  }

  // A sequence whose prompt has been read; its anchor is the first golden token.
  void Open(const GoldenPrompt& prompt) {
    const auto count = static_cast<int64_t>(prompt.prompt_ids.size());
    const absl::StatusOr<int32_t> slot = pair_.table->Open();
    ASSERT_TRUE(slot.ok()) << slot.status();
    ASSERT_TRUE(pair_.table->Reserve(*slot, count + 16).ok());
    ASSERT_TRUE(pair_.target->Open(*slot).ok() && pair_.drafter->Open(*slot, 0).ok());
    const absl::StatusOr<ForwardResult> result =
        pair_.target->Forward({.sequences = {{.slot = *slot,
                                              .phase = Phase::kPrefill,
                                              .start_position = 0,
                                              .tokens = prompt.prompt_ids,
                                              .parents = {},
                                              .last_logits = true}}});
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_TRUE(pair_.drafter
                    ->Ingest(result->taps, {{.slot = *slot,
                                             .phase = Phase::kPrefill,
                                             .first_row = 0,
                                             .row_count = count,
                                             .start_position = 0}})
                    .ok());
    DecodeState& state = states_[static_cast<size_t>(*slot)];
    state.anchor = prompt.output_ids[0];
    state.position = static_cast<int32_t>(count);
    state.room = 100;
    slots_.push_back(*slot);
    golden_.emplace_back(prompt.output_ids.begin() + 1, prompt.output_ids.end());
  }

  absl::Status Propose(const std::vector<int32_t>& slots, int64_t depth, Proposed* proposed) {
    const Stream& stream = *pair_.stream;
    const auto count = static_cast<int64_t>(slots.size());
    const auto room = static_cast<size_t>(count * pair_.drafter->max_drafts());
    DeviceArray<DecodeState> states(states_, stream);
    DeviceArray<int32_t> list(slots, stream), tokens(std::vector<int32_t>(room, kUnwritten), stream);
    DeviceArray<float> confidences(std::vector<float>(room, kUnwritten), stream);
    const absl::Status status =
        pair_.drafter->Propose({.data = states.data(), .slots = states.size()}, list.data(), count,
                               {.depth = depth, .tokens = tokens.data(), .confidences = confidences.data()});
    if (!status.ok()) return status;
    proposed->tokens = tokens.ToHost();
    proposed->confidences = confidences.ToHost();
    const ConstMatrixView logits = pair_.drafter->last_draft_logits();
    EXPECT_EQ(logits.rows, count * depth);
    absl::StatusOr<std::vector<float>> values = ActivationsToHost(logits, stream);
    if (values.ok()) proposed->logits = *std::move(values);
    return values.status();
  }

  TinyPair pair_;
  std::vector<DecodeState> states_;
  std::vector<int32_t> slots_;
  std::vector<std::vector<int32_t>> golden_;  // what comes after the anchors
};

TEST_F(ProposalDepthTest, LeavesTheProposalsThatAreWantedAsTheyAre) {
  const auto drafts = static_cast<size_t>(pair_.drafter->max_drafts());
  Proposed whole;
  ASSERT_TRUE(Propose(slots_, pair_.drafter->max_drafts(), &whole).ok());
  size_t accepted = 0;
  for (size_t i = 0; i < slots_.size(); ++i) {
    for (size_t j = 0; j < drafts && whole.tokens[i * drafts + j] == golden_[i][j]; ++j) ++accepted;
  }
  EXPECT_GT(accepted, 0u);
  const size_t vocabulary = whole.logits.size() / whole.tokens.size();

  for (size_t depth = 1; depth <= drafts; ++depth) {
    for (size_t first = 0; first <= slots_.size(); ++first) {  // each alone, and all together
      const bool all = first == slots_.size();
      SCOPED_TRACE(std::to_string(depth) + " wanted" + (all ? "" : " of " + std::to_string(first)));
      Proposed proposed;
      ASSERT_TRUE(
          Propose(all ? slots_ : std::vector<int32_t>{slots_[first]}, static_cast<int64_t>(depth), &proposed)
              .ok());
      const size_t sequences = all ? slots_.size() : 1;
      for (size_t i = 0; i < sequences; ++i) {
        for (size_t j = 0; j < depth; ++j) {
          const size_t at = i * depth + j, expected = (all ? i : first) * drafts + j;
          ASSERT_EQ(proposed.tokens[at], whole.tokens[expected]) << j;
          ASSERT_TRUE(SameBits(proposed.confidences[at], whole.confidences[expected])) << j;
          for (size_t v = 0; v < vocabulary; ++v) {
            ASSERT_TRUE(
                SameBits(proposed.logits[at * vocabulary + v], whole.logits[expected * vocabulary + v]))
                << j << ", token " << v;
          }
        }
      }
      for (size_t at = sequences * depth; at < proposed.tokens.size(); ++at) {
        ASSERT_EQ(proposed.tokens[at], kUnwritten);
        ASSERT_EQ(proposed.confidences[at], kUnwritten);
      }
    }
  }
}

TEST_F(ProposalDepthTest, IsBounded) {
  Proposed proposed;
  for (int64_t depth : {int64_t{-1}, int64_t{0}, pair_.drafter->max_drafts() + 1}) {
    EXPECT_EQ(Propose(slots_, depth, &proposed).code(), absl::StatusCode::kInvalidArgument) << depth;
  }
}

}  // namespace
}  // namespace dflash
