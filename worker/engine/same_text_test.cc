// Same text: the output is a function of (weights, prompt, parameters, seed), never of the drafter or of
// whether there is one. Tests named *Full run the whole matrix (label slow).
#include <algorithm>
#include <cstdio>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device/buffer.h"
#include "kernels/round/round.h"
#include "worker/testing/tiny_pair.h"

namespace dflash {
namespace {

using testing::GenerationOutcome;
using testing::GoldenPrompt;
using testing::GoldenRequest;
using testing::LoadGoldenPrompts;
using testing::LoadTinyPair;
using testing::MakeEngine;
using testing::RunAll;
using testing::TinyPair;

// Keeps the books of a context that it does not need, and decides on the host what to propose.
class ContextFreeDrafter : public Drafter {
 public:
  explicit ContextFreeDrafter(TinyPair& pair) : table_(pair.table.get()), stream_(pair.stream.get()) {}
  int64_t max_drafts() const override { return kMaxDrafts; }
  bool is_capturable() const override { return false; }
  absl::Status Ingest(ConstMatrixView, const std::vector<CommittedRows>& rows) override {
    for (const CommittedRows& sequence : rows) {
      const absl::Status status = table_->AdvanceDraftContext(sequence.slot, sequence.row_count);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  absl::Status IngestVerified(ConstMatrixView, SegmentList segments, const int32_t* row_counts) override {
    return AdvanceDraftLengths(segments, row_counts, table_->device_lengths(), *stream_);
  }
  absl::Status Open(int32_t slot, int64_t start) override { return table_->OpenDraftContext(slot, start); }

 protected:
  static constexpr int64_t kMaxDrafts = 15;

  // Writes one proposal per slot, as much of it as is wanted; -1 ends the shorter ones.
  absl::Status Write(std::vector<std::vector<int32_t>> proposals, const Proposals& to) {
    std::vector<int32_t> all;
    for (std::vector<int32_t>& proposal : proposals) {
      proposal.resize(static_cast<size_t>(to.depth), -1);
      all.insert(all.end(), proposal.begin(), proposal.end());
    }
    return CopyToDevice(to.tokens, all.data(), static_cast<int64_t>(all.size() * sizeof(int32_t)), *stream_);
  }

  SequenceTable* table_;
  const Stream* stream_;
};

class RandomDrafter final : public ContextFreeDrafter {
 public:
  using ContextFreeDrafter::ContextFreeDrafter;
  absl::Status Propose(DecodeStates, const int32_t*, int64_t count, const Proposals& to) override {
    std::vector<std::vector<int32_t>> proposals(static_cast<size_t>(count));
    for (std::vector<int32_t>& proposal : proposals) {
      proposal.resize(random_() % 16);
      for (int32_t& token : proposal) token = static_cast<int32_t>(random_() % 4096);
    }
    return Write(std::move(proposals), to);
  }

 private:
  std::mt19937 random_{7};
};

// Knows the answer of the one request that runs.
class OracleDrafter final : public ContextFreeDrafter {
 public:
  using ContextFreeDrafter::ContextFreeDrafter;
  void Expect(int64_t prompt_size, std::vector<int32_t> output) {
    prompt_size_ = prompt_size;
    output_ = std::move(output);
  }
  absl::Status Propose(DecodeStates states, const int32_t* slots, int64_t, const Proposals& to) override {
    int32_t slot = 0;
    DecodeState state;
    absl::Status status = CopyToHost(&slot, slots, sizeof(slot), *stream_);
    if (status.ok()) status = CopyToHost(&state, states.data + slot, sizeof(state), *stream_);
    if (!status.ok()) return status;
    const auto next = static_cast<size_t>(state.position - prompt_size_ + 1);
    const size_t end = std::min(next + static_cast<size_t>(kMaxDrafts), output_.size());
    return Write({{output_.begin() + static_cast<int64_t>(std::min(next, end)),
                   output_.begin() + static_cast<int64_t>(end)}},
                 to);
  }

 private:
  int64_t prompt_size_ = 0;
  std::vector<int32_t> output_;
};

struct Sampled {
  GoldenPrompt prompt;
  SamplingParams sampling;
};

std::vector<Sampled> Matrix(size_t prompts, int seeds) {
  std::vector<Sampled> matrix;
  std::vector<GoldenPrompt> golden = *LoadGoldenPrompts();
  // Every kind is represented: chat prompts first, code from the end.
  for (size_t i = 0; i < prompts; ++i) {
    const GoldenPrompt& prompt = i % 2 == 0 ? golden[i / 2] : golden[golden.size() - 1 - i / 2];
    matrix.push_back({prompt, {}});
    for (float temperature : {0.7f, 1.0f}) {
      for (int seed = 1; seed <= seeds; ++seed) {
        SamplingParams sampling = {.temperature = temperature,
                                   .top_k = 0,
                                   .top_p = 1,
                                   .min_p = 0,
                                   .seed = static_cast<uint64_t>(seed) * 1000003};
        matrix.push_back({prompt, sampling});
        if (seed % 2 == 0) {  // filters too
          matrix.back().sampling.top_k = 20;
          matrix.back().sampling.top_p = 0.9f;
          matrix.back().sampling.min_p = 0.02f;
        }
      }
    }
  }
  return matrix;
}

GenerationRequest Request(const Sampled& entry, SpeculationMode mode) {
  GenerationRequest request = GoldenRequest(entry.prompt);
  request.sampling = entry.sampling;
  request.speculation = mode;
  return request;
}

int64_t Drafted(const GenerationOutcome& outcome) { return outcome.finished.drafted_tokens; }
int64_t Accepted(const GenerationOutcome& outcome) { return outcome.finished.accepted_tokens; }

void CheckMatrix(const std::vector<Sampled>& matrix) {
  absl::StatusOr<TinyPair> pair = LoadTinyPair();
  ASSERT_TRUE(pair.ok()) << pair.status();
  RandomDrafter random(*pair);
  OracleDrafter oracle(*pair);
  const auto run = [&](Drafter* drafter, SpeculationMode mode, const std::vector<Sampled>& entries) {
    std::vector<GenerationRequest> requests;
    for (const Sampled& entry : entries) requests.push_back(Request(entry, mode));
    return *RunAll(**MakeEngine(*pair, drafter), std::move(requests));
  };
  const std::vector<GenerationOutcome> plain = run(nullptr, SpeculationMode::kOff, matrix);
  const std::vector<GenerationOutcome> dflash = run(pair->drafter.get(), SpeculationMode::kDFlash, matrix);
  const std::vector<GenerationOutcome> switched_off = run(pair->drafter.get(), SpeculationMode::kOff, matrix);
  const std::vector<GenerationOutcome> guessed = run(&random, SpeculationMode::kDFlash, matrix);
  int64_t sampled_accepted = 0;
  for (size_t i = 0; i < matrix.size(); ++i) {
    SCOPED_TRACE(::testing::Message() << "entry " << i << " temperature " << matrix[i].sampling.temperature);
    ASSERT_TRUE(plain[i].done && dflash[i].done && switched_off[i].done && guessed[i].done);
    EXPECT_EQ(dflash[i].tokens, plain[i].tokens);
    EXPECT_EQ(switched_off[i].tokens, plain[i].tokens);
    EXPECT_EQ(guessed[i].tokens, plain[i].tokens);
    EXPECT_EQ(Drafted(plain[i]), 0);
    EXPECT_EQ(Drafted(switched_off[i]), 0);
    if (plain[i].tokens.size() > 2) {
      EXPECT_GT(Drafted(dflash[i]), 0);
      EXPECT_GT(Drafted(guessed[i]), 0);
    }
    if (matrix[i].sampling.temperature > 0) sampled_accepted += Accepted(dflash[i]);
    // Knowing the answer, every draft is accepted.
    oracle.Expect(static_cast<int64_t>(matrix[i].prompt.prompt_ids.size()), plain[i].tokens);
    const GenerationOutcome foreseen = run(&oracle, SpeculationMode::kDFlash, {matrix[i]})[0];
    EXPECT_EQ(foreseen.tokens, plain[i].tokens);
    EXPECT_EQ(Accepted(foreseen), Drafted(foreseen));
    if (plain[i].tokens.size() > 1) {
      EXPECT_GT(Drafted(foreseen), 0);
    }
  }
  EXPECT_GT(sampled_accepted, 0);
}

TEST(SameTextTest, WithAndWithoutSpeculation) { CheckMatrix(Matrix(/*prompts=*/5, /*seeds=*/2)); }

TEST(SameTextTest, WithAndWithoutSpeculationFull) { CheckMatrix(Matrix(/*prompts=*/21, /*seeds=*/4)); }

// Long texts, far past the drafter's window: with speculation both at once, then each alone without.
TEST(SameTextTest, OverTwoThousandTokens) {
  constexpr int64_t kTokens = 2000;
  testing::TinyPairOptions options;
  options.threads = 1;
  options.slots = 2;
  options.max_tokens = 2560;
  absl::StatusOr<TinyPair> pair = LoadTinyPair(options);
  ASSERT_TRUE(pair.ok()) << pair.status();
  std::vector<GenerationRequest> requests;
  for (float temperature : {0.0f, 0.8f}) {
    requests.push_back(GoldenRequest((*LoadGoldenPrompts())[0]));
    requests.back().stop_token_ids.clear();
    requests.back().max_tokens = kTokens;
    requests.back().sampling = {
        .temperature = temperature, .top_k = 0, .top_p = 1, .min_p = 0, .seed = 20261129};
  }
  const std::vector<GenerationOutcome> speculative =
      *RunAll(**MakeEngine(*pair, pair->drafter.get()), requests);
  const absl::StatusOr<std::unique_ptr<Engine>> plain_engine = MakeEngine(*pair, nullptr);
  for (size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE(::testing::Message() << "temperature " << requests[i].sampling.temperature);
    ASSERT_TRUE(speculative[i].done) << speculative[i].status;
    const GenerationOutcome plain = (*RunAll(**plain_engine, {requests[i]}))[0];
    ASSERT_TRUE(plain.done) << plain.status;
    EXPECT_EQ(plain.tokens.size(), static_cast<size_t>(kTokens));
    EXPECT_EQ(speculative[i].tokens, plain.tokens);
    EXPECT_GT(Drafted(speculative[i]), kTokens);
    EXPECT_GT(Accepted(speculative[i]), 0);
    std::printf("temperature %.1f: %.2f tokens per round\n", requests[i].sampling.temperature,
                1 + static_cast<double>(Accepted(speculative[i])) /
                        static_cast<double>(speculative[i].finished.rounds));
  }
}

TEST(SameTextTest, DifferentSeedsGiveDifferentText) {
  absl::StatusOr<TinyPair> pair = LoadTinyPair();
  ASSERT_TRUE(pair.ok()) << pair.status();
  std::vector<GenerationRequest> requests;
  for (uint64_t seed : {1, 2}) {
    requests.push_back(GoldenRequest(LoadGoldenPrompts()->back()));
    requests.back().sampling = {.temperature = 1, .top_k = 0, .top_p = 1, .min_p = 0, .seed = seed};
  }
  const std::vector<GenerationOutcome> outcomes = *RunAll(**MakeEngine(*pair, pair->drafter.get()), requests);
  EXPECT_NE(outcomes[0].tokens, outcomes[1].tokens);
}

TEST(SameTextTest, BlockLengthChangesNothing) {
  absl::StatusOr<TinyPair> pair = LoadTinyPair();
  ASSERT_TRUE(pair.ok()) << pair.status();
  std::vector<GoldenPrompt> prompts = {(*LoadGoldenPrompts())[1]};
  ASSERT_TRUE(testing::UseOwnOutputs(prompts).ok());
  const GoldenPrompt& prompt = prompts[0];
  std::vector<GenerationRequest> requests;
  for (int32_t drafts : {0, 1, 2, 7, 15, 40}) {
    requests.push_back(GoldenRequest(prompt));
    requests.back().max_draft_tokens = drafts;
  }
  const std::vector<GenerationOutcome> outcomes = *RunAll(**MakeEngine(*pair, pair->drafter.get()), requests);
  for (size_t i = 0; i < outcomes.size(); ++i) {
    EXPECT_EQ(outcomes[i].tokens, prompt.output_ids);
    EXPECT_GT(Accepted(outcomes[i]), 0);
  }
  EXPECT_LE(outcomes[1].finished.drafted_tokens, outcomes[1].finished.rounds);
}

}  // namespace
}  // namespace dflash
