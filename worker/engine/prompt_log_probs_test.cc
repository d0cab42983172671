// Log probabilities of a prompt's tokens: against an independent implementation in double precision, and the
// same however the prompt is run.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/model/safetensors.h"
#include "worker/testing/company.h"
#include "worker/testing/tiny_pair.h"

namespace dflash {
namespace {

using testing::GenerationOutcome;
using testing::GoldenPrompt;
using testing::LoadTinyPair;
using testing::RunAll;
using testing::TinyPair;

constexpr int32_t kTop = 20;

GenerationRequest Scored(std::vector<int32_t> prompt) {
  GenerationRequest request;
  request.id = "scored";
  request.prompt_tokens = std::move(prompt);
  request.prompt_log_probs = 1 + kTop;
  request.max_tokens = 4;
  return request;
}

std::vector<int32_t> LongPrompt(size_t size) {
  std::vector<int32_t> tokens;
  const std::vector<GoldenPrompt> prompts = testing::LoadGoldenPrompts().value();
  for (const GoldenPrompt& golden : prompts)
    tokens.insert(tokens.end(), golden.prompt_ids.begin(), golden.prompt_ids.end());
  tokens.resize(size);
  return tokens;
}

absl::StatusOr<std::unique_ptr<Engine>> EngineOver(TinyPair& pair, int64_t max_prefill_tokens) {
  EngineOptions options;
  options.vocabulary = pair.vocabulary;
  options.max_prefill_tokens = max_prefill_tokens;
  return Engine::Create(options, pair.target.get(), pair.drafter.get(), pair.table.get(),
                        pair.tokenizer.get(), *pair.stream);
}

// The head of the tiny target over golden hidden states, which another implementation computed.
std::vector<double> ReferenceLogits(const std::vector<float>& hidden, size_t row, int64_t width,
                                    const std::vector<uint16_t>& head, int64_t vocabulary) {
  std::vector<double> logits(static_cast<size_t>(vocabulary));
  for (int64_t v = 0; v < vocabulary; ++v) {
    for (int64_t d = 0; d < width; ++d) {
      const uint32_t bits = uint32_t{head[static_cast<size_t>(v * width + d)]} << 16;  // bfloat16
      logits[static_cast<size_t>(v)] +=
          static_cast<double>(std::bit_cast<float>(bits)) *
          static_cast<double>(hidden[row * static_cast<size_t>(width) + static_cast<size_t>(d)]);
    }
  }
  return logits;
}

TEST(PromptLogProbs, AreThoseOfTheReference) {
  TinyPair pair = LoadTinyPair().value();
  const auto engine = EngineOver(pair, 512).value();
  const int64_t width = pair.target->config().hidden_size;
  const auto folder = SafetensorsFolder::Open(testing::SourcePath("models/tiny-qwen3.6"));
  ASSERT_TRUE(folder.ok()) << folder.status();
  std::vector<uint16_t> head(static_cast<size_t>(pair.target->config().vocab_size * width));
  ASSERT_TRUE(folder
                  ->ReadRows("lm_head.weight", 0, pair.target->config().vocab_size, head.data(),
                             static_cast<int64_t>(head.size() * sizeof(uint16_t)))
                  .ok());
  // Errors of hidden states times the size of logits.
  const double tolerance = testing::BackendDemands().same_tokens ? 5e-4 : 0.3;
  double worst = 0;
  size_t places = 0;
  for (const size_t index : {0, 3, 16}) {
    const std::vector<int32_t> prompt = (*testing::LoadGoldenPrompts())[index].prompt_ids;
    const auto states = testing::LoadGoldenTensor("p" + std::to_string(index) + ".hidden_states");
    ASSERT_TRUE(states.ok()) << states.status();
    const auto rows = static_cast<size_t>(states->shape[1]);
    const size_t last_state = static_cast<size_t>(states->shape[0]) - 1;  // after the final norm
    const std::vector<float> hidden(states->values.begin() + static_cast<int64_t>(last_state * rows) * width,
                                    states->values.end());
    const GenerationOutcome outcome = (*RunAll(*engine, {Scored(prompt)}))[0];
    ASSERT_TRUE(outcome.done) << outcome.status;
    ASSERT_EQ(outcome.prompt_log_probs.size(), prompt.size() - 1);
    for (size_t row = 0; row < std::min(rows, prompt.size() - 1); ++row) {
      std::vector<double> logits = ReferenceLogits(hidden, row, width, head, pair.vocabulary);
      const double best = *std::max_element(logits.begin(), logits.end());
      double sum = 0;
      for (const double logit : logits) sum += std::exp(logit - best);
      const double total = best + std::log(sum);
      const TokenLogProbs& place = outcome.prompt_log_probs[row];
      const auto compare = [&](double actual, double logit) {
        worst = std::max(worst, std::abs(actual - (logit - total)));
        ASSERT_NEAR(actual, logit - total, tolerance) << "prompt " << index << ", place " << row + 1;
      };
      compare(place.log_prob, logits[static_cast<size_t>(prompt[row + 1])]);
      ASSERT_EQ(place.top.size(), static_cast<size_t>(kTop));
      std::set<int32_t> listed;
      for (const TokenLogProbs::Top& top : place.top) {
        compare(top.log_prob, logits[static_cast<size_t>(top.token)]);
        listed.insert(top.token);
      }
      // Nothing that is left out is better than the last one that is there.
      double best_left_out = -INFINITY;
      for (size_t v = 0; v < logits.size(); ++v) {
        if (!listed.contains(static_cast<int32_t>(v)))
          best_left_out = std::max(best_left_out, logits[v] - total);
      }
      EXPECT_LE(best_left_out, place.top.back().log_prob + tolerance);
      ++places;
    }
  }
  EXPECT_GT(places, 100u);
  std::printf("%zu places, worst error %.1e\n", places, worst);
}

// What decoding says of its tokens is what a prompt with these tokens says of them.
TEST(PromptLogProbs, AreThoseOfAnOutputWithTheseTokens) {
  TinyPair pair = LoadTinyPair().value();
  const auto engine = EngineOver(pair, 512).value();
  GenerationRequest request = testing::GoldenRequest((*testing::LoadGoldenPrompts())[1]);
  request.log_probs = 1 + 3;
  request.frequency_penalty = 1;  // changes what is chosen, not what is reported
  const GenerationOutcome output = (*RunAll(*engine, {request}))[0];
  ASSERT_TRUE(output.done) << output.status;
  std::vector<int32_t> whole = request.prompt_tokens;
  whole.insert(whole.end(), output.tokens.begin(), output.tokens.end());
  const GenerationOutcome scored = (*RunAll(*engine, {Scored(whole)}))[0];
  ASSERT_EQ(scored.prompt_log_probs.size(), whole.size() - 1);
  ASSERT_GT(output.tokens.size(), 10u);
  const double tolerance = testing::BackendDemands().same_tokens ? 1e-3 : 0.3;
  for (size_t i = 0; i < output.tokens.size(); ++i) {
    const TokenLogProbs& place = scored.prompt_log_probs[request.prompt_tokens.size() - 1 + i];
    EXPECT_NEAR(place.log_prob, output.log_probs[i].log_prob, tolerance) << i;
    EXPECT_NEAR(place.top[0].log_prob, output.log_probs[i].top[0].log_prob, tolerance) << i;
  }
}

void ExpectSamePlaces(const std::vector<TokenLogProbs>& actual, const std::vector<TokenLogProbs>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(actual[i].log_prob, expected[i].log_prob) << i;
    ASSERT_EQ(actual[i].top.size(), expected[i].top.size());
    for (size_t k = 0; k < expected[i].top.size(); ++k) {
      ASSERT_EQ(actual[i].top[k].token, expected[i].top[k].token);
      ASSERT_EQ(actual[i].top[k].log_prob, expected[i].top[k].log_prob);
    }
  }
}

// In one chunk, in several, with all of it cached: the same bits. Who comes next begins with what it left.
TEST(PromptLogProbs, AreTheSameHoweverThePromptIsRun) {
  testing::TinyPairOptions options;
  options.checkpoints = 8;
  TinyPair pair = LoadTinyPair(options).value();
  for (const size_t size : {300, 320, 321, 65, 1}) {
    SCOPED_TRACE(size);
    const GenerationRequest request = Scored(LongPrompt(size));
    GenerationRequest other = request;
    other.prompt_log_probs = 0;
    const GenerationOutcome expected = (*RunAll(**EngineOver(pair, 512), {request}))[0];
    ASSERT_TRUE(expected.done) << expected.status;
    ASSERT_EQ(expected.prompt_log_probs.size(), size - 1);

    const auto engine = EngineOver(pair, 64).value();
    const GenerationOutcome cold = (*RunAll(*engine, {request}))[0];
    ExpectSamePlaces(cold.prompt_log_probs, expected.prompt_log_probs);
    EXPECT_EQ(cold.tokens, expected.tokens);
    const GenerationOutcome warm = (*RunAll(*engine, {other}))[0];
    EXPECT_EQ(warm.started.cached_tokens > 0, size > 64) << "it left what it ran";
    EXPECT_TRUE(warm.prompt_log_probs.empty());
    EXPECT_EQ(warm.tokens, expected.tokens);
    const GenerationOutcome again = (*RunAll(*engine, {request}))[0];
    EXPECT_EQ(again.started.cached_tokens, 0);
    ExpectSamePlaces(again.prompt_log_probs, expected.prompt_log_probs);
    EXPECT_EQ(again.tokens, expected.tokens);

    // A later life of the request is told only what is new.
    for (const size_t done : {size_t{1}, size / 2, size - 1}) {
      if (done >= size) continue;
      GenerationRequest later = request;
      later.prompt_log_probs_done = static_cast<int64_t>(done);
      const GenerationOutcome rest = (*RunAll(*engine, {later}))[0];
      ExpectSamePlaces(rest.prompt_log_probs, {expected.prompt_log_probs.begin() + static_cast<int64_t>(done),
                                               expected.prompt_log_probs.end()});
      EXPECT_EQ(rest.started.cached_tokens > 0, done == size - 1 && size > 64);
    }
  }
}

// Requests that lose slot and pages in the middle of a prompt and run it again report every place once.
TEST(PromptLogProbs, ArePreemptedLikeEverythingElse) {
  std::vector<GenerationRequest> requests =
      testing::MixedRequests(24, 3, {.longest_prompt = 150, .most_tokens = 100});
  for (size_t i = 0; i < requests.size(); ++i) requests[i].prompt_log_probs = static_cast<int32_t>(i % 3);
  TinyPair alone = LoadTinyPair().value();
  const auto expected = testing::RunOneByOne(**EngineOver(alone, 512), requests).value();
  testing::TinyPairOptions options;
  options.slots = 16;
  options.pages = 9;
  options.checkpoints = 4;
  TinyPair pair = LoadTinyPair(options).value();
  testing::StepTotals totals;
  EngineOptions engine_options;
  engine_options.vocabulary = pair.vocabulary;
  engine_options.max_prefill_tokens = 64;
  engine_options.observer = &totals;
  const auto engine = Engine::Create(engine_options, pair.target.get(), pair.drafter.get(), pair.table.get(),
                                     pair.tokenizer.get(), *pair.stream)
                          .value();
  const auto actual =
      testing::RunInCompany(*engine, requests, {.seed = 4, .most_arrivals = 5, .cancelled = 6}).value();
  for (size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE(requests[i].id);
    ASSERT_TRUE(actual[i].done) << actual[i].status;
    EXPECT_EQ(actual[i].tokens, expected[i].tokens);
    ExpectSamePlaces(actual[i].prompt_log_probs, expected[i].prompt_log_probs);
    EXPECT_EQ(actual[i].prompt_log_probs.size(), i % 3 == 0 ? 0 : requests[i].prompt_tokens.size() - 1);
  }
  EXPECT_GT(totals.preemptions, 0);
  EXPECT_GT(totals.accepted, 0);
}

}  // namespace
}  // namespace dflash
