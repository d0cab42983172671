// What requests experience: limits, stops, cancellation, deadlines, company, and failures that stay their
// own.
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/model/safetensors.h"
#include "worker/model/testing/temporary_folder.h"
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

class EngineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<TinyPair> pair = LoadTinyPair();
    ASSERT_TRUE(pair.ok()) << pair.status();
    pair_ = *std::move(pair);
    absl::StatusOr<std::unique_ptr<Engine>> engine = MakeEngine(pair_, pair_.drafter.get());
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    static const std::vector<GoldenPrompt> prompts = [] {
      std::vector<GoldenPrompt> loaded = *LoadGoldenPrompts();
      EXPECT_TRUE(testing::UseOwnOutputs(loaded).ok());
      return loaded;
    }();
    prompts_ = prompts;
  }
  GenerationOutcome Run(GenerationRequest request) { return (*RunAll(*engine_, {std::move(request)}))[0]; }
  void ExpectIdle() {
    EXPECT_EQ(engine_->Gauges().running, 0);
    EXPECT_EQ(engine_->Gauges().waiting, 0);
    EXPECT_EQ(engine_->Gauges().pages_free, engine_->Gauges().pages_total);
  }

  TinyPair pair_;
  std::unique_ptr<Engine> engine_;
  std::vector<GoldenPrompt> prompts_;
};

TEST_F(EngineTest, OneTokenComesFromPrefillAlone) {
  GenerationRequest request = GoldenRequest(prompts_[0]);
  request.max_tokens = 1;
  const GenerationOutcome outcome = Run(request);
  ASSERT_TRUE(outcome.done) << outcome.status;
  EXPECT_THAT(outcome.tokens, ::testing::ElementsAre(prompts_[0].output_ids[0]));
  EXPECT_TRUE(outcome.rounds.empty());
  EXPECT_EQ(outcome.finished.reason, FinishReason::kLength);
  ExpectIdle();
}

TEST_F(EngineTest, EveryBudgetCutsTheSameText) {
  const std::vector<int32_t>& golden = prompts_[0].output_ids;
  std::vector<GenerationRequest> requests;
  for (int64_t budget = 1; budget <= 20; ++budget) {
    requests.push_back(GoldenRequest(prompts_[0]));
    requests.back().max_tokens = budget;
  }
  const std::vector<GenerationOutcome> outcomes = *RunAll(*engine_, requests);
  for (size_t i = 0; i < outcomes.size(); ++i) {
    const size_t budget = std::min(i + 1, golden.size());
    EXPECT_EQ(outcomes[i].tokens,
              std::vector<int32_t>(golden.begin(), golden.begin() + static_cast<int64_t>(budget)));
  }
  ExpectIdle();
}

TEST_F(EngineTest, EndsAtAStopTokenAndSaysWhich) {
  const GenerationOutcome outcome = Run(GoldenRequest(prompts_[0]));
  ASSERT_TRUE(outcome.done);
  EXPECT_EQ(outcome.finished.reason, FinishReason::kStopToken);
  EXPECT_EQ(outcome.finished.matched_stop_token, outcome.tokens.back());
  EXPECT_EQ(outcome.finished.completion_tokens, static_cast<int64_t>(outcome.tokens.size()));
  int64_t accepted = 0;
  for (const RoundReport& round : outcome.rounds) accepted += round.accepted;
  EXPECT_EQ(outcome.finished.accepted_tokens, accepted);
  EXPECT_GT(accepted, 0);
}

TEST_F(EngineTest, AStopStringCutsTheTextWhereverItFalls) {
  const GenerationOutcome whole = Run(GoldenRequest(prompts_[0]));
  ASSERT_GT(whole.text.size(), 12u);
  for (size_t begin : {size_t{1}, whole.text.size() / 2, whole.text.size() - 4}) {
    GenerationRequest request = GoldenRequest(prompts_[0]);
    request.stop_strings = {"never seen", whole.text.substr(begin, 3)};
    const GenerationOutcome outcome = Run(request);
    ASSERT_TRUE(outcome.done) << outcome.status;
    EXPECT_EQ(outcome.finished.reason, FinishReason::kStopString);
    EXPECT_EQ(outcome.finished.matched_stop_string, request.stop_strings[1]);
    EXPECT_EQ(outcome.text, whole.text.substr(0, whole.text.find(request.stop_strings[1])));
    EXPECT_LE(outcome.tokens.size(), whole.tokens.size());
    EXPECT_EQ(outcome.finished.completion_tokens, static_cast<int64_t>(outcome.tokens.size()));
  }
  ExpectIdle();
}

TEST_F(EngineTest, BadRequestsAreRefusedAloneAndTheNextOneWorks) {
  std::vector<GenerationRequest> requests(6, GoldenRequest(prompts_[0]));
  requests[0].prompt_tokens.clear();
  requests[1].max_tokens = 0;
  requests[2].max_tokens = std::numeric_limits<int64_t>::max();
  requests[3].prompt_tokens[2] = 4096;
  requests[4].stop_strings = {""};
  const std::vector<GenerationOutcome> outcomes = *RunAll(*engine_, requests);
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(outcomes[i].status.code(), absl::StatusCode::kInvalidArgument)
        << i << " " << outcomes[i].status;
  }
  EXPECT_EQ(outcomes[5].tokens, prompts_[0].output_ids);
  ExpectIdle();
}

// Not a fault of the model, which would be said of logits that are not numbers.
TEST_F(EngineTest, ParametersThatForbidEverythingAreTheRequestsFault) {
  const int32_t open = *pair_.tokenizer->FindAddedToken("<think>");
  const int32_t close = *pair_.tokenizer->FindAddedToken("</think>");
  std::vector<GenerationRequest> requests(3, GoldenRequest(prompts_[0]));
  requests[0].prompt_tokens.push_back(open);
  requests[0].thinking = {.max_tokens = 3, .open = open, .close = close};
  requests[0].bad_words = {{close}};
  requests[0].stop_token_ids.clear();
  requests[1].constraint.choices = {"0"};
  requests[1].bad_words = {pair_.tokenizer->Encode("0", AddedTokens::kAsText).value()};
  const std::vector<GenerationOutcome> outcomes = *RunAll(*engine_, requests);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(outcomes[i].status.code(), absl::StatusCode::kInvalidArgument) << outcomes[i].status;
    EXPECT_THAT(std::string(outcomes[i].status.message()), ::testing::HasSubstr("forbid all"));
  }
  EXPECT_EQ(outcomes[0].tokens.size(), 3u);
  EXPECT_EQ(outcomes[1].tokens.size(), 0u);
  EXPECT_EQ(outcomes[2].tokens, prompts_[0].output_ids);
  ExpectIdle();
}

TEST_F(EngineTest, MoreRequestsThanSlotsAllGetTheirOwnText) {
  std::vector<GenerationRequest> requests;
  for (const GoldenPrompt& prompt : prompts_) requests.push_back(GoldenRequest(prompt));
  const std::vector<GenerationOutcome> outcomes = *RunAll(*engine_, requests);
  for (size_t i = 0; i < outcomes.size(); ++i) EXPECT_EQ(outcomes[i].tokens, prompts_[i].output_ids) << i;
  ExpectIdle();
}

// Ends the given request from the stream's own events, then steps on.
TEST_F(EngineTest, CancellationFreesEverythingWithinOneStep) {
  GenerationRequest request = GoldenRequest(prompts_[16]);
  request.id = "doomed";
  struct Sink final : RequestSink {
    explicit Sink(absl::Status* status) : status(status) {}
    void OnStarted(const StartedReport&) override {}
    void OnTokens(TokensReport) override {}
    void OnFinished(const FinishedReport&) override {}
    void OnFailed(const absl::Status& failure) override { *status = failure; }
    absl::Status* status;
  };
  absl::Status failure;
  engine_->Submit(request, std::make_unique<Sink>(&failure));
  for (int step = 0; step < 5; ++step) ASSERT_TRUE(*engine_->Step());
  EXPECT_EQ(engine_->Gauges().running, 1);
  engine_->Cancel("someone else", absl::CancelledError("not this one"));
  engine_->Cancel("doomed", absl::CancelledError("the caller hung up"));
  ASSERT_TRUE(engine_->Step().ok());  // has work where it had looked a round ahead
  EXPECT_EQ(failure.code(), absl::StatusCode::kCancelled);
  ExpectIdle();
  EXPECT_FALSE(*engine_->Step());
}

TEST_F(EngineTest, ADeadlineEndsRequestsThatRunAndThatWait) {
  GenerationRequest late = GoldenRequest(prompts_[0]);
  late.deadline = absl::Now() - absl::Seconds(1);
  EXPECT_EQ(Run(late).status.code(), absl::StatusCode::kDeadlineExceeded);
  ExpectIdle();
}

TEST_F(EngineTest, RunServesUntilStopAndFailsWhatIsLeft) {
  absl::Status run_status;
  std::thread thread([&] { run_status = engine_->Run(); });
  struct Sink final : RequestSink {
    Sink(absl::Notification* started, absl::Notification* ended, absl::Status* status)
        : started(started), ended(ended), status(status) {}
    void OnStarted(const StartedReport&) override { started->Notify(); }
    void OnTokens(TokensReport) override {}
    void OnFinished(const FinishedReport&) override { ended->Notify(); }
    void OnFailed(const absl::Status& failure) override {
      *status = failure;
      ended->Notify();
    }
    absl::Notification* started;
    absl::Notification* ended;
    absl::Status* status;
  };
  absl::Notification started, ended, started_too, stopped;
  absl::Status first, second;
  engine_->Submit(GoldenRequest(prompts_[0]), std::make_unique<Sink>(&started, &ended, &first));
  ended.WaitForNotification();  // Run had been asleep
  EXPECT_TRUE(first.ok()) << first;
  GenerationRequest endless = GoldenRequest(prompts_[16]);
  endless.stop_token_ids.clear();
  endless.max_tokens = 600;
  engine_->Submit(endless, std::make_unique<Sink>(&started_too, &stopped, &second));
  started_too.WaitForNotification();
  engine_->Stop();
  stopped.WaitForNotification();
  EXPECT_EQ(second.code(), absl::StatusCode::kUnavailable);
  thread.join();
  EXPECT_TRUE(run_status.ok()) << run_status;
}

TEST(EngineNanTest, ARequestWhoseLogitsAreNotNumbersFailsAlone) {
  // A copy of the target in which one token's embedding is NaN.
  constexpr int32_t kPoisoned = 77;
  const TemporaryFolder folder;
  const int64_t cols = TargetConfig::Load(testing::SourcePath("models/tiny-qwen3.6"))->hidden_size;
  ASSERT_TRUE(
      testing::CopyTargetWithNan(folder.path(), "model.language_model.embed_tokens.weight", kPoisoned * cols)
          .ok());
  testing::TinyPairOptions options;
  options.target_dir = folder.path();
  absl::StatusOr<TinyPair> pair = LoadTinyPair(options);
  ASSERT_TRUE(pair.ok()) << pair.status();
  struct FaultCount final : StepObserver {
    void OnStep(const StepReport& report, const EngineGauges&) override { faults += report.numeric_faults; }
    int64_t faults = 0;
  } observer;
  absl::StatusOr<std::unique_ptr<Engine>> engine = MakeEngine(*pair, pair->drafter.get(), &observer);
  ASSERT_TRUE(engine.ok());
  std::vector<GoldenPrompt> prompts = *LoadGoldenPrompts();
  prompts.resize(1);
  ASSERT_TRUE(testing::UseOwnOutputs(prompts).ok());
  const GoldenPrompt good = prompts[0];
  GenerationRequest poisoned = GoldenRequest(good);
  poisoned.prompt_tokens.insert(poisoned.prompt_tokens.begin() + 3, kPoisoned);
  const std::vector<GenerationOutcome> outcomes =
      *RunAll(**engine, {poisoned, GoldenRequest(good), poisoned});
  EXPECT_EQ(outcomes[0].status.code(), absl::StatusCode::kInternal) << outcomes[0].status;
  EXPECT_EQ(ReasonOf(outcomes[0].status), "NUMERIC_FAULT");
  EXPECT_EQ(outcomes[2].status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(outcomes[1].tokens, good.output_ids);
  EXPECT_EQ(observer.faults, 2);
  // The slot that held NaN is clean again.
  EXPECT_EQ((*RunAll(**engine, {GoldenRequest(good), GoldenRequest(good)}))[1].tokens, good.output_ids);
}

}  // namespace
}  // namespace dflash
