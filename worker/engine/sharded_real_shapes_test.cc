// Two ranks that share one GPU against one rank, at the shapes of the 27B target (8 layers, random weights):
// logits and taps of a prompt and of a verification agree as far as bf16 does.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#include "base/status.h"
#include "gtest/gtest.h"
#include "kernels/device/buffer.h"
#include "worker/model/state_export.h"
#include "worker/testing/rank_threads.h"

namespace dflash {
namespace {

using testing::RankThreads;
using testing::TinyPair;
using testing::TinyPairOptions;

constexpr int64_t kPrompt = 200, kRows = 16, kCommitted = 7;
// Partial sums are rounded to bf16 on every rank before they are added: about sqrt(16 sums) * 2^-9 of the
// residual.
constexpr double kTolerance = 0.04;  // measured on an H200: 0.027

// What the ranks compute, logits put together over the vocabulary.
struct Result {
  std::vector<float> prefill_taps, verify_taps, second_taps;
  std::vector<std::vector<float>> logits;  // of the prompt's last row, then of each verified row
};

Result RunGroup(int size, int64_t shard_residual_rows) {
  TinyPairOptions options;
  options.threads = 1;
  options.slots = 1;
  options.max_tokens = 512;
  options.target_dir = testing::SourcePath("tests/shapes/qwen3_6_27b_8_layers");
  options.draft_dir = testing::SourcePath("tests/shapes/qwen3_6_27b_8_layers_dflash");
  options.random_weights = 3;
  options.shard_residual_rows = shard_residual_rows;
  auto group = RankThreads::Load(size, options);
  EXPECT_TRUE(group.ok()) << group.status();
  if (!group.ok()) return {};
  std::mt19937 generator(9);
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < kPrompt + 2 * kRows; ++i)
    tokens.push_back(static_cast<int32_t>(generator() % 248000));
  Result result;
  std::vector<std::vector<std::vector<float>>> parts(static_cast<size_t>(size));  // rank, row
  const absl::Status status = (*group)->Run([&](int rank, TinyPair& pair) -> absl::Status {
    DFLASH_ASSIGN_OR_RETURN(const int32_t slot, pair.table->Open());
    DFLASH_RETURN_IF_ERROR(pair.table->Reserve(slot, kPrompt + 2 * kRows));
    DFLASH_RETURN_IF_ERROR(pair.target->Open(slot));
    const auto run = [&](Phase phase, int64_t position, int64_t first, int64_t count,
                         std::vector<float>& taps) -> absl::Status {
      SequenceRows rows;
      rows.slot = slot;
      rows.phase = phase;
      rows.start_position = position;
      rows.tokens.assign(tokens.begin() + first, tokens.begin() + first + count);
      rows.last_logits = true;
      DFLASH_ASSIGN_OR_RETURN(const ForwardResult forward, pair.target->Forward({.sequences = {rows}}));
      DFLASH_ASSIGN_OR_RETURN(const std::vector<float> own, ActivationsToHost(forward.logits, *pair.stream));
      for (auto row = own.begin(); row != own.end(); row += forward.logits.cols)
        parts[static_cast<size_t>(rank)].emplace_back(row, row + forward.logits.cols);
      DFLASH_ASSIGN_OR_RETURN(taps, ActivationsToHost(forward.taps, *pair.stream));
      return absl::OkStatus();
    };
    std::vector<float> none;
    DFLASH_RETURN_IF_ERROR(run(Phase::kPrefill, 0, 0, kPrompt, rank == 0 ? result.prefill_taps : none));
    DFLASH_RETURN_IF_ERROR(
        run(Phase::kVerify, kPrompt, kPrompt, kRows, rank == 0 ? result.verify_taps : none));
    DFLASH_RETURN_IF_ERROR(pair.target->Commit({{.slot = slot, .rows = kCommitted}}));
    DFLASH_RETURN_IF_ERROR(run(Phase::kVerify, kPrompt + kCommitted, kPrompt + kRows, kRows,
                               rank == 0 ? result.second_taps : none));
    return pair.target->Commit({{.slot = slot, .rows = 1}});
  });
  EXPECT_TRUE(status.ok()) << status;
  if (!status.ok()) return {};
  for (size_t row = 0; row < parts[0].size(); ++row) {
    std::vector<float>& whole = result.logits.emplace_back();
    for (const auto& rank : parts) whole.insert(whole.end(), rank[row].begin(), rank[row].end());
  }
  return result;
}

double RelativeL2(const std::vector<float>& actual, const std::vector<float>& expected) {
  EXPECT_EQ(actual.size(), expected.size());
  double error = 0, norm = 0;
  for (size_t i = 0; i < expected.size() && i < actual.size(); ++i) {
    const double difference = static_cast<double>(actual[i]) - static_cast<double>(expected[i]);
    error += difference * difference;
    norm += static_cast<double>(expected[i]) * static_cast<double>(expected[i]);
  }
  EXPECT_GT(norm, 0);
  return std::sqrt(error / norm);
}

TEST(ShardedRealShapesTest, TwoRanksAgreeWithOne) {
  const Result one = RunGroup(1, 0);
  ASSERT_EQ(one.logits.size(), static_cast<size_t>(1 + 2 * kRows));
  Result replicated;
  for (int64_t shard_residual_rows : {std::numeric_limits<int64_t>::max(), int64_t{1}}) {
    const Result two = RunGroup(2, shard_residual_rows);
    ASSERT_EQ(two.logits.size(), one.logits.size());
    const double prefill = RelativeL2(two.prefill_taps, one.prefill_taps);
    const double verify = RelativeL2(two.verify_taps, one.verify_taps);
    const double second = RelativeL2(two.second_taps, one.second_taps);
    double worst = 0;
    for (size_t row = 0; row < one.logits.size(); ++row)
      worst = std::max(worst, RelativeL2(two.logits[row], one.logits[row]));
    std::printf(
        "residual sharded from %lld rows: taps %.2e %.2e %.2e, worst row of logits %.2e (relative L2)\n",
        static_cast<long long>(shard_residual_rows), prefill, verify, second, worst);
    for (double error : {prefill, verify, second, worst}) EXPECT_LT(error, kTolerance);
    if (shard_residual_rows != 1) {
      replicated = two;
    } else {  // both layouts: the same bits
      EXPECT_EQ(two.logits, replicated.logits);
      EXPECT_EQ(two.prefill_taps, replicated.prefill_taps);
      EXPECT_EQ(two.second_taps, replicated.second_taps);
    }
  }
}

}  // namespace
}  // namespace dflash
