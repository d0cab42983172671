// The rules of every row of a block, applied to logits, are what a straightforward reading of the parameters
// over the row's whole history gives.
#include "worker/engine/sequence_rules.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/device/stream.h"
#include "kernels/sampling/logit_rules.h"

namespace dflash {
namespace {

constexpr int64_t kVocabulary = 48;
constexpr int32_t kOpen = 40, kClose = 41, kEnd = 42;
constexpr float kInf = std::numeric_limits<float>::infinity();

// One row by the definition, in double precision. `output`: all tokens of the output before the row.
std::vector<double> Reference(const std::vector<float>& logits, const GenerationRequest& request,
                              const std::vector<int32_t>& output) {
  std::vector<double> processed;
  bool thinks = false;
  int64_t thought = 0;
  for (const int32_t token : request.prompt_tokens) {
    if (token == kOpen) thinks = true;
    if (token == kClose) thinks = false;
  }
  for (const int32_t token : output) {
    if (token == kOpen) {
      thinks = true;
      thought = 0;
    } else if (token == kClose) {
      thinks = false;
    } else {
      ++thought;
    }
  }
  for (int32_t token = 0; token < kVocabulary; ++token) {
    double x = logits[static_cast<size_t>(token)];
    for (const LogitBias& bias : request.logit_bias) {
      if (bias.token == token) x += bias.bias;
    }
    const auto in_output = std::count(output.begin(), output.end(), token);
    const auto in_prompt = std::count(request.prompt_tokens.begin(), request.prompt_tokens.end(), token);
    if (in_output + in_prompt > 0)
      x = x > 0 ? x / request.repetition_penalty : x * request.repetition_penalty;
    x -= request.frequency_penalty * static_cast<double>(in_output);
    if (in_output > 0) x -= request.presence_penalty;
    bool is_allowed = true;
    if (static_cast<int64_t>(output.size()) < request.min_tokens) {
      for (const int32_t stop : request.stop_token_ids) is_allowed &= stop != token;
    }
    for (const std::vector<int32_t>& word : request.bad_words) {
      std::vector<int32_t> with = output;
      with.push_back(token);
      is_allowed &= with.size() < word.size() ||
                    !std::equal(word.begin(), word.end(), with.end() - static_cast<int64_t>(word.size()));
    }
    if (request.thinking.max_tokens >= 0 && thinks && thought >= request.thinking.max_tokens)
      is_allowed &= token == kClose;
    processed.push_back(is_allowed ? x : -kInf);
  }
  return processed;
}

GenerationRequest RandomRequest(std::mt19937& random) {
  const auto below = [&](uint32_t n) { return static_cast<int32_t>(random() % n); };
  GenerationRequest request;
  for (int32_t n = below(12); n >= 0; --n) request.prompt_tokens.push_back(below(kVocabulary));
  if (below(2) == 0) request.repetition_penalty = 0.5f + static_cast<float>(below(8)) / 4;
  if (below(2) == 0) request.frequency_penalty = static_cast<float>(below(17) - 8) / 4;
  if (below(2) == 0) request.presence_penalty = static_cast<float>(below(17) - 8) / 4;
  std::vector<int32_t> biased;
  for (int32_t n = below(6); n > 0; --n) {
    const int32_t token = below(kVocabulary);
    if (std::count(biased.begin(), biased.end(), token) > 0) continue;
    biased.push_back(token);
    request.logit_bias.push_back({.token = token, .bias = static_cast<float>(below(41) - 20) / 2});
  }
  for (int32_t n = below(5); n > 0; --n) {
    std::vector<int32_t> word;
    for (int32_t size = below(3); size >= 0; --size) word.push_back(below(6));
    request.bad_words.push_back(word);
  }
  request.min_tokens = below(3) == 0 ? below(12) : 0;
  request.stop_token_ids = {kEnd, 3};
  if (below(3) == 0) request.thinking = {.max_tokens = below(8), .open = kOpen, .close = kClose};
  return request;
}

TEST(SequenceRules, EveryRowFollowsFromItsHistory) {
  std::mt19937 random(17);
  const Stream stream = *Stream::Create({.threads = 1});
  int with_rules = 0, rows_checked = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    const GenerationRequest request = RandomRequest(random);
    const std::unique_ptr<SequenceRules> rules = SequenceRules::Create(request, kVocabulary).value();
    // Few different tokens, so that histories repeat themselves.
    const auto token = [&] {
      return static_cast<int32_t>(random() % 8 == 0 ? random() % kVocabulary : random() % 6);
    };
    std::vector<int32_t> output, drafts;
    for (uint32_t n = random() % 12; n > 0; --n) output.push_back(token());
    for (uint32_t n = random() % 16; n > 0; --n) drafts.push_back(token());
    RuleBatch batch;
    batch.rows.resize(drafts.size() + 3);
    batch.edits.push_back({.id = 1, .bias = 99, .repetition = 9, .penalty = 9});  // of somebody else
    constexpr size_t kFirst = 1;
    if (rules != nullptr) {
      ++with_rules;
      for (const int32_t emitted : output) rules->Append(emitted);
      rules->Describe(drafts, kFirst, batch);
    }
    std::vector<float> logits(batch.rows.size() * kVocabulary);
    for (float& logit : logits) logit = static_cast<float>(random() % 1601) / 100 - 8;
    std::vector<float> processed = logits;
    ASSERT_TRUE(
        ProcessLogits(
            {.rows = batch.rows.data(), .edits = batch.edits.data(), .restricts = true}, 0, kVocabulary,
            MatrixView(processed.data(), static_cast<int64_t>(batch.rows.size()), kVocabulary), stream)
            .ok());
    for (size_t row = 0; row < batch.rows.size(); ++row) {
      const auto first = static_cast<int64_t>(row) * kVocabulary;
      const std::vector<float> raw(logits.begin() + first, logits.begin() + first + kVocabulary);
      std::vector<double> expected(raw.begin(), raw.end());
      const bool is_described = row >= kFirst && row <= kFirst + drafts.size();
      if (is_described) {
        std::vector<int32_t> history = output;
        history.insert(history.end(), drafts.begin(), drafts.begin() + static_cast<int64_t>(row - kFirst));
        expected = Reference(raw, request, history);
        ++rows_checked;
      }
      for (int64_t v = 0; v < kVocabulary; ++v) {
        const float got = processed[static_cast<size_t>(first + v)];
        const double want = expected[static_cast<size_t>(v)];
        if (want == -kInf) {
          ASSERT_EQ(got, -kInf) << "trial " << trial << " row " << row << " token " << v;
        } else {
          ASSERT_NEAR(got, want, 1e-4) << "trial " << trial << " row " << row << " token " << v;
        }
      }
    }
  }
  EXPECT_GT(with_rules, 1500);
  EXPECT_GT(rows_checked, 10'000);
}

// The end of thinking is due, and somebody has forbidden it.
TEST(SequenceRules, SayWhereNothingIsAllowed) {
  GenerationRequest request;
  request.prompt_tokens = {1, kOpen};
  request.thinking = {.max_tokens = 1, .open = kOpen, .close = kClose};
  request.stop_token_ids = {kEnd, kClose};
  const auto allows_nothing = [&] {
    const std::unique_ptr<SequenceRules> rules = SequenceRules::Create(request, kVocabulary).value();
    EXPECT_FALSE(rules->AllowsNothing());
    rules->Append(5);
    return rules->AllowsNothing();
  };
  EXPECT_FALSE(allows_nothing());
  request.bad_words = {{kClose}};
  EXPECT_TRUE(allows_nothing());
  request.bad_words = {{5, kClose}};
  EXPECT_TRUE(allows_nothing());
  request.bad_words = {{6, kClose}};
  EXPECT_FALSE(allows_nothing());
  request.min_tokens = 1;
  EXPECT_FALSE(allows_nothing());
  request.min_tokens = 2;
  EXPECT_TRUE(allows_nothing()) << "it ends the output as well, too soon";
}

TEST(SequenceRules, NeutralParametersMakeNone) {
  GenerationRequest request;
  request.prompt_tokens = {1, 2};
  request.stop_token_ids = {3};
  EXPECT_EQ(SequenceRules::Create(request, kVocabulary).value(), nullptr);
}

TEST(SequenceRules, RefusesTokensThatDoNotExist) {
  GenerationRequest request;
  request.logit_bias = {{.token = kVocabulary, .bias = 1}};
  EXPECT_EQ(SequenceRules::Create(request, kVocabulary).status().code(), absl::StatusCode::kInvalidArgument);
  request.logit_bias.clear();
  request.bad_words = {{1, -1}};
  EXPECT_EQ(SequenceRules::Create(request, kVocabulary).status().code(), absl::StatusCode::kInvalidArgument);
}

// Which rows say something else than the target alone would.
TEST(SequenceRulesTest, TellsWhereTheLawIsAnother) {
  const auto changes = [](int64_t emitted, const std::function<void(GenerationRequest&)>& set) {
    GenerationRequest request;
    request.prompt_tokens = {1};
    set(request);
    const std::unique_ptr<SequenceRules> rules = SequenceRules::Create(request, kVocabulary).value();
    if (rules == nullptr) return false;
    for (int64_t i = 0; i < emitted; ++i) rules->Append(1);
    return rules->ChangesLaw(16);
  };
  using Request = GenerationRequest;
  EXPECT_FALSE(changes(5, [](Request&) {}));
  EXPECT_TRUE(changes(5, [](Request& r) { r.repetition_penalty = 1.1f; }));
  EXPECT_TRUE(changes(5, [](Request& r) { r.frequency_penalty = 2; }));
  EXPECT_TRUE(changes(5, [](Request& r) { r.presence_penalty = -1; }));
  EXPECT_TRUE(changes(5, [](Request& r) { r.logit_bias = {{.token = 3, .bias = 1}}; }));
  EXPECT_TRUE(changes(5, [](Request& r) { r.bad_words = {{3, 4}}; }));
  const auto min_tokens = [](Request& r) {
    r.stop_token_ids = {kEnd};
    r.min_tokens = 6;
  };
  EXPECT_TRUE(changes(5, min_tokens));
  EXPECT_FALSE(changes(6, min_tokens));
  const auto thinks = [](Request& r) {
    r.prompt_tokens = {kOpen};
    r.thinking = {.max_tokens = 40, .open = kOpen, .close = kClose};
  };
  EXPECT_FALSE(changes(23, thinks));
  EXPECT_TRUE(changes(24, thinks));
  EXPECT_FALSE(changes(39, [&](Request& r) {
    thinks(r);
    r.prompt_tokens.push_back(kClose);
  }));
}

}  // namespace
}  // namespace dflash
