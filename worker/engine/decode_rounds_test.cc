// How decode rounds run changes nothing but the time they take: captured or not, with the host's knowledge of
// the moment or a round behind, every request gets the same tokens from the same rounds.
#include "worker/decode/decode_rounds.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "worker/draft/forwarding_drafter.h"
#include "worker/testing/tiny_pair.h"

namespace dflash {
namespace {

using testing::GenerationOutcome;
using testing::GoldenPrompt;
using testing::GoldenRequest;
using testing::LoadGoldenPrompts;
using testing::LoadTinyPair;
using testing::RunAll;
using testing::TinyPair;

struct Mode {
  bool captured;
  int64_t rounds_ahead;
};

std::string Name(const ::testing::TestParamInfo<Mode>& info) {
  return std::string(info.param.captured ? "Captured" : "Eager") + std::to_string(info.param.rounds_ahead) +
         "Ahead";
}

// Adds up what the steps report.
class Totals final : public StepObserver {
 public:
  void OnStep(const StepReport& report, const EngineGauges&) override {
    prefill_rows += report.prefill_rows;
    verify_rows += report.verify_rows;
    rounds += static_cast<int64_t>(report.rounds.size());
    not_speculated += static_cast<int64_t>(report.not_speculated.size());
    for (const DecodedRound& decoded : report.rounds) accepted += decoded.round.accepted;
    device_time += report.draft_time + report.forward_time + report.sample_time + report.commit_time;
  }
  int64_t prefill_rows = 0, verify_rows = 0, rounds = 0, not_speculated = 0, accepted = 0;
  absl::Duration device_time;
};

std::unique_ptr<Engine> MakeEngine(TinyPair& pair, Drafter* drafter, Mode mode, StepObserver* observer) {
  EngineOptions options;
  options.vocabulary = pair.vocabulary;
  options.max_prefill_tokens = 128;  // longer prompts take several steps between the rounds of the others
  options.captured_rounds = mode.captured;
  options.rounds_ahead = mode.rounds_ahead;
  options.observer = observer;
  return *Engine::Create(options, pair.target.get(), drafter, pair.table.get(), pair.tokenizer.get(),
                         *pair.stream);
}

// More requests than slots, of every kind: greedy and sampled, short and long, ended by tokens, strings,
// budgets that the device knows of and deadlines that it does not.
std::vector<GenerationRequest> Requests() {
  const std::vector<GoldenPrompt> prompts = *LoadGoldenPrompts();
  std::vector<GenerationRequest> requests;
  for (size_t i = 0; i < 10; ++i) {
    GenerationRequest request = GoldenRequest(prompts[i * 5 % prompts.size()]);
    if (i % 3 == 1)
      request.sampling = {.temperature = 0.8f, .top_k = 20, .top_p = 0.95f, .min_p = 0, .seed = i};
    if (i % 5 == 2) request.max_tokens = static_cast<int64_t>(1 + i);
    if (i % 5 == 3) request.speculation = SpeculationMode::kOff;
    if (i % 5 == 4) request.max_draft_tokens = 4;
    if (i == 6) request.stop_strings = {"e", "zzz"};
    if (i == 7) request.max_tokens = 2;
    if (i == 8) request.stop_token_ids.clear();
    requests.push_back(std::move(request));
  }
  return requests;
}

class DecodeRoundsTest : public ::testing::TestWithParam<Mode> {
 protected:
  void SetUp() override {
    absl::StatusOr<TinyPair> pair = LoadTinyPair();
    ASSERT_TRUE(pair.ok()) << pair.status();
    pair_ = *std::move(pair);
  }
  TinyPair pair_;
};

TEST_P(DecodeRoundsTest, GiveTheSameTokensInTheSameRounds) {
  static Totals expected_totals;
  static const std::vector<GenerationOutcome> expected =
      *RunAll(*MakeEngine(pair_, pair_.drafter.get(), {false, 0}, &expected_totals), Requests());
  Totals totals;
  const std::unique_ptr<Engine> engine = MakeEngine(pair_, pair_.drafter.get(), GetParam(), &totals);
  const std::vector<GenerationOutcome> actual = *RunAll(*engine, Requests());
  for (size_t i = 0; i < expected.size(); ++i) {
    SCOPED_TRACE(i);
    ASSERT_TRUE(actual[i].done) << actual[i].status;
    EXPECT_EQ(actual[i].tokens, expected[i].tokens);
    EXPECT_EQ(actual[i].text, expected[i].text);
    EXPECT_EQ(actual[i].finished.reason, expected[i].finished.reason);
    ASSERT_EQ(actual[i].rounds.size(), expected[i].rounds.size());
    for (size_t round = 0; round < expected[i].rounds.size(); ++round) {
      EXPECT_EQ(actual[i].rounds[round].drafted, expected[i].rounds[round].drafted);
      EXPECT_EQ(actual[i].rounds[round].accepted, expected[i].rounds[round].accepted);
    }
  }
  EXPECT_GT(expected_totals.accepted, 0);
  EXPECT_EQ(totals.accepted, expected_totals.accepted);
  EXPECT_EQ(totals.rounds, expected_totals.rounds);
  EXPECT_EQ(totals.not_speculated, expected_totals.not_speculated);
  EXPECT_EQ(totals.prefill_rows, expected_totals.prefill_rows);
  EXPECT_GE(totals.verify_rows, expected_totals.verify_rows);  // more: rounds after an end the host decides
  EXPECT_GT(totals.device_time, absl::ZeroDuration());
  EXPECT_EQ(engine->Gauges().running, 0);
  EXPECT_EQ(engine->Gauges().pages_free, engine->Gauges().pages_total);
  EXPECT_EQ(pair_.table->free_slots(), pair_.table->slots());
}

TEST_P(DecodeRoundsTest, PlainDecodingToo) {
  std::vector<GenerationRequest> requests = Requests();
  requests.resize(4);
  static const std::vector<GenerationOutcome> expected =
      *RunAll(*MakeEngine(pair_, nullptr, {false, 0}, nullptr), requests);
  const std::vector<GenerationOutcome> actual =
      *RunAll(*MakeEngine(pair_, nullptr, GetParam(), nullptr), requests);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(actual[i].tokens, expected[i].tokens);
    EXPECT_GT(actual[i].tokens.size(), 1u);
  }
}

// A cancelled sequence leaves its slot to the next one while a round that it is part of may still run.
TEST_P(DecodeRoundsTest, CancelledSequencesMakeRoom) {
  struct Sink final : RequestSink {
    explicit Sink(absl::Status* status) : status(status) {}
    void OnStarted(const StartedReport&) override {}
    void OnTokens(TokensReport) override {}
    void OnFinished(const FinishedReport&) override {}
    void OnFailed(const absl::Status& failure) override { *status = failure; }
    absl::Status* status;
  };
  const std::vector<GoldenPrompt> prompts = *LoadGoldenPrompts();
  const std::unique_ptr<Engine> engine = MakeEngine(pair_, pair_.drafter.get(), GetParam(), nullptr);
  const std::vector<GenerationOutcome> alone = *RunAll(*engine, {GoldenRequest(prompts[0])});
  for (int round = 0; round < 2; ++round) {
    std::vector<absl::Status> failures(static_cast<size_t>(pair_.table->slots()));
    for (size_t i = 0; i < failures.size(); ++i) {
      GenerationRequest doomed = GoldenRequest(prompts[16 + i]);
      doomed.id = "doomed" + std::to_string(i);
      engine->Submit(doomed, std::make_unique<Sink>(&failures[i]));
    }
    for (int step = 0; step < 12 + round; ++step) ASSERT_TRUE(*engine->Step());
    for (size_t i = 0; i < failures.size(); ++i)
      engine->Cancel("doomed" + std::to_string(i), absl::CancelledError("enough"));
    const std::vector<GenerationOutcome> next = *RunAll(*engine, {GoldenRequest(prompts[0])});
    for (const absl::Status& failure : failures) EXPECT_EQ(failure.code(), absl::StatusCode::kCancelled);
    EXPECT_EQ(next[0].tokens, alone[0].tokens);
    EXPECT_EQ(next[0].rounds.size(), alone[0].rounds.size());
    EXPECT_EQ(pair_.table->free_slots(), pair_.table->slots());
  }
}

// Destroyed with rounds in flight.
TEST_P(DecodeRoundsTest, AnEngineMayGoAtAnyTime) {
  const std::unique_ptr<Engine> engine = MakeEngine(pair_, pair_.drafter.get(), GetParam(), nullptr);
  struct Sink final : RequestSink {
    void OnStarted(const StartedReport&) override {}
    void OnTokens(TokensReport) override {}
    void OnFinished(const FinishedReport&) override {}
    void OnFailed(const absl::Status&) override {}
  };
  engine->Submit(GoldenRequest((*LoadGoldenPrompts())[0]), std::make_unique<Sink>());
  for (int step = 0; step < 4; ++step) ASSERT_TRUE(*engine->Step());
}

// Forgets what was verified, as a drafter would whose wrapper does not pass everything on.
class ForgetfulDrafter final : public ForwardingDrafter {
 public:
  explicit ForgetfulDrafter(Drafter* drafter) : ForwardingDrafter(drafter) {}
  absl::Status IngestVerified(ConstMatrixView, SegmentList, const int32_t*) override {
    return absl::OkStatus();
  }
};

TEST_P(DecodeRoundsTest, LengthsThatDisagreeEndTheGroup) {
  ForgetfulDrafter forgetful(pair_.drafter.get());
  const absl::Status status =
      RunAll(*MakeEngine(pair_, &forgetful, GetParam(), nullptr), {GoldenRequest((*LoadGoldenPrompts())[0])})
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  EXPECT_NE(status.message().find("draft context ends at"), absl::string_view::npos) << status;
}

INSTANTIATE_TEST_SUITE_P(Modes, DecodeRoundsTest,
                         ::testing::Values(Mode{false, 0}, Mode{false, 1}, Mode{true, 0}, Mode{true, 1},
                                           Mode{true, 2}),
                         Name);

// Empty rounds of every shape: nothing but the graphs is left of them.
TEST(DecodeRoundsWarmUpTest, CapturesEveryShapeAndLeavesNoTrace) {
  absl::StatusOr<TinyPair> pair = LoadTinyPair();
  ASSERT_TRUE(pair.ok()) << pair.status();
  for (Drafter* drafter : {static_cast<Drafter*>(nullptr), static_cast<Drafter*>(pair->drafter.get())}) {
    for (bool captured : {false, true}) {
      auto rounds =
          DecodeRounds::Create({.vocabulary = pair->vocabulary, .captured = captured, .max_in_flight = 2},
                               pair->target.get(), drafter, pair->table.get(), *pair->stream);
      ASSERT_TRUE(rounds.ok()) << rounds.status();
      ASSERT_TRUE((*rounds)->WarmUp(3).ok());
      EXPECT_EQ((*rounds)->graphs(), !captured ? 0 : drafter == nullptr ? 3 : 6);
      EXPECT_EQ((*rounds)->in_flight(), 0);
    }
  }
  const GoldenPrompt prompt = (*LoadGoldenPrompts())[0];
  const std::vector<GenerationOutcome> expected =
      *RunAll(*MakeEngine(*pair, pair->drafter.get(), {false, 0}, nullptr), {GoldenRequest(prompt)});
  pair = LoadTinyPair();
  const std::unique_ptr<Engine> fresh = MakeEngine(*pair, pair->drafter.get(), {true, 1}, nullptr);
  ASSERT_TRUE(fresh->WarmUp(8).ok());
  const std::vector<GenerationOutcome> actual =
      *RunAll(*fresh, {GoldenRequest(prompt), GoldenRequest(prompt)});
  for (const GenerationOutcome& outcome : actual) EXPECT_EQ(outcome.tokens, expected[0].tokens);
}

TEST(EngineOptionsTest, StopTokensAndRoundsAheadAreBounded) {
  absl::StatusOr<TinyPair> pair = LoadTinyPair();
  ASSERT_TRUE(pair.ok()) << pair.status();
  GenerationRequest request = GoldenRequest((*LoadGoldenPrompts())[0]);
  request.stop_token_ids.assign(static_cast<size_t>(kMaxStopTokens) + 1, 1);
  const std::unique_ptr<Engine> engine = MakeEngine(*pair, pair->drafter.get(), {false, 0}, nullptr);
  EXPECT_EQ((*RunAll(*engine, {request}))[0].status.code(), absl::StatusCode::kInvalidArgument);
  EngineOptions options;
  options.vocabulary = pair->vocabulary;
  options.rounds_ahead = -1;
  EXPECT_EQ(Engine::Create(options, pair->target.get(), nullptr, pair->table.get(), nullptr, *pair->stream)
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dflash
