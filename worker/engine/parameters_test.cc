// Parameters that change what may be chosen, combined at random: the output is the same whatever drafts are
// made, on one rank and on several, and obeys the parameters. Tests named *Full* run thousands of cases
// (label slow).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "text/testing/exploding_schemas.h"
#include "worker/testing/company.h"
#include "worker/testing/rank_threads.h"
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

std::vector<GenerationRequest> Requests(size_t count, uint32_t seed, int64_t longest_prompt = 48) {
  std::vector<GenerationRequest> requests =
      testing::MixedRequests(count, seed, {.longest_prompt = longest_prompt, .most_tokens = 40});
  std::mt19937 random(seed + 1);
  for (GenerationRequest& request : requests) testing::AddParameters(random, request);
  // Several choices of one request: the coordinator makes a request with a seed of its own of each.
  for (size_t i = 3; i + 2 < count; i += 10) {
    for (size_t choice = 1; choice <= 1 + random() % 2; ++choice) {
      requests[i + choice] = requests[i];
      requests[i + choice].id = absl::StrCat(requests[i].id, "#", choice);
      requests[i + choice].sampling.seed += choice * 0x9e3779b97f4a7c15u;
      requests[i + choice].prompt_log_probs = 0;
    }
  }
  return requests;
}

// Which parameters a request has, by their names in the API.
std::vector<std::string> ParametersOf(const GenerationRequest& request) {
  const std::pair<const char*, bool> parameters[] = {
      {"temperature", request.sampling.temperature > 0},
      {"top_k", request.sampling.top_k > 0},
      {"top_p", request.sampling.top_p < 1},
      {"min_p", request.sampling.min_p > 0},
      {"seed", request.sampling.seed > 0},
      {"repetition_penalty", request.repetition_penalty != 1},
      {"frequency_penalty", request.frequency_penalty != 0},
      {"presence_penalty", request.presence_penalty != 0},
      {"logit_bias", !request.logit_bias.empty()},
      {"bad_words", !request.bad_words.empty()},
      {"min_tokens", request.min_tokens > 0},
      {"ignore_eos", request.stop_token_ids.empty()},
      {"stop strings", !request.stop_strings.empty()},
      {"stop ids", request.stop_token_ids.size() > 2},
      {"include_stop_in_text", request.include_stop_in_text},
      {"top_logprobs", request.log_probs > 0},
      {"prompt_logprobs", request.prompt_log_probs > 0},
      {"n", request.id.find('#') != std::string::npos},
      {"max_thinking_tokens", request.thinking.max_tokens >= 0},
      {"speculation.mode", request.speculation == SpeculationMode::kOff},
      {"max_draft_tokens", request.max_draft_tokens > 0},
      {"json_object", request.constraint.json_object},
      {"json_schema", !request.constraint.json_schema.empty()},
      {"choice", !request.constraint.choices.empty()},
      {"priority", request.priority != 0},
  };
  std::vector<std::string> names = {"requests"};
  for (const auto& [name, is_set] : parameters) {
    if (is_set) names.emplace_back(name);
  }
  return names;
}
constexpr size_t kParameters = 25;

std::vector<GenerationRequest> WithoutDrafts(std::vector<GenerationRequest> requests) {
  for (GenerationRequest& request : requests) request.speculation = SpeculationMode::kOff;
  return requests;
}

void ExpectSameLogProbs(const GenerationOutcome& actual, const GenerationOutcome& expected) {
  for (const auto places : {&GenerationOutcome::log_probs, &GenerationOutcome::prompt_log_probs}) {
    ASSERT_EQ((actual.*places).size(), (expected.*places).size());
    for (size_t i = 0; i < (expected.*places).size(); ++i) {
      const TokenLogProbs &is = (actual.*places)[i], &was = (expected.*places)[i];
      ASSERT_EQ(is.log_prob, was.log_prob) << "place " << i;
      ASSERT_EQ(is.top.size(), was.top.size());
      for (size_t k = 0; k < was.top.size(); ++k) {
        ASSERT_EQ(is.top[k].token, was.top[k].token);
        ASSERT_EQ(is.top[k].log_prob, was.top[k].log_prob);
      }
    }
  }
}

// `wanted` as in GenerationRequest::log_probs.
void ExpectLogProbs(const std::vector<TokenLogProbs>& places, int32_t wanted, size_t count) {
  if (wanted == 0) {
    EXPECT_TRUE(places.empty());
    return;
  }
  ASSERT_EQ(places.size(), count);
  for (const TokenLogProbs& place : places) {
    EXPECT_EQ(place.top.size(), static_cast<size_t>(wanted - 1));
    EXPECT_LE(place.log_prob, 0);
    double sum = 0;
    for (size_t k = 0; k < place.top.size(); ++k) {
      if (k > 0) {
        EXPECT_LE(place.top[k].log_prob, place.top[k - 1].log_prob);
      }
      sum += std::exp(static_cast<double>(place.top[k].log_prob));
    }
    EXPECT_LE(sum, 1.0001);
    if (!place.top.empty()) {
      EXPECT_LE(place.log_prob, place.top[0].log_prob);
    }
  }
}

// What can be seen of an output without the model.
void ExpectObeys(const GenerationRequest& request, const GenerationOutcome& outcome) {
  const std::vector<int32_t>& tokens = outcome.tokens;
  for (size_t i = 0; i < std::min(tokens.size(), static_cast<size_t>(request.min_tokens)); ++i)
    EXPECT_THAT(request.stop_token_ids, ::testing::Not(::testing::Contains(tokens[i])));
  for (const std::vector<int32_t>& word : request.bad_words)
    EXPECT_EQ(std::search(tokens.begin(), tokens.end(), word.begin(), word.end()), tokens.end());
  ExpectLogProbs(outcome.log_probs, request.log_probs, tokens.size());
  ExpectLogProbs(outcome.prompt_log_probs, request.prompt_log_probs, request.prompt_tokens.size() - 1);
  EXPECT_LE(static_cast<int64_t>(tokens.size()), request.max_tokens);
  for (size_t i = 0; i + 1 < tokens.size(); ++i)
    EXPECT_THAT(request.stop_token_ids, ::testing::Not(::testing::Contains(tokens[i]))) << "went on at " << i;
  for (const std::string& stop : request.stop_strings) {
    if (request.min_tokens > 0) continue;  // there it may be in the text before
    const size_t found = outcome.text.find(stop);
    if (found == std::string::npos) continue;
    EXPECT_TRUE(request.include_stop_in_text && outcome.finished.reason == FinishReason::kStopString) << stop;
    EXPECT_EQ(found + stop.size(), outcome.text.size()) << stop;
  }
  if (request.thinking.max_tokens < 0) return;
  const auto is = [&](int32_t token, int32_t mark) { return token == mark; };
  bool thinks = false;
  int64_t thought = 0;
  for (const int32_t token : request.prompt_tokens)
    thinks = is(token, request.thinking.open) || (thinks && !is(token, request.thinking.close));
  for (const int32_t token : tokens) {
    if (is(token, request.thinking.open)) thought = 0;
    thought += thinks && !is(token, request.thinking.open) && !is(token, request.thinking.close);
    thinks = is(token, request.thinking.open) || (thinks && !is(token, request.thinking.close));
    EXPECT_LE(thought, request.thinking.max_tokens);
  }
}

void CheckCases(size_t count, uint32_t first_seed) {
  testing::TinyPairOptions options;
  options.slots = 8;
  options.checkpoints = 8;
  absl::StatusOr<TinyPair> pair = LoadTinyPair(options);
  ASSERT_TRUE(pair.ok()) << pair.status();
  int64_t drafted = 0, accepted = 0, changed = 0, contradictory = 0;
  std::map<std::string, int64_t> parameters;
  constexpr size_t kTogether = 50;
  for (size_t done = 0; done < count; done += kTogether) {
    const uint32_t seed = first_seed + static_cast<uint32_t>(done);
    // Now and then prompts of several chunks, of which some begin with what others have cached.
    const int64_t longest_prompt = done / kTogether % 5 == 1 ? 200 : 48;
    const std::vector<GenerationRequest> requests =
        Requests(std::min(kTogether, count - done), seed, longest_prompt);
    const auto speculative = *RunAll(**MakeEngine(*pair, pair->drafter.get()), requests);
    const auto plain = *RunAll(**MakeEngine(*pair, nullptr), WithoutDrafts(requests));
    for (size_t i = 0; i < requests.size(); ++i) {
      SCOPED_TRACE(absl::StrCat("seed ", seed, ", ", requests[i].id));
      for (const std::string& name : ParametersOf(requests[i])) ++parameters[name];
      ASSERT_EQ(speculative[i].tokens, plain[i].tokens);
      if (absl::IsInvalidArgument(plain[i].status)) {  // its parameters contradict each other
        ++contradictory;
        ASSERT_EQ(speculative[i].status, plain[i].status);
        continue;
      }
      ASSERT_TRUE(plain[i].done) << plain[i].status;
      ASSERT_TRUE(speculative[i].done) << speculative[i].status;
      ASSERT_EQ(speculative[i].text, plain[i].text);
      ASSERT_EQ(speculative[i].finished.reason, plain[i].finished.reason);
      ExpectSameLogProbs(speculative[i], plain[i]);
      ExpectObeys(requests[i], plain[i]);
      drafted += speculative[i].finished.drafted_tokens;
      accepted += speculative[i].finished.accepted_tokens;
    }
    // The parameters do something: without them most outputs differ.
    if (done > 0) continue;
    std::vector<GenerationRequest> bare =
        testing::MixedRequests(requests.size(), seed, {.longest_prompt = 48, .most_tokens = 40});
    const auto other = *RunAll(**MakeEngine(*pair, nullptr), WithoutDrafts(bare));
    for (size_t i = 0; i < bare.size(); ++i) changed += other[i].tokens != plain[i].tokens;
  }
  EXPECT_GT(changed, static_cast<int64_t>(std::min(kTogether, count)) / 5);
  EXPECT_GT(drafted, static_cast<int64_t>(count) * 10);
  EXPECT_GT(accepted, static_cast<int64_t>(count));
  EXPECT_LE(contradictory, 1 + static_cast<int64_t>(count) / 50);
  std::printf("%zu cases, %lld drafted, %lld accepted:", count, static_cast<long long>(drafted),
              static_cast<long long>(accepted));
  EXPECT_EQ(parameters.size(), 1 + kParameters);
  for (const auto& [name, requests] : parameters) {
    std::printf(" %lld %s,", static_cast<long long>(requests), name.c_str());
    EXPECT_GE(requests, static_cast<int64_t>(count) / 100) << name;
  }
  std::printf("\n");
}

TEST(Parameters, SpeculationChangesNothing) { CheckCases(60, 1); }
// In parts, so that they can be spread over machines (GTEST_TOTAL_SHARDS) and show how far they are.
class ParametersFull : public ::testing::TestWithParam<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(Part, ParametersFull, ::testing::Range(uint32_t{1}, uint32_t{11}));
TEST_P(ParametersFull, SpeculationChangesNothing) { CheckCases(600, 1000 * GetParam()); }

// Ranks decide alike, and log probabilities come together from their parts.
void CheckRanks(size_t count) {
  const std::vector<GenerationRequest> requests = Requests(count, 7);
  testing::TinyPairOptions options;
  options.threads = 1;
  options.slots = 8;
  const auto group = testing::RankThreads::Load(2, options);
  ASSERT_TRUE(group.ok()) << group.status();
  const auto speculative = (*group)->RunRequests(requests);
  ASSERT_TRUE(speculative.ok()) << speculative.status();
  const auto plain = (*group)->RunRequests(WithoutDrafts(requests), /*speculate=*/false);
  ASSERT_TRUE(plain.ok()) << plain.status();
  int64_t accepted = 0;
  for (size_t rank = 0; rank < 2; ++rank) {
    for (size_t i = 0; i < requests.size(); ++i) {
      SCOPED_TRACE(absl::StrCat("rank ", rank, ", ", requests[i].id));
      const GenerationOutcome& expected = (*plain)[0][i];
      const GenerationOutcome& actual = (*speculative)[rank][i];
      ASSERT_TRUE(expected.done) << expected.status;
      ASSERT_TRUE(actual.done) << actual.status;
      ASSERT_EQ(actual.tokens, expected.tokens);
      ExpectSameLogProbs(actual, expected);
      ExpectObeys(requests[i], expected);
      accepted += actual.finished.accepted_tokens;
    }
  }
  EXPECT_GT(accepted, static_cast<int64_t>(count));
}

TEST(Parameters, SpeculationChangesNothingOnTwoRanks) { CheckRanks(24); }
TEST(Parameters, SpeculationChangesNothingOnTwoRanksFull) { CheckRanks(500); }

class ParametersTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<TinyPair> pair = LoadTinyPair();
    ASSERT_TRUE(pair.ok()) << pair.status();
    pair_ = *std::move(pair);
    engine_ = *MakeEngine(pair_, pair_.drafter.get());
    request_ = GoldenRequest((*LoadGoldenPrompts())[0]);
  }
  GenerationOutcome Run(const GenerationRequest& request) { return (*RunAll(*engine_, {request}))[0]; }

  TinyPair pair_;
  std::unique_ptr<Engine> engine_;
  GenerationRequest request_;
};

// The greedy choice under bias and penalties of the output, worked out from the 20 best log probabilities of
// each place.
TEST_F(ParametersTest, PenaltiesAndBiasDecideByTheirNumbers) {
  request_.log_probs = 21;
  request_.frequency_penalty = 0.75f;
  request_.presence_penalty = 0.5f;
  request_.max_tokens = 60;
  request_.stop_token_ids.clear();
  const GenerationOutcome free = Run(request_);
  request_.logit_bias = {{.token = free.tokens[2], .bias = -3}, {.token = free.tokens[5], .bias = -100}};
  const GenerationOutcome outcome = Run(request_);
  ASSERT_TRUE(outcome.done) << outcome.status;
  EXPECT_NE(outcome.tokens, free.tokens);
  std::vector<int32_t> before;
  for (size_t i = 0; i < outcome.tokens.size(); ++i) {
    double best = -INFINITY;
    int32_t chosen = -1;
    for (const TokenLogProbs::Top& top : outcome.log_probs[i].top) {
      const auto count = std::count(before.begin(), before.end(), top.token);
      double value = top.log_prob - 0.75 * static_cast<double>(count) - (count > 0 ? 0.5 : 0);
      if (top.token == free.tokens[2]) value -= 3;
      if (top.token == free.tokens[5]) value -= 100;
      if (value > best + 1e-5) {
        best = value;
        chosen = top.token;
      }
    }
    // Nothing here raises a logit, so whatever is not among the best cannot win if the winner is above the
    // last of them.
    if (best > outcome.log_probs[i].top.back().log_prob) {
      ASSERT_EQ(outcome.tokens[i], chosen) << "place " << i;
    }
    before.push_back(outcome.tokens[i]);
  }
  EXPECT_GT(outcome.finished.drafted_tokens, 0);
}

TEST_F(ParametersTest, ABiasThatNothingWithstands) {
  request_.logit_bias = {{.token = 77, .bias = 100}};
  request_.stop_token_ids.clear();
  request_.max_tokens = 9;
  EXPECT_EQ(Run(request_).tokens, std::vector<int32_t>(9, 77));
}

TEST_F(ParametersTest, MinTokensGoPastTheEnd) {
  const GenerationOutcome whole = Run(request_);
  ASSERT_EQ(whole.finished.reason, FinishReason::kStopToken);
  const auto length = static_cast<int64_t>(whole.tokens.size());
  for (const int64_t min : {length - 1, length, length + 7}) {
    request_.min_tokens = min;
    request_.max_tokens = length + 20;
    const GenerationOutcome outcome = Run(request_);
    EXPECT_GE(static_cast<int64_t>(outcome.tokens.size()), min);
    EXPECT_EQ(outcome.tokens == whole.tokens, min < length) << min;
  }
}

TEST_F(ParametersTest, StopStringsAreLookedForBehindMinTokens) {
  const GenerationOutcome whole = Run(request_);
  request_.stop_strings = {whole.text.substr(0, 2)};
  EXPECT_TRUE(Run(request_).text.empty());
  request_.include_stop_in_text = true;
  EXPECT_EQ(Run(request_).text, whole.text.substr(0, 2));
  request_.min_tokens = 3;
  const GenerationOutcome later = Run(request_);
  EXPECT_GT(later.tokens.size(), 3u);
}

TEST_F(ParametersTest, ThinkingIsCutShort) {
  const int32_t open = *pair_.tokenizer->FindAddedToken("<think>"),
                close = *pair_.tokenizer->FindAddedToken("</think>");
  request_.stop_token_ids.clear();
  request_.max_tokens = 30;
  request_.logit_bias = {{.token = close, .bias = -100}};  // it would never stop by itself
  if (request_.prompt_tokens.back() != open) request_.prompt_tokens.push_back(open);
  for (const int64_t budget : {0, 1, 5, 17}) {
    request_.thinking = {.max_tokens = budget, .open = open, .close = close};
    const GenerationOutcome outcome = Run(request_);
    ASSERT_TRUE(outcome.done) << outcome.status;
    const auto end = std::find(outcome.tokens.begin(), outcome.tokens.end(), close);
    EXPECT_EQ(end - outcome.tokens.begin(), budget);
  }
}

// Text of JSON and nothing else, however the model would rather go on; with drafts.
TEST_F(ParametersTest, ConstraintsHold) {
  request_.max_tokens = 120;
  const std::vector<int32_t> stops = request_.stop_token_ids;
  for (const bool has_stops : {true, false}) {
    request_.stop_token_ids = has_stops ? stops : std::vector<int32_t>();
    const FinishReason reason = has_stops ? FinishReason::kStopToken : FinishReason::kConstraint;
    request_.constraint = {};
    request_.constraint.json_schema =
        R"({"type": "object", "required": ["name", "count", "tags"], "properties": {
        "name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"},
        "tags": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"enum": ["red", "green"]}}}})";
    const GenerationOutcome schema = Run(request_);
    ASSERT_TRUE(schema.done) << schema.status;
    const auto json = nlohmann::json::parse(schema.text, nullptr, false);
    ASSERT_FALSE(json.is_discarded()) << schema.text;
    EXPECT_TRUE(json.at("name").is_string());
    EXPECT_TRUE(json.at("count").is_number_integer());
    EXPECT_GE(json.at("tags").size(), 1u);
    EXPECT_EQ(schema.finished.reason, reason);
    EXPECT_GT(schema.finished.drafted_tokens, 0);

    request_.constraint = {};
    request_.constraint.choices = {"certainly", "certainly not"};
    const GenerationOutcome choice = Run(request_);
    EXPECT_THAT(request_.constraint.choices, ::testing::Contains(choice.text));
    EXPECT_EQ(choice.finished.reason, reason);
  }
  request_.stop_token_ids = stops;
  request_.constraint = {};
  request_.constraint.json_object = true;
  const GenerationOutcome object = Run(request_);
  ASSERT_TRUE(object.done) << object.status;
  if (object.finished.reason == FinishReason::kStopToken) {
    EXPECT_TRUE(nlohmann::json::parse(object.text, nullptr, false).is_object()) << object.text;
  }
  EXPECT_THAT(object.text, ::testing::ContainsRegex("^[ \n\t]*[{]"));
}

TEST_F(ParametersTest, AConstraintBeginsBehindThinking) {
  const int32_t open = *pair_.tokenizer->FindAddedToken("<think>"),
                close = *pair_.tokenizer->FindAddedToken("</think>");
  request_.prompt_tokens.push_back(open);
  request_.stop_token_ids.clear();  // it may end in the middle of thinking
  request_.constraint.choices = {"yes", "no"};
  request_.constraint.thinking_open = open;
  request_.constraint.thinking_close = close;
  request_.thinking = {.max_tokens = 7, .open = open, .close = close};
  const GenerationOutcome outcome = Run(request_);
  ASSERT_TRUE(outcome.done) << outcome.status;
  const auto end = std::find(outcome.tokens.begin(), outcome.tokens.end(), close);
  ASSERT_NE(end, outcome.tokens.end());
  EXPECT_LE(end - outcome.tokens.begin(), 7);
  EXPECT_THAT(outcome.text,
              ::testing::AnyOf(::testing::EndsWith("</think>yes"), ::testing::EndsWith("</think>no")));
}

TEST_F(ParametersTest, AConstraintThatBadWordsForbidSaysSo) {
  request_.constraint.choices = {"yes"};
  for (int32_t token = 0; token < 4088; ++token) {
    const auto bytes = pair_.tokenizer->Find(token);
    if (bytes.ok() && !bytes->bytes.empty() && bytes->bytes[0] == 'y') request_.bad_words.push_back({token});
  }
  const GenerationOutcome outcome = Run(request_);
  EXPECT_EQ(outcome.status.code(), absl::StatusCode::kInvalidArgument) << outcome.status;
  EXPECT_THAT(std::string(outcome.status.message()), ::testing::HasSubstr("constraint"));
  EXPECT_TRUE(Run(GoldenRequest((*LoadGoldenPrompts())[0])).done);
}

TEST_F(ParametersTest, AConstraintThatBecomesTooLargeSaysSo) {
  request_.constraint.json_schema = testing::DoublingSchema();
  request_.max_tokens = 1000;
  GenerationRequest resumed = request_;
  const int32_t bracket = pair_.tokenizer->Encode("[", AddedTokens::kAsText)->front();
  resumed.output_tokens.assign(30, bracket);
  GenerationRequest plain = request_;
  plain.speculation = SpeculationMode::kOff;
  const GenerationOutcome first = Run(request_);
  EXPECT_THAT(first.text, ::testing::HasSubstr("["));
  EXPECT_EQ(Run(request_).tokens, first.tokens);
  EXPECT_EQ(Run(plain).tokens, first.tokens);
  for (const GenerationOutcome& outcome : {first, Run(resumed)}) {
    EXPECT_EQ(outcome.status.code(), absl::StatusCode::kResourceExhausted) << outcome.status;
    EXPECT_EQ(ReasonOf(outcome.status), "CONSTRAINT_TOO_LARGE");
  }
  EXPECT_TRUE(Run(GoldenRequest((*LoadGoldenPrompts())[0])).done);
}

// Others that want the same language have read more of it than is kept.
TEST_F(ParametersTest, AConstraintIsTheSameForTheLastAsForTheFirst) {
  std::mt19937 random(9);
  for (int i = 0; i < 32; ++i) {
    std::string& text = request_.constraint.choices.emplace_back();
    for (int j = 0; j < 1000; ++j) text += static_cast<char>('a' + static_cast<int>(random() % 26));
  }
  request_.max_tokens = 1000;
  GenerationRequest begin = request_;
  begin.max_tokens = 30;
  const GenerationOutcome first = Run(begin);
  ASSERT_TRUE(first.done) << first.status;
  for (const std::string& text : request_.constraint.choices) {
    GenerationRequest rest = request_;
    rest.output_tokens = *pair_.tokenizer->Encode(text, AddedTokens::kAsText);
    rest.output_tokens.resize(rest.output_tokens.size() - 3);
    rest.report_sent_text = true;
    const GenerationOutcome outcome = Run(rest);
    ASSERT_TRUE(outcome.done) << outcome.status;
    EXPECT_EQ(outcome.started.sent_text + outcome.text, text);
  }
  EXPECT_EQ(Run(begin).tokens, first.tokens);
}

TEST_F(ParametersTest, AThinkingLimitThatCannotEndSaysSo) {
  const int32_t open = *pair_.tokenizer->FindAddedToken("<think>"),
                close = *pair_.tokenizer->FindAddedToken("</think>");
  request_.prompt_tokens.push_back(open);
  request_.thinking = {.max_tokens = 3, .open = open, .close = close};
  GenerationRequest forbids = request_, waits = request_;
  forbids.bad_words = {{close}};
  forbids.stop_token_ids.clear();  // it may end in the middle of thinking
  waits.stop_token_ids.push_back(close);
  waits.min_tokens = 10;
  for (const GenerationRequest& request : {forbids, waits}) {
    const GenerationOutcome outcome = Run(request);
    EXPECT_EQ(outcome.status.code(), absl::StatusCode::kInvalidArgument) << outcome.status;
    EXPECT_THAT(std::string(outcome.status.message()), ::testing::HasSubstr("max_thinking_tokens"));
    EXPECT_EQ(outcome.tokens.size(), 3u);
  }
  EXPECT_TRUE(Run(request_).done);
}

TEST_F(ParametersTest, AnOutputThatTheConstraintForbidsDoesNotGoOn) {
  const GenerationOutcome plain = Run(request_);
  ASSERT_GE(plain.tokens.size(), 2u);
  request_.output_tokens = {plain.tokens.begin(), plain.tokens.begin() + 2};
  for (const bool object : {true, false}) {
    request_.constraint = {};
    request_.constraint.json_object = object;
    if (!object) request_.constraint.choices = {"yes"};
    const GenerationOutcome outcome = Run(request_);
    EXPECT_EQ(outcome.status.code(), absl::StatusCode::kInvalidArgument) << outcome.status;
    EXPECT_THAT(std::string(outcome.status.message()), ::testing::HasSubstr("constraint"));
    EXPECT_TRUE(outcome.tokens.empty());
  }
}

// An output that goes on behind any of its tokens is the rest of the undisturbed one.
TEST_F(ParametersTest, ARequestGoesOnWhereItWas) {
  std::vector<GenerationRequest> requests = Requests(16, 99);
  const std::vector<GenerationOutcome> whole = *RunAll(*engine_, requests);
  for (size_t i = 0; i < requests.size(); ++i) {
    for (size_t cut :
         {size_t{1}, whole[i].tokens.size() / 2, whole[i].tokens.size() - 1, whole[i].tokens.size()}) {
      if (cut == 0 || cut > whole[i].tokens.size()) continue;
      SCOPED_TRACE(absl::StrCat(requests[i].id, " cut after ", cut, " of ", whole[i].tokens.size()));
      GenerationRequest rest = requests[i];
      rest.output_tokens.assign(whole[i].tokens.begin(), whole[i].tokens.begin() + static_cast<int64_t>(cut));
      rest.report_sent_text = true;
      const GenerationOutcome outcome = Run(rest);
      ASSERT_TRUE(outcome.done) << outcome.status;
      std::vector<int32_t> tokens = rest.output_tokens;
      tokens.insert(tokens.end(), outcome.tokens.begin(), outcome.tokens.end());
      EXPECT_EQ(tokens, whole[i].tokens);
      EXPECT_EQ(outcome.finished.reason, whole[i].finished.reason);
      EXPECT_EQ(outcome.finished.completion_tokens, whole[i].finished.completion_tokens);
      EXPECT_EQ(outcome.started.sent_text + outcome.text, whole[i].text);
    }
  }
}

}  // namespace
}  // namespace dflash
