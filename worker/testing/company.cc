#include "worker/testing/company.h"

#include <algorithm>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "gtest/gtest.h"

namespace dflash::testing {

std::vector<GenerationRequest> MixedRequests(size_t count, uint32_t seed,
                                             const MixedRequestsOptions& options) {
  const std::vector<GoldenPrompt> golden = *LoadGoldenPrompts();
  std::mt19937 random(seed);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint32_t>(n)); };
  std::vector<GenerationRequest> requests;
  for (size_t i = 0; i < count; ++i) {
    const auto prompts = static_cast<int64_t>(golden.size());
    const GoldenPrompt* prompt = &golden[static_cast<size_t>(below(prompts))];
    // A third is short questions with long answers: they grow most while they run.
    while (i % 3 == 0 && (prompt->kind != "chat" || prompt->prompt_ids.size() > 50))
      prompt = &golden[static_cast<size_t>(below(prompts))];
    GenerationRequest request = GoldenRequest(*prompt);
    if (i % 3 == 2) {  // stitched together, up to a length that is all its own
      const int64_t length = 1 + below(options.longest_prompt);
      while (static_cast<int64_t>(request.prompt_tokens.size()) < length) {
        const std::vector<int32_t>& more = golden[static_cast<size_t>(below(prompts))].prompt_ids;
        request.prompt_tokens.insert(request.prompt_tokens.end(), more.begin(), more.end());
      }
      request.prompt_tokens.resize(static_cast<size_t>(length));
    }
    const auto size =
        std::min<int64_t>(static_cast<int64_t>(request.prompt_tokens.size()), options.longest_prompt);
    request.prompt_tokens.resize(static_cast<size_t>(size));
    request.max_tokens = i % 3 == 0 || i % 4 == 3 ? options.most_tokens : 1 + below(options.most_tokens);
    if (i % 2 == 1) {
      request.sampling = {.temperature = i % 4 == 1 ? 0.7f : 1.0f,
                          .top_k = static_cast<int32_t>(below(3) * 10),
                          .top_p = below(2) == 0 ? 1.0f : 0.9f,
                          .min_p = below(4) == 0 ? 0.05f : 0.0f,
                          .seed = random()};
    }
    if (i % 5 == 4) request.speculation = SpeculationMode::kOff;
    if (i % 7 == 6) request.max_draft_tokens = static_cast<int32_t>(1 + below(7));
    if (i % 3 == 0 || i % 4 == 3) request.stop_token_ids.clear();
    if (i % 8 == 7) request.stop_strings = {"the", "zzz"};
    request.id = absl::StrCat("request ", i);
    request.client = absl::StrCat("client ", i % 3);
    request.priority = static_cast<int32_t>(i % 9 == 8) - static_cast<int32_t>(i % 9 == 0);
    requests.push_back(std::move(request));
  }
  return requests;
}

void AddParameters(std::mt19937& random, GenerationRequest& request) {
  const auto below = [&](uint32_t n) { return static_cast<int32_t>(random() % n); };
  const auto token = [&] {  // rather one that may come up
    return below(2) == 0 ? request.prompt_tokens[random() % request.prompt_tokens.size()] : below(4096);
  };
  const char* const stops[] = {", 1", "he", " and", "a b", "\n", "ing ", "es", "}", "the ", "zzz"};
  const float repetition[] = {1.05f, 1.3f, 0.9f}, penalty[] = {-0.5f, 0.3f, 1.5f};
  if (below(3) == 0) request.repetition_penalty = repetition[below(3)];
  if (below(3) == 0) request.frequency_penalty = penalty[below(3)];
  if (below(3) == 0) request.presence_penalty = penalty[below(3)];
  if (below(3) == 0) {
    for (int32_t n = below(4); n >= 0; --n)
      request.logit_bias.push_back({.token = token(), .bias = static_cast<float>(below(9) - 4)});
  }
  if (below(3) == 0) {
    for (int32_t n = below(8); n >= 0; --n) {
      std::vector<int32_t> word = {token()};
      if (below(2) == 0) word.push_back(token());
      request.bad_words.push_back(std::move(word));
    }
  }
  if (below(3) == 0) request.min_tokens = 1 + random() % static_cast<uint32_t>(request.max_tokens);
  if (below(4) == 0) request.include_stop_in_text = true;
  if (below(4) == 0) {
    for (int32_t n = below(3); n >= 0; --n) request.stop_strings.emplace_back(stops[below(10)]);
  }
  if (below(6) == 0) {
    for (int32_t n = below(3); n >= 0; --n) request.stop_token_ids.push_back(token());
  }
  if (below(8) == 0) request.max_draft_tokens = 1 + below(15);
  if (below(5) == 0) request.prompt_log_probs = 1 + below(6);
  if (below(4) == 0) request.thinking = {.max_tokens = below(12), .open = 4091, .close = 4092};
  if (below(3) == 0) request.log_probs = 1 + below(6);
  if (below(4) == 0) {
    const int32_t kind = below(3);
    if (kind == 0) request.constraint.json_object = true;
    if (kind == 1) {
      request.constraint.json_schema = R"({"type": "object", "required": ["answer"], "properties": {
          "answer": {"type": ["string", "integer"]}, "list": {"type": "array", "items": {"type": "boolean"}}}})";
    }
    if (kind == 2) request.constraint.choices = {"yes", "no", "perhaps, but not today"};
    request.constraint.thinking_open = 4091;
    request.constraint.thinking_close = 4092;
    request.bad_words.clear();  // they may forbid what it needs
  }
}

absl::StatusOr<std::vector<GenerationOutcome>> RunOneByOne(Engine& engine,
                                                           const std::vector<GenerationRequest>& requests) {
  std::vector<GenerationOutcome> outcomes;
  for (const GenerationRequest& request : requests) {
    DFLASH_ASSIGN_OR_RETURN(std::vector<GenerationOutcome> outcome, RunAll(engine, {request}));
    outcomes.push_back(std::move(outcome[0]));
  }
  return outcomes;
}

absl::StatusOr<std::vector<GenerationOutcome>> RunInCompany(Engine& engine,
                                                            const std::vector<GenerationRequest>& requests,
                                                            const Company& company) {
  std::mt19937 random(company.seed);
  std::vector<GenerationOutcome> outcomes(requests.size()), others(company.cancelled);
  std::vector<size_t> arrivals(requests.size() + company.cancelled);
  for (size_t i = 0; i < arrivals.size(); ++i) arrivals[i] = i;
  std::shuffle(arrivals.begin(), arrivals.end(), random);
  struct Doomed {
    std::string id;
    uint32_t steps_left = 0;
  };
  std::vector<Doomed> doomed;
  for (size_t next = 0;;) {
    for (uint32_t n = random() % (company.most_arrivals + 1); n > 0 && next < arrivals.size(); --n) {
      const size_t i = arrivals[next++];
      if (i < requests.size()) {
        engine.Submit(requests[i], Record(&outcomes[i]));
        continue;
      }
      GenerationRequest other = requests[random() % requests.size()];
      other.id = absl::StrCat("other ", i - requests.size());
      doomed.push_back({.id = other.id, .steps_left = static_cast<uint32_t>(random() % 20)});
      engine.Submit(std::move(other), Record(&others[i - requests.size()]));
    }
    for (Doomed& other : doomed) {
      if (other.steps_left-- == 0) engine.Cancel(other.id, absl::CancelledError("enough"));
    }
    std::erase_if(doomed, [](const Doomed& other) { return other.steps_left == ~uint32_t{0}; });
    DFLASH_ASSIGN_OR_RETURN(const bool worked, engine.Step());
    if (!worked && next == arrivals.size() && doomed.empty()) return outcomes;
  }
}

void StepTotals::OnStep(const StepReport& report, const EngineGauges& gauges) {
  ++steps;
  mixed_steps += report.prefill_rows > 0 && report.verify_rows > 0;
  preemptions += report.preemptions;
  refed_rows += report.refed_rows;
  for (const DecodedRound& decoded : report.rounds) {
    const RoundReport& round = decoded.round;
    drafted += round.drafted;
    accepted += round.accepted;
  }
  most_running = std::max(most_running, gauges.running);
}

void ExpectSameOutcome(const GenerationOutcome& actual, const GenerationOutcome& expected) {
  ASSERT_TRUE(expected.done) << expected.status;
  ASSERT_TRUE(actual.done) << actual.status;
  EXPECT_EQ(actual.tokens, expected.tokens);
  EXPECT_EQ(actual.text, expected.text);
  EXPECT_EQ(actual.finished.reason, expected.finished.reason);
  ASSERT_EQ(actual.rounds.size(), expected.rounds.size());
  for (size_t round = 0; round < expected.rounds.size(); ++round) {
    EXPECT_EQ(actual.rounds[round].drafted, expected.rounds[round].drafted) << "round " << round;
    EXPECT_EQ(actual.rounds[round].accepted, expected.rounds[round].accepted) << "round " << round;
  }
}

}  // namespace dflash::testing
