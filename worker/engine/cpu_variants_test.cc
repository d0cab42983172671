// The whole engine under every instruction set of the CPU backend and 1, 2 and 3 threads: golden text, the
// same text with and without speculation, and the same bits of the draft logits and of all state. The single
// operations are held to the same in kernels/*/*_cpu_test.cc. Tests named *Full run everything (label slow).
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

GenerationRequest Sampled(const GoldenPrompt& prompt, int64_t max_tokens, SpeculationMode mode) {
  GenerationRequest request = GoldenRequest(prompt);
  request.max_tokens = max_tokens;
  request.sampling = {.temperature = 0.8f, .top_k = 0, .top_p = 0.95f, .min_p = 0, .seed = 12345};
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

void Run(const Variant& variant, const std::vector<GoldenPrompt>& prompts, int64_t max_tokens, Trace& trace) {
  ASSERT_TRUE(SelectInstructionSet(variant.instruction_set).ok());
  testing::TinyPairOptions options;
  options.threads = variant.threads;
  absl::StatusOr<TinyPair> pair = LoadTinyPair(options);
  ASSERT_TRUE(pair.ok()) << pair.status();
  AppendBits(*pair, prompts[0], trace);
  const auto engine = MakeEngine(*pair, pair->drafter.get());
  ASSERT_TRUE(engine.ok()) << engine.status();
  std::vector<GenerationRequest> requests;
  for (const GoldenPrompt& prompt : prompts) {
    GenerationRequest request = GoldenRequest(prompt);
    request.max_tokens = std::min(request.max_tokens, max_tokens);
    requests.push_back(std::move(request));
    requests.push_back(Sampled(prompt, max_tokens, SpeculationMode::kDFlash));
    requests.push_back(Sampled(prompt, max_tokens, SpeculationMode::kOff));
  }
  const auto outcomes = RunAll(**engine, std::move(requests));
  ASSERT_TRUE(outcomes.ok()) << outcomes.status();
  for (size_t i = 0; i < prompts.size(); ++i) {
    SCOPED_TRACE("prompt " + std::to_string(i));
    const GenerationOutcome &greedy = (*outcomes)[3 * i], &drafted = (*outcomes)[3 * i + 1],
                            &plain = (*outcomes)[3 * i + 2];
    ASSERT_TRUE(greedy.done && drafted.done && plain.done);
    const std::vector<int32_t>& golden = prompts[i].output_ids;
    const size_t length = std::min(golden.size(), static_cast<size_t>(max_tokens));
    EXPECT_EQ(greedy.tokens,
              std::vector<int32_t>(golden.begin(), golden.begin() + static_cast<int64_t>(length)));
    EXPECT_EQ(drafted.tokens, plain.tokens);
    EXPECT_GT(greedy.finished.accepted_tokens, 0);
    EXPECT_GT(drafted.finished.drafted_tokens, 0);
    EXPECT_EQ(plain.finished.drafted_tokens, 0);
    for (const GenerationOutcome* outcome : {&greedy, &drafted, &plain}) {
      trace.tokens.push_back(outcome->tokens);
      trace.accepted.push_back(AcceptedOf(*outcome));
    }
  }
}

void ExpectEqualOnAllVariants(const std::vector<GoldenPrompt>& prompts, int64_t max_tokens) {
  Trace first;
  for (const Variant& variant : Variants()) {
    SCOPED_TRACE(variant.instruction_set + ", threads: " + std::to_string(variant.threads));
    Trace trace;
    ASSERT_NO_FATAL_FAILURE(Run(variant, prompts, max_tokens, trace));
    if (first.tokens.empty()) first = trace;
    EXPECT_EQ(trace.tokens, first.tokens);
    EXPECT_EQ(trace.accepted, first.accepted);
    EXPECT_TRUE(trace.state == first.state) << "bits differ";
  }
}

// A prompt whose golden output fills a block.
std::vector<GoldenPrompt> SomePrompts() {
  const absl::StatusOr<std::vector<GoldenPrompt>> golden = LoadGoldenPrompts();
  for (const GoldenPrompt& prompt : *golden) {
    if (prompt.output_ids.size() >= 32 && prompt.prompt_ids.size() < 64) return {prompt};
  }
  return {};
}

TEST_F(CpuVariantsTest, SameTextAndBits) {
  const std::vector<GoldenPrompt> prompts = SomePrompts();
  ASSERT_EQ(prompts.size(), 1u);
  ExpectEqualOnAllVariants(prompts, 12);
}

TEST_F(CpuVariantsTest, SameTextAndBitsFull) {
  std::vector<GoldenPrompt> prompts = SomePrompts();
  ASSERT_EQ(prompts.size(), 1u);
  const absl::StatusOr<std::vector<GoldenPrompt>> golden = LoadGoldenPrompts();
  prompts.insert(prompts.end(), golden->begin(), golden->end());
  ExpectEqualOnAllVariants(prompts, 128);
}

TEST_F(CpuVariantsTest, UnknownInstructionSetsAreRefused) {
  EXPECT_EQ(SelectInstructionSet("avx1024").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SelectInstructionSet("").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(SelectInstructionSet("auto").ok());
  EXPECT_TRUE(SelectInstructionSet("scalar").ok());
}

}  // namespace
}  // namespace dflash
