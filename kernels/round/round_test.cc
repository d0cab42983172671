// The decisions of a round with literal numbers, on every backend, and the same round captured and replayed.
// Acceptance itself is held against the host's walk in worker/verify/accept_rows_test.cc.
#include "kernels/round/round.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/device/graph.h"
#include "kernels/testing/device_matrix.h"

namespace dflash {
namespace {

using ::testing::ElementsAre;

DecodeState State(int32_t anchor, int32_t position, int32_t room, std::vector<int32_t> stops = {}) {
  DecodeState state = {.anchor = anchor, .position = position, .room = room, .stop_count = 0, .sampling = {}};
  state.sampling.temperature = 0.5f;
  state.sampling.seed = static_cast<uint64_t>(anchor);
  for (int32_t token : stops) state.stop_tokens[state.stop_count++] = token;
  return state;
}

class RoundTest : public ::testing::Test {
 protected:
  // A round over device memory that can be run again and again.
  struct Round {
    Round(std::vector<DecodeState> states, std::vector<RoundEntry> entries, std::vector<int32_t> proposals,
          int64_t proposal_cols, const Stream& stream)
        : states(std::move(states), stream),
          entries(std::move(entries), stream),
          proposals(std::move(proposals), stream),
          proposal_cols(proposal_cols),
          tokens(std::vector<int32_t>(kRows, 99), stream),
          positions(std::vector<int64_t>(kRows, 99), stream),
          sampling(std::vector<SamplingParams>(kRows), stream),
          segments(std::vector<Segment>(kRows, {99, 99, 99, 99}), stream),
          row_counts(std::vector<int32_t>(kRows, 99), stream),
          results(std::vector<RoundResult>(kRows), stream) {}
    static constexpr size_t kRows = 48;

    DecodeStates device_states() { return {.data = states.data(), .slots = states.size()}; }
    RoundEntries device_entries() { return {.data = entries.data(), .count = entries.size()}; }
    VerifyArrays rows() {
      return {.tokens = tokens.data(),
              .positions = positions.data(),
              .sampling = sampling.data(),
              .segments = segments.data()};
    }
    absl::Status Make(const Stream& stream) {
      return MakeVerifyRows(device_states(), device_entries(),
                            proposals.size() > 0 ? proposals.data() : nullptr, proposal_cols,
                            /*vocabulary=*/1000, rows(), stream);
    }
    absl::Status Accept(const int32_t* sampled, const Stream& stream) {
      return AcceptRows(device_entries(), rows(), sampled, device_states(), row_counts.data(), results.data(),
                        stream);
    }

    DeviceArray<DecodeState> states;
    DeviceArray<RoundEntry> entries;
    DeviceArray<int32_t> proposals;
    int64_t proposal_cols;
    DeviceArray<int32_t> tokens;
    DeviceArray<int64_t> positions;
    DeviceArray<SamplingParams> sampling;
    DeviceArray<Segment> segments;
    DeviceArray<int32_t> row_counts;
    DeviceArray<RoundResult> results;
  };

  Stream stream_ = *Stream::Create({});
};

TEST_F(RoundTest, DraftBlocksAreTheAnchorAndMasks) {
  DeviceArray<DecodeState> states({State(5, 10, 3), State(6, 20, 0), State(7, 30, 1)}, stream_);
  DeviceArray<int32_t> slots({2, 0, 1}, stream_);
  DeviceArray<int32_t> tokens(std::vector<int32_t>(13, 99), stream_);
  DeviceArray<Segment> segments(std::vector<Segment>(3), stream_);
  ASSERT_TRUE(MakeDraftBlocks({.data = states.data(), .slots = 3}, slots.data(), 3, 4, 77, tokens.data(),
                              segments.data(), stream_)
                  .ok());
  EXPECT_THAT(tokens.ToHost(), ElementsAre(7, 77, 77, 77, 5, 77, 77, 77, 77, 77, 77, 77, 99));
  const std::vector<Segment> made = segments.ToHost();
  const int32_t expected[3][4] = {{2, 0, 4, 30}, {0, 4, 4, 10}, {1, 8, 0, 20}};  // slot 1 has ended
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(made[i].slot, expected[i][0]);
    EXPECT_EQ(made[i].first_row, expected[i][1]);
    EXPECT_EQ(made[i].row_count, expected[i][2]);
    EXPECT_EQ(made[i].start_position, expected[i][3]);
  }
}

TEST_F(RoundTest, VerifyRowsAreCutByTheProposalThePlanAndTheRoom) {
  struct Case {
    const char* what;
    int32_t room, max_drafts;
    std::vector<int32_t> proposal;  // of 4 tokens, empty: none
    int32_t rows;
  };
  const std::vector<Case> cases = {
      {"all of the proposal", 100, 4, {11, 12, 13, 14}, 5},
      {"the plan's limit", 100, 2, {11, 12, 13, 14}, 3},
      {"the last token is the target's own", 3, 4, {11, 12, 13, 14}, 3},
      {"room for one token", 1, 4, {11, 12, 13, 14}, 1},
      {"ended", 0, 4, {11, 12, 13, 14}, 0},
      {"the drafter gave up", 100, 4, {11, -1, 13, 14}, 2},
      {"nothing proposed", 100, 4, {-1, 12, 13, 14}, 1},
      {"outside the vocabulary", 100, 4, {11, 12, 1000, 14}, 3},
      {"plain", 100, 0, {}, 1},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    // The second entry stands behind unused rows of the first.
    Round round({State(3, 40, 9), State(10, 20, c.room)},
                {{.slot = 1,
                  .first_row = 0,
                  .row_capacity = 5,
                  .max_drafts = c.max_drafts,
                  .proposal = c.proposal.empty() ? -1 : 0},
                 {.slot = 0, .first_row = 5, .row_capacity = 1, .max_drafts = 0, .proposal = -1}},
                c.proposal, 4, stream_);
    ASSERT_TRUE(round.Make(stream_).ok());
    const std::vector<int32_t> tokens = round.tokens.ToHost();
    const std::vector<int64_t> positions = round.positions.ToHost();
    const std::vector<SamplingParams> sampling = round.sampling.ToHost();
    for (int32_t row = 0; row < 5; ++row) {
      const auto at = static_cast<size_t>(row);
      const bool feeds = row < c.rows;
      EXPECT_EQ(tokens[at], !feeds ? 0 : row == 0 ? 10 : c.proposal[at - 1]);
      EXPECT_EQ(positions[at], feeds ? 21 + row : 0);
      EXPECT_EQ(sampling[at].temperature, feeds ? 0.5f : 0.0f);
      EXPECT_EQ(sampling[at].seed, feeds ? 10u : 0u);
    }
    EXPECT_EQ(tokens[5], 3);
    EXPECT_EQ(positions[5], 41);
    EXPECT_EQ(tokens[6], 99) << "written beyond the rows of the round";
    const std::vector<Segment> segments = round.segments.ToHost();
    EXPECT_EQ(segments[0].slot, 1);
    EXPECT_EQ(segments[0].row_count, c.rows);
    EXPECT_EQ(segments[0].start_position, 20);
    EXPECT_EQ(segments[1].first_row, 5);
    EXPECT_EQ(segments[1].row_count, 1);
  }
}

TEST_F(RoundTest, MoreDraftsThanLanes) {
  std::vector<int32_t> proposal;
  for (int32_t i = 0; i < 40; ++i) proposal.push_back(100 + i);
  for (int32_t valid : {0, 1, 31, 32, 33, 40}) {
    SCOPED_TRACE(valid);
    std::vector<int32_t> cut = proposal;
    if (valid < 40) cut[static_cast<size_t>(valid)] = -1;
    Round round({State(7, 3, 1000)},
                {{.slot = 0, .first_row = 0, .row_capacity = 41, .max_drafts = 40, .proposal = 0}}, cut, 40,
                stream_);
    ASSERT_TRUE(round.Make(stream_).ok());
    EXPECT_EQ(round.segments.ToHost()[0].row_count, valid + 1);
    std::vector<int32_t> target = proposal;  // the target agrees with everything
    target.resize(Round::kRows, 500);
    DeviceArray<int32_t> sampled(target, stream_);
    ASSERT_TRUE(round.Accept(sampled.data(), stream_).ok());
    const RoundResult result = round.results.ToHost()[0];
    EXPECT_EQ(result.accepted, valid);
    EXPECT_EQ(result.emitted, valid + 1);
    EXPECT_EQ(round.states.ToHost()[0].anchor, valid < 40 ? 100 + valid : 500);
  }
}

TEST_F(RoundTest, AcceptanceMovesTheStateOn) {
  struct Case {
    const char* what;
    int32_t room;
    std::vector<int32_t> sampled;  // after the rows [10, 11, 12, 13]
    int32_t emitted, accepted, anchor, room_left;
  };
  const std::vector<Case> cases = {
      {"a correction", 100, {11, 66, 1, 2}, 2, 1, 66, 98},
      {"all and a bonus", 100, {11, 12, 13, 14}, 4, 3, 14, 96},
      {"none", 100, {66, 12, 13, 14}, 1, 0, 66, 99},
      {"a stop token that was drafted", 100, {11, 12, 1, 2}, 2, 2, 12, 0},
      {"a stop token that was not", 100, {11, 50, 1, 2}, 2, 1, 50, 0},
      {"not a number", 100, {11, -1, 1, 2}, 2, 1, -1, 0},
      {"the room is used up", 4, {11, 66, 1, 2}, 2, 1, 66, 2},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    std::vector<int32_t> stops = {50};
    if (c.accepted == c.emitted) stops.push_back(12);
    Round round({State(10, 20, c.room, stops)},
                {{.slot = 0, .first_row = 2, .row_capacity = 4, .max_drafts = 3, .proposal = 0}},
                {11, 12, 13}, 3, stream_);
    ASSERT_TRUE(round.Make(stream_).ok());
    std::vector<int32_t> sampled = {0, 0};
    sampled.insert(sampled.end(), c.sampled.begin(), c.sampled.end());
    DeviceArray<int32_t> device_sampled(sampled, stream_);
    ASSERT_TRUE(round.Accept(device_sampled.data(), stream_).ok());
    const RoundResult result = round.results.ToHost()[0];
    EXPECT_EQ(result.rows, 4);
    EXPECT_EQ(result.emitted, c.emitted);
    EXPECT_EQ(result.accepted, c.accepted);
    EXPECT_EQ(result.position, 20 + c.emitted);
    EXPECT_EQ(round.row_counts.ToHost()[0], c.emitted);
    const DecodeState state = round.states.ToHost()[0];
    EXPECT_EQ(state.anchor, c.anchor);
    EXPECT_EQ(state.position, 20 + c.emitted);
    EXPECT_EQ(state.room, c.room_left);
  }
}

TEST_F(RoundTest, AnEndedSequenceRunsADeadRound) {
  Round round({State(10, 20, 0), State(30, 5, 8)},
              {{.slot = 0, .first_row = 0, .row_capacity = 2, .max_drafts = 1, .proposal = 0},
               {.slot = 1, .first_row = 2, .row_capacity = 2, .max_drafts = 1, .proposal = 1}},
              {11, 31}, 1, stream_);
  ASSERT_TRUE(round.Make(stream_).ok());
  DeviceArray<int32_t> sampled({11, 11, 31, 32}, stream_);
  ASSERT_TRUE(round.Accept(sampled.data(), stream_).ok());
  EXPECT_EQ(round.results.ToHost()[0].rows, 0);
  EXPECT_EQ(round.results.ToHost()[0].emitted, 0);
  EXPECT_EQ(round.row_counts.ToHost()[0], 0);
  EXPECT_EQ(round.states.ToHost()[0].anchor, 10);
  EXPECT_EQ(round.states.ToHost()[0].position, 20);
  EXPECT_EQ(round.results.ToHost()[1].emitted, 2);
  EXPECT_EQ(round.states.ToHost()[1].anchor, 32);
}

TEST_F(RoundTest, LengthsMoveWithTheCommittedRows) {
  DeviceArray<int32_t> numbers({100, 40, 90, 40, 10, 0, 0, 1, 100, 40}, stream_);  // two slots, five arrays
  int32_t* base = numbers.data();
  const SlotLengths lengths = {.target_kv = base,
                               .gdn_folded = base + 2,
                               .gdn_pending = base + 4,
                               .pending_buffer = base + 6,
                               .draft_context_end = base + 8,
                               .slots = 2};
  DeviceArray<Segment> segments({{0, 0, 6, 100}, {1, 6, 5, 40}}, stream_);
  const SegmentList list = {.data = segments.data(), .count = 2};
  DeviceArray<int32_t> counts({3, 0}, stream_);
  ASSERT_TRUE(AdvanceTargetLengths(list, counts.data(), lengths, stream_).ok());
  EXPECT_THAT(numbers.ToHost(), ElementsAre(103, 40, 100, 40, 3, 0, 1, 0, 100, 40));
  ASSERT_TRUE(AdvanceDraftLengths(list, counts.data(), lengths, stream_).ok());
  EXPECT_THAT(numbers.ToHost(), ElementsAre(103, 40, 100, 40, 3, 0, 1, 0, 103, 40));
}

TEST_F(RoundTest, ReplaysFromTheStateThatTheLastRoundLeft) {
  Round round({State(1, 10, 5)},
              {{.slot = 0, .first_row = 0, .row_capacity = 3, .max_drafts = 2, .proposal = 0}}, {2, 3}, 2,
              stream_);
  DeviceArray<int32_t> sampled({2, 4, 0}, stream_);  // accepts one draft, corrects the other
  auto graph = Graph::Capture(stream_, [&] {
    const absl::Status made = round.Make(stream_);
    return made.ok() ? round.Accept(sampled.data(), stream_) : made;
  });
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_EQ(round.states.ToHost()[0].position, 10) << "capturing must not run anything";
  const int32_t expected[3][3] = {{12, 3, 2}, {14, 1, 2}, {15, 0, 1}};  // position, room, emitted
  for (const auto& [position, room, emitted] : expected) {
    ASSERT_TRUE(graph->Launch(stream_).ok());
    EXPECT_EQ(round.states.ToHost()[0].position, position);
    EXPECT_EQ(round.states.ToHost()[0].room, room);
    EXPECT_EQ(round.results.ToHost()[0].emitted, emitted);
  }
  ASSERT_TRUE(graph->Launch(stream_).ok());
  EXPECT_EQ(round.results.ToHost()[0].rows, 0) << "the room is used up";
}

TEST_F(RoundTest, RefusesWhatCannotBe) {
  Round round({State(1, 10, 5)},
              {{.slot = 0, .first_row = 0, .row_capacity = 1, .max_drafts = 0, .proposal = -1}}, {}, 0,
              stream_);
  EXPECT_FALSE(MakeVerifyRows({}, round.device_entries(), nullptr, 0, 10, round.rows(), stream_).ok());
  EXPECT_FALSE(MakeVerifyRows(round.device_states(), {.data = nullptr, .count = 1}, nullptr, 0, 10,
                              round.rows(), stream_)
                   .ok());
  EXPECT_FALSE(
      MakeVerifyRows(round.device_states(), round.device_entries(), nullptr, 0, 0, round.rows(), stream_)
          .ok());
  EXPECT_FALSE(AdvanceDraftLengths({}, nullptr, {}, stream_).ok());
}

}  // namespace
}  // namespace dflash
