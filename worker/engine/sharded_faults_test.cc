// The classic mistakes of tensor parallelism, planted on purpose: each must be seen by what sharded_test.cc
// compares.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "gtest/gtest.h"
#include "kernels/device/buffer.h"
#include "worker/comm/forwarding_communicator.h"
#include "worker/model/state_export.h"
#include "worker/model/testing/temporary_folder.h"
#include "worker/testing/rank_threads.h"

namespace dflash {
namespace {

using testing::GenerationOutcome;
using testing::GoldenPrompt;
using testing::RankThreads;
using testing::TinyPair;
using testing::TinyPairOptions;

constexpr int64_t kNeverSharded = std::numeric_limits<int64_t>::max();
constexpr int64_t kHidden = 256, kTaps = 3;  // of the tiny pair

// Hands everything on; faults override what they break.
class Wrapper : public ForwardingCommunicator {
 public:
  explicit Wrapper(std::unique_ptr<Communicator> inner)
      : ForwardingCommunicator(inner.get()), owned_(std::move(inner)) {}

 private:
  const std::unique_ptr<Communicator> owned_;
};

// One all-reduce of every seventeen is missing: one product of a forward pass over eight layers.
class MissingAllReduce final : public Wrapper {
 public:
  using Wrapper::Wrapper;
  absl::Status AllReduce(void* data, int64_t count, DType dtype, const Stream& stream) override {
    return calls_++ % 17 == 5 ? absl::OkStatus() : Wrapper::AllReduce(data, count, dtype, stream);
  }

 private:
  int64_t calls_ = 0;
};

// The rows of one gather come in the reverse order of ranks.
class ReversedGather final : public Wrapper {
 public:
  ReversedGather(std::unique_ptr<Communicator> inner, int64_t bytes)
      : Wrapper(std::move(inner)), bytes_(bytes) {}
  absl::Status AllGather(const void* send, void* receive, int64_t bytes, const Stream& stream) override {
    DFLASH_RETURN_IF_ERROR(Wrapper::AllGather(send, receive, bytes, stream));
    if (bytes != bytes_) return absl::OkStatus();
    auto* parts = static_cast<char*>(receive);
    for (int rank = 0; rank < size() / 2; ++rank)
      std::swap_ranges(parts + rank * bytes, parts + (rank + 1) * bytes, parts + (size() - 1 - rank) * bytes);
    return absl::OkStatus();
  }

 private:
  int64_t bytes_;
};

// Sums of all-reduces begin with the last rank.
class ReversedSums final : public Wrapper {
 public:
  using Wrapper::Wrapper;
  absl::Status AllReduce(void* data, int64_t count, DType dtype, const Stream& stream) override {
    if (dtype != DType::kF32) return absl::UnimplementedError("a sum of other than float32");
    std::vector<float> all(static_cast<size_t>(count * size()));
    DFLASH_RETURN_IF_ERROR(Wrapper::AllGather(data, all.data(), count * int64_t{sizeof(float)}, stream));
    for (int64_t i = 0; i < count; ++i) {
      float sum = all[static_cast<size_t>((size() - 1) * count + i)];
      for (int64_t rank = size() - 2; rank >= 0; --rank) sum += all[static_cast<size_t>(rank * count + i)];
      static_cast<float*>(data)[i] = sum;
    }
    return absl::OkStatus();
  }
};

std::vector<GoldenPrompt> ChatPrompts(size_t count) {
  std::vector<GoldenPrompt> prompts = testing::LoadGoldenPrompts().value();
  std::erase_if(prompts, [](const GoldenPrompt& prompt) { return prompt.kind != "chat"; });
  prompts.resize(count);
  return prompts;
}

// Each prompt alone, on rank 0.
std::vector<GenerationOutcome> Replay(RankThreads& group, const std::vector<GoldenPrompt>& prompts) {
  std::vector<GenerationOutcome> outcomes;
  for (const GoldenPrompt& prompt : prompts) {
    auto ranks = group.RunRequests({testing::GoldenRequest(prompt)});
    EXPECT_TRUE(ranks.ok()) << ranks.status();
    outcomes.push_back((*ranks)[0][0]);
    EXPECT_TRUE(outcomes.back().done) << outcomes.back().status;
  }
  return outcomes;
}

bool SameTokens(const std::vector<GenerationOutcome>& outcomes, const std::vector<GoldenPrompt>& prompts) {
  for (size_t i = 0; i < prompts.size(); ++i) {
    if (outcomes[i].tokens != prompts[i].output_ids) return false;
  }
  return true;
}

bool SameAcceptance(const std::vector<GenerationOutcome>& outcomes,
                    const std::vector<GoldenPrompt>& prompts) {
  for (size_t i = 0; i < prompts.size(); ++i) {
    const std::vector<int64_t>& golden = prompts[i].acceptance_lengths;
    if (outcomes[i].rounds.size() != golden.size()) return false;
    for (size_t round = 0; round + 1 < golden.size(); ++round) {
      if (outcomes[i].rounds[round].accepted + 1 != golden[round]) return false;
    }
  }
  return true;
}

TinyPairOptions OptionsFor(int64_t shard_residual_rows) {
  TinyPairOptions options;
  options.threads = 1;
  options.shard_residual_rows = shard_residual_rows;
  return options;
}

TEST(ShardedFaultsTest, NoFaultIsNoDifference) {
  const std::vector<GoldenPrompt> prompts = ChatPrompts(3);
  auto group = RankThreads::Load(2, OptionsFor(1),
                                 [](auto inner) { return std::make_unique<Wrapper>(std::move(inner)); });
  ASSERT_TRUE(group.ok()) << group.status();
  const std::vector<GenerationOutcome> outcomes = Replay(**group, prompts);
  EXPECT_TRUE(SameTokens(outcomes, prompts));
  EXPECT_TRUE(SameAcceptance(outcomes, prompts));
}

TEST(ShardedFaultsTest, AMissingAllReduceChangesTheText) {
  const std::vector<GoldenPrompt> prompts = ChatPrompts(3);
  auto group = RankThreads::Load(2, OptionsFor(kNeverSharded), [](auto inner) {
    return std::make_unique<MissingAllReduce>(std::move(inner));
  });
  ASSERT_TRUE(group.ok()) << group.status();
  EXPECT_FALSE(SameTokens(Replay(**group, prompts), prompts));
}

// Taps of the prompt in the wrong order cost acceptance and nothing else: the text is the target's.
TEST(ShardedFaultsTest, AWrongOrderOfTapRowsChangesTheAcceptance) {
  const std::vector<GoldenPrompt> prompts = ChatPrompts(1);
  const auto rows = static_cast<int64_t>(prompts[0].prompt_ids.size());
  const int64_t bytes = (rows + 1) / 2 * kTaps * kHidden * int64_t{sizeof(float)};
  auto group = RankThreads::Load(2, OptionsFor(1), [&](auto inner) {
    return std::make_unique<ReversedGather>(std::move(inner), bytes);
  });
  ASSERT_TRUE(group.ok()) << group.status();
  const std::vector<GenerationOutcome> outcomes = Replay(**group, prompts);
  EXPECT_TRUE(SameTokens(outcomes, prompts));
  EXPECT_FALSE(SameAcceptance(outcomes, prompts));
}

// A copy of the tiny target in which a rank of two that takes its three ranges of in_proj_qkv gets the rows
// that it would have got by taking one contiguous half.
void WriteContiguousSlices(const TemporaryFolder& folder) {
  const std::string source = testing::SourcePath("models/tiny-qwen3.6");
  const SafetensorsFolder weights = SafetensorsFolder::Open(source).value();
  for (const auto& entry : std::filesystem::directory_iterator(source)) {
    std::ifstream in(entry.path(), std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    for (const auto& [name, stored] : weights.tensors()) {
      if (stored.file->path() != entry.path() || !name.ends_with("in_proj_qkv.weight") ||
          name.starts_with("mtp.")) {
        continue;
      }
      const int64_t keys = 128, values = 384;
      ASSERT_EQ(stored.tensor->rows(), 2 * keys + values);
      const auto row_bytes = static_cast<size_t>(stored.tensor->bytes / stored.tensor->rows());
      const std::string old =
          bytes.substr(static_cast<size_t>(stored.tensor->offset), static_cast<size_t>(stored.tensor->bytes));
      size_t from = 0;
      for (int64_t rank = 0; rank < 2; ++rank) {
        const auto take = [&](int64_t offset, int64_t count) {
          for (int64_t row = 0; row < count / 2; ++row, ++from) {
            const auto to = static_cast<size_t>(stored.tensor->offset) +
                            static_cast<size_t>(offset + rank * (count / 2) + row) * row_bytes;
            bytes.replace(to, row_bytes, old, from * row_bytes, row_bytes);
          }
        };
        take(0, keys);
        take(keys, keys);
        take(2 * keys, values);
      }
    }
    folder.Write(entry.path().filename().string(), bytes);
  }
}

TEST(ShardedFaultsTest, AContiguousSliceOfTheInputProjectionChangesTheText) {
  TemporaryFolder folder;
  WriteContiguousSlices(folder);
  const std::vector<GoldenPrompt> prompts = ChatPrompts(3);
  TinyPairOptions options = OptionsFor(kNeverSharded);
  options.target_dir = folder.path();
  auto group = RankThreads::Load(2, options);
  ASSERT_TRUE(group.ok()) << group.status();
  EXPECT_FALSE(SameTokens(Replay(**group, prompts), prompts));
}

// Everything that a prompt and a verification leave behind on every rank, bit for bit.
std::vector<std::vector<std::vector<float>>> StateAfterTwoSteps(int size, int64_t shard_residual_rows,
                                                                const RankThreads::Wrap& wrap = {}) {
  const GoldenPrompt prompt = testing::LoadGoldenPrompts().value()[16];
  std::vector<std::vector<std::vector<float>>> states(static_cast<size_t>(size));
  auto group = RankThreads::Load(size, OptionsFor(shard_residual_rows), wrap);
  EXPECT_TRUE(group.ok()) << group.status();
  const absl::Status status = (*group)->Run([&](int rank, TinyPair& pair) -> absl::Status {
    std::vector<std::vector<float>>& state = states[static_cast<size_t>(rank)];
    const auto length = static_cast<int64_t>(prompt.prompt_ids.size());
    DFLASH_ASSIGN_OR_RETURN(const int32_t slot, pair.table->Open());
    DFLASH_RETURN_IF_ERROR(pair.table->Reserve(slot, length + 16));
    DFLASH_RETURN_IF_ERROR(pair.target->Open(slot));
    const auto keep = [&](const ForwardResult& result) -> absl::Status {
      DFLASH_ASSIGN_OR_RETURN(state.emplace_back(), ActivationsToHost(result.taps, *pair.stream));
      DFLASH_ASSIGN_OR_RETURN(state.emplace_back(), ActivationsToHost(result.logits, *pair.stream));
      return absl::OkStatus();
    };
    SequenceRows rows = {.slot = slot,
                         .phase = Phase::kPrefill,
                         .start_position = 0,
                         .tokens = prompt.prompt_ids,
                         .parents = {},
                         .last_logits = true};
    DFLASH_ASSIGN_OR_RETURN(const ForwardResult prefilled, pair.target->Forward({.sequences = {rows}}));
    DFLASH_RETURN_IF_ERROR(keep(prefilled));
    rows.phase = Phase::kVerify;
    rows.start_position = length;
    rows.tokens.assign(prompt.output_ids.begin(), prompt.output_ids.begin() + 15);
    DFLASH_ASSIGN_OR_RETURN(const ForwardResult verified, pair.target->Forward({.sequences = {rows}}));
    DFLASH_RETURN_IF_ERROR(keep(verified));
    DFLASH_RETURN_IF_ERROR(pair.target->Commit({{.slot = slot, .rows = 9}}));
    DFLASH_ASSIGN_OR_RETURN(const auto stores, pair.target->ExportState(slot));
    state.insert(state.end(), stores.begin(), stores.end());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return states;
}

TEST(ResidualLayoutsTest, LeaveTheSameBits) {
  for (int size : {2, 4}) {
    const auto replicated = StateAfterTwoSteps(size, kNeverSharded);
    ASSERT_EQ(replicated[0].size(),
              4u + 2 * 2 + 6 * 2);  // taps and logits, keys and values, S and conv states
    EXPECT_EQ(replicated, StateAfterTwoSteps(size, 1)) << size << " ranks";
  }
}

TEST(ResidualLayoutsTest, SumsInAnotherOrderAreSeen) {
  EXPECT_NE(StateAfterTwoSteps(4, kNeverSharded,
                               [](auto inner) { return std::make_unique<ReversedSums>(std::move(inner)); }),
            StateAfterTwoSteps(4, 1));
}

}  // namespace
}  // namespace dflash
