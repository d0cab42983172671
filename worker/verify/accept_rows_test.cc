// The device's acceptance against the host's: every chain of up to three drafts over three tokens, every
// answer of the target, every room, with and without stop tokens. So what law_test.cc proves of Walk holds
// for what decoding runs.
#include <algorithm>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/round/round.h"
#include "kernels/testing/device_matrix.h"
#include "worker/verify/walk.h"

namespace dflash {
namespace {

constexpr int32_t kVocabulary = 3;
constexpr int32_t kMaxDrafts = 3;
constexpr int32_t kRows = kMaxDrafts + 1;

// Digits of `number` to the base kVocabulary + 1; the last digit stands for -1.
std::vector<int32_t> Tokens(int64_t number, int32_t count) {
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < count; ++i, number /= kVocabulary + 1) {
    const auto digit = static_cast<int32_t>(number % (kVocabulary + 1));
    tokens.push_back(digit == kVocabulary ? -1 : digit);
  }
  return tokens;
}

TEST(AcceptRowsTest, IsTheWalkAlongTheChain) {
  const Stream stream = *Stream::Create({});
  const int64_t drafts_count = 4 * 4 * 4, samples_count = 4 * 4 * 4 * 4;
  int64_t accepted = 0;
  for (int32_t room : {1, 2, 3, 4, 9}) {
    for (const std::vector<int32_t>& stops : {std::vector<int32_t>{}, {1}, {2, 0}}) {
      // All combinations are the sequences of one round.
      const int64_t count = drafts_count * samples_count;
      std::vector<DecodeState> states;
      std::vector<RoundEntry> entries;
      std::vector<int32_t> proposals, sampled;
      for (int64_t i = 0; i < count; ++i) {
        DecodeState state = {.anchor = 0, .position = 7, .room = room, .stop_count = 0, .sampling = {}};
        for (int32_t stop : stops) state.stop_tokens[state.stop_count++] = stop;
        states.push_back(state);
        entries.push_back({.slot = static_cast<int32_t>(i),
                           .first_row = static_cast<int32_t>(i) * kRows,
                           .row_capacity = kRows,
                           .max_drafts = kMaxDrafts,
                           .proposal = static_cast<int32_t>(i)});
        for (int32_t token : Tokens(i % drafts_count, kMaxDrafts)) proposals.push_back(token);
        for (int32_t token : Tokens(i / drafts_count, kRows)) sampled.push_back(token);
      }
      const auto n = static_cast<size_t>(count);
      DeviceArray<DecodeState> device_states(states, stream);
      DeviceArray<RoundEntry> device_entries(entries, stream);
      DeviceArray<int32_t> device_proposals(proposals, stream), device_sampled(sampled, stream);
      DeviceArray<int32_t> tokens(std::vector<int32_t>(n * kRows), stream),
          row_counts(std::vector<int32_t>(n), stream);
      DeviceArray<int64_t> positions(std::vector<int64_t>(n * kRows), stream);
      DeviceArray<SamplingParams> sampling(std::vector<SamplingParams>(n * kRows), stream);
      DeviceArray<Segment> segments(std::vector<Segment>(n), stream);
      DeviceArray<RoundResult> device_results(std::vector<RoundResult>(n), stream);
      const VerifyArrays rows = {.tokens = tokens.data(),
                                 .positions = positions.data(),
                                 .sampling = sampling.data(),
                                 .segments = segments.data()};
      const DecodeStates all_states = {.data = device_states.data(), .slots = count};
      const RoundEntries all_entries = {.data = device_entries.data(), .count = count};
      ASSERT_TRUE(MakeVerifyRows(all_states, all_entries, device_proposals.data(), kMaxDrafts, kVocabulary,
                                 rows, stream)
                      .ok());
      ASSERT_TRUE(AcceptRows(all_entries, rows, device_sampled.data(), all_states, row_counts.data(),
                             device_results.data(), stream)
                      .ok());
      const std::vector<RoundResult> results = device_results.ToHost();
      const std::vector<DecodeState> after = device_states.ToHost();
      for (size_t i = 0; i < n; ++i) {
        std::vector<int32_t> drafts = Tokens(static_cast<int64_t>(i) % drafts_count, kMaxDrafts);
        size_t used = 0;
        while (used < drafts.size() && used + 1 < static_cast<size_t>(room) && drafts[used] >= 0) ++used;
        drafts.resize(used);
        std::vector<int32_t> target = Tokens(static_cast<int64_t>(i) / drafts_count, kRows);
        target.resize(used + 1);
        const auto is_stop = [&](int32_t token) {
          return token < 0 || std::find(stops.begin(), stops.end(), token) != stops.end();
        };
        const WalkResult walk = Walk(MakeChain(0, drafts), target, is_stop, room);
        const auto emitted = static_cast<int32_t>(walk.emitted.size());
        ASSERT_EQ(results[i].rows, static_cast<int32_t>(used) + 1) << i;
        ASSERT_EQ(results[i].emitted, emitted) << i;
        ASSERT_EQ(results[i].emitted, static_cast<int32_t>(walk.path.size())) << i;
        ASSERT_EQ(results[i].accepted, walk.accepted) << i;
        ASSERT_EQ(results[i].position, 7 + emitted) << i;
        ASSERT_EQ(after[i].anchor, walk.emitted.back()) << i;
        ASSERT_EQ(after[i].position, 7 + emitted) << i;
        ASSERT_EQ(after[i].room, walk.stopped ? 0 : room - emitted) << i;
        accepted += walk.accepted;
      }
    }
  }
  EXPECT_GT(accepted, 0);
}

}  // namespace
}  // namespace dflash
