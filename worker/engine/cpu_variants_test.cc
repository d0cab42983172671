// The whole engine under every instruction set of the CPU backend and 1, 2 and 3 threads: golden text, the
// same text with and without speculation, and the same bits of the draft logits and of all state. The single
// operations are held to the same in kernels/*/*_cpu_test.cc. Tests named *Full run everything, one
// instruction set each (label slow).
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device/stream.h"
#include "worker/model/state_export.h"
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

struct Variant {
  std::string instruction_set;
  int threads;
};

// Every variant that this machine can run.
std::vector<Variant> Variants() {
  std::vector<Variant> variants;
  for (const char* set : {"scalar", "avx2", "avx512"}) {
    if (!SelectInstructionSet(set).ok()) continue;
    for (int threads : {1, 2, 3}) variants.push_back({set, threads});
  }
  return variants;
}

// Whatever a test does, the next one begins with the best set.
class CpuVariantsTest : public ::testing::Test {
 protected:
  ~CpuVariantsTest() override {
    for (const char* set : {"scalar", "avx2", "avx512"}) (void)SelectInstructionSet(set);
  }
};

// Tokens and bits that must not depend on the variant.
struct Trace {
  std::vector<std::vector<int32_t>> tokens;
  std::vector<std::vector<int32_t>> accepted;
  std::vector<std::vector<float>> state;  // after some rounds, and the draft logits of the last of them
};

std::vector<int32_t> AcceptedOf(const GenerationOutcome& outcome) {
  std::vector<int32_t> accepted;
  for (const RoundReport& round : outcome.rounds) accepted.push_back(round.accepted);
  return accepted;
}

// What every variant runs: golden prompts to their golden text, and sampled texts with and without drafts.
struct Work {
  GoldenPrompt block_prompt;  // its golden output fills a block
  std::vector<GoldenPrompt> greedy;
  std::vector<GoldenPrompt> sampled;
  uint64_t seeds = 1;
  int64_t max_tokens = 0;
};

GenerationRequest Sampled(const GoldenPrompt& prompt, uint64_t seed, SpeculationMode mode) {
  GenerationRequest request = GoldenRequest(prompt);
  request.sampling = {.temperature = 0.8f, .top_k = 0, .top_p = 0.95f, .min_p = 0, .seed = 12345 * seed};
  request.speculation = mode;
  return request;
}

// Forwards a prompt and one verified block by hand and exports what they leave.
void AppendBits(TinyPair& pair, const GoldenPrompt& prompt, Trace& trace) {
  const auto count = static_cast<int64_t>(prompt.prompt_ids.size());
  const absl::StatusOr<int32_t> slot = pair.table->Open();
  ASSERT_TRUE(slot.ok()) << slot.status();
  ASSERT_TRUE(pair.table->Reserve(*slot, count + 16).ok());
  ASSERT_TRUE(pair.target->Open(*slot).ok() && pair.drafter->Open(*slot, 0).ok());
  const auto forward = [&](Phase phase, int64_t position, std::vector<int32_t> tokens) {
    const absl::StatusOr<ForwardResult> result =
        pair.target->Forward({.sequences = {{.slot = *slot,
                                             .phase = phase,
                                             .start_position = position,
                                             .tokens = std::move(tokens),
                                             .parents = {},
                                             .last_logits = true}}});
    ASSERT_TRUE(result.ok()) << result.status();
    const int64_t rows = phase == Phase::kVerify ? 9 : result->rows[0].count;
    if (phase == Phase::kVerify) {
      ASSERT_TRUE(pair.target->Commit({{.slot = *slot, .rows = rows}}).ok());
    }
    const absl::StatusOr<std::vector<float>> logits = ActivationsToHost(result->logits, *pair.stream);
    ASSERT_TRUE(logits.ok()) << logits.status();
    trace.state.push_back(*logits);
    ASSERT_TRUE(pair.drafter
                    ->Ingest(result->taps, {{.slot = *slot,
                                             .phase = phase,
                                             .first_row = 0,
                                             .row_count = rows,
                                             .start_position = position}})
                    .ok());
  };
  forward(Phase::kPrefill, 0, prompt.prompt_ids);
  std::vector<int32_t> block(prompt.output_ids.begin(), prompt.output_ids.begin() + 16);
  forward(Phase::kVerify, count, block);
  ASSERT_TRUE(pair.drafter->ProposeAt(*slot, block[9], count + 9).ok());
  const absl::StatusOr<std::vector<float>> draft_logits =
      ActivationsToHost(pair.drafter->last_draft_logits().Rows(0, pair.drafter->max_drafts()), *pair.stream);
  ASSERT_TRUE(draft_logits.ok());
  trace.state.push_back(*draft_logits);
  const auto target = pair.target->ExportState(*slot);
  const auto context = pair.drafter->ExportContext(*slot);
  ASSERT_TRUE(target.ok() && context.ok());
  trace.state.insert(trace.state.end(), target->begin(), target->end());
  trace.state.insert(trace.state.end(), context->begin(), context->end());
  ASSERT_TRUE(pair.table->Close(*slot).ok());
}

void ExpectGoldenText(const GenerationOutcome& outcome, const GoldenPrompt& prompt, int64_t max_tokens) {
  ASSERT_TRUE(outcome.done) << outcome.status;
  std::vector<int32_t> golden = prompt.output_ids;
  golden.resize(std::min(golden.size(), static_cast<size_t>(max_tokens)));
  EXPECT_EQ(outcome.tokens, golden);
  EXPECT_GT(outcome.finished.accepted_tokens, 0);
}

void ExpectSameText(const GenerationOutcome& drafted, const GenerationOutcome& plain) {
  ASSERT_TRUE(drafted.done && plain.done) << drafted.status << " " << plain.status;
  EXPECT_EQ(drafted.tokens, plain.tokens);
  EXPECT_GT(drafted.finished.drafted_tokens, 0);
  EXPECT_EQ(plain.finished.drafted_tokens, 0);
}

void Run(const Variant& variant, const Work& work, Trace& trace) {
  ASSERT_TRUE(SelectInstructionSet(variant.instruction_set).ok());
  testing::TinyPairOptions options;
  options.threads = variant.threads;
  absl::StatusOr<TinyPair> pair = LoadTinyPair(options);
  ASSERT_TRUE(pair.ok()) << pair.status();
  AppendBits(*pair, work.block_prompt, trace);
  const auto engine = MakeEngine(*pair, pair->drafter.get());
  ASSERT_TRUE(engine.ok()) << engine.status();
  std::vector<GenerationRequest> requests;
  for (const GoldenPrompt& prompt : work.greedy) requests.push_back(GoldenRequest(prompt));
  for (const GoldenPrompt& prompt : work.sampled) {
    for (uint64_t seed = 1; seed <= work.seeds; ++seed) {
      requests.push_back(Sampled(prompt, seed, SpeculationMode::kDFlash));
      requests.push_back(Sampled(prompt, seed, SpeculationMode::kOff));
    }
  }
  for (GenerationRequest& request : requests)
    request.max_tokens = std::min(request.max_tokens, work.max_tokens);
  const auto outcomes = RunAll(**engine, std::move(requests));
  ASSERT_TRUE(outcomes.ok()) << outcomes.status();
  for (size_t i = 0; i < outcomes->size(); ++i) {
    SCOPED_TRACE("request " + std::to_string(i));
    const GenerationOutcome& outcome = (*outcomes)[i];
    if (i < work.greedy.size()) {
      ExpectGoldenText(outcome, work.greedy[i], work.max_tokens);
    } else if ((i - work.greedy.size()) % 2 == 1) {
      ExpectSameText((*outcomes)[i - 1], outcome);
    }
    trace.tokens.push_back(outcome.tokens);
    trace.accepted.push_back(AcceptedOf(outcome));
  }
}

void ExpectEqualOnAll(const std::vector<Variant>& variants, const Work& work) {
  Trace first;
  for (const Variant& variant : variants) {
    SCOPED_TRACE(variant.instruction_set + ", threads: " + std::to_string(variant.threads));
    Trace trace;
    ASSERT_NO_FATAL_FAILURE(Run(variant, work, trace));
    if (first.tokens.empty()) first = trace;
    EXPECT_EQ(trace.tokens, first.tokens);
    EXPECT_EQ(trace.accepted, first.accepted);
    EXPECT_TRUE(trace.state == first.state) << "bits differ";
  }
}

GoldenPrompt BlockPrompt(const std::vector<GoldenPrompt>& golden) {
  const auto fits = [](const GoldenPrompt& prompt) {
    return prompt.output_ids.size() >= 32 && prompt.prompt_ids.size() < 64;
  };
  return *std::find_if(golden.begin(), golden.end(), fits);
}

TEST_F(CpuVariantsTest, SameTextAndBits) {
  const GoldenPrompt prompt = BlockPrompt(*LoadGoldenPrompts());
  ExpectEqualOnAll(Variants(),
                   {.block_prompt = prompt, .greedy = {prompt}, .sampled = {prompt}, .max_tokens = 12});
}

class CpuVariantsFullTest : public CpuVariantsTest, public ::testing::WithParamInterface<const char*> {};

TEST_P(CpuVariantsFullTest, SameTextAndBits) {
  if (!SelectInstructionSet(GetParam()).ok()) GTEST_SKIP() << "not on this machine";
  std::vector<Variant> variants = {{.instruction_set = "auto", .threads = 2}};  // what the others are held to
  for (int threads : {1, 2, 3}) variants.push_back({GetParam(), threads});
  Work work = {
      .block_prompt = {}, .greedy = *LoadGoldenPrompts(), .sampled = {}, .seeds = 2, .max_tokens = 128};
  work.block_prompt = BlockPrompt(work.greedy);
  for (size_t i = 0; i < work.greedy.size(); i += 4) work.sampled.push_back(work.greedy[i]);  // of every kind
  ExpectEqualOnAll(variants, work);
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, CpuVariantsFullTest, ::testing::Values("scalar", "avx2", "avx512"),
                         [](const ::testing::TestParamInfo<const char*>& info) {
                           return std::string(info.param);
                         });

TEST_F(CpuVariantsTest, UnknownInstructionSetsAreRefused) {
  EXPECT_EQ(SelectInstructionSet("avx1024").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SelectInstructionSet("").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(SelectInstructionSet("auto").ok());
  EXPECT_TRUE(SelectInstructionSet("scalar").ok());
}

}  // namespace
}  // namespace dflash
