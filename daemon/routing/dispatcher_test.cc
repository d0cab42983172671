#include "daemon/routing/dispatcher.h"

#include <algorithm>
#include <atomic>

#include "absl/strings/str_cat.h"
#include "daemon/request/request_error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::atomic<int64_t> now_seconds{1000};
absl::Time Now() { return absl::FromUnixSeconds(now_seconds); }

// Remembers what it is asked to do.
class FakeGroup : public Group {
 public:
  const std::string& name() const override { return name_; }
  void Submit(const std::string& key, const GroupRequest& request) override {
    submitted.push_back(key);
    prompts.push_back(static_cast<int64_t>(request.prompt_tokens.size()));
    outputs.push_back(request.output_tokens);
    requests.push_back(request);
  }
  void Cancel(const std::string& key, const absl::Status&) override { cancelled.push_back(key); }
  absl::Duration HeartbeatAge() const override { return silence; }
  absl::Duration silence;
  std::vector<std::string> submitted;
  std::vector<int64_t> prompts;
  std::vector<std::vector<int32_t>> outputs;  // that requests go on behind
  std::vector<GroupRequest> requests;
  std::vector<std::string> cancelled;

 private:
  std::string name_ = "0";
};

struct Recorder : OutputListener {
  void OnStarted(const StartedOutput&) override { ++started; }
  void OnTokens(StepOutput output) override {
    tokens.insert(tokens.end(), output.tokens.begin(), output.tokens.end());
  }
  void OnFinished(const FinishedOutput& output) override {
    ++finished;
    summary = output;
  }
  void OnFailed(const absl::Status& status) override {
    ++failed;
    error = status;
  }
  int started = 0;
  int finished = 0;
  int failed = 0;
  FinishedOutput summary;
  absl::Status error;
  std::vector<int32_t> tokens;
};

StepOutput Output(const std::vector<int32_t>& tokens, const std::string& text = "") {
  StepOutput output;
  output.tokens = tokens;
  output.text = text;
  return output;
}

class DispatcherTest : public ::testing::Test {
 protected:
  DispatcherTest() { dispatcher_.AddGroup(&group_); }

  void Ready(uint64_t credits) {
    dispatcher_.OnReady(&group_, GroupInfo());
    dispatcher_.OnCredits(&group_, credits);
  }
  // Reserves and submits; the recorder of the request.
  std::shared_ptr<Recorder> Submit(const std::string& id, int64_t tokens = 3,
                                   absl::Time deadline = absl::InfiniteFuture(),
                                   const std::string& client = "", int32_t priority = 0) {
    auto recorder = std::make_shared<Recorder>();
    absl::Status status = dispatcher_.Reserve(id, client);
    if (status.ok()) {
      GroupRequest request;
      request.prompt_tokens.assign(static_cast<size_t>(tokens), 1);
      request.max_tokens = 10;
      request.deadline = deadline;
      request.priority = priority;
      status = dispatcher_.Submit(id, std::move(request), recorder).status();
    }
    recorder->error = status;
    return recorder;
  }

  FakeGroup group_;
  Dispatcher dispatcher_{{.queue = {.max_requests = 2, .max_prompt_tokens = 100}}, &Now};
};

TEST_F(DispatcherTest, RefusesWhileLoading) {
  const absl::Status status = Submit("a")->error;
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(DetailsOf(status).reason, "NOT_READY");
  EXPECT_FALSE(dispatcher_.GetStats().serving);
  EXPECT_FALSE(dispatcher_.Info().ok());
}

TEST_F(DispatcherTest, CreditsBoundWhatAGroupGets) {
  Ready(2);
  const auto a = Submit("a");
  const auto b = Submit("b");
  const auto c = Submit("c");
  const auto d = Submit("d", 5);
  EXPECT_THAT(group_.submitted, ElementsAre("a/1", "b/2"));
  EXPECT_EQ(Submit("e")->error.code(), absl::StatusCode::kResourceExhausted);
  Dispatcher::Stats stats = dispatcher_.GetStats();
  EXPECT_EQ(stats.running, 2);
  EXPECT_EQ(stats.waiting, 2);
  EXPECT_EQ(stats.waiting_prompt_tokens, 8);

  dispatcher_.OnStarted(&group_, "a/1", {});
  dispatcher_.OnTokens(&group_, "a/1", Output({7, 8}, "x"));
  dispatcher_.OnFinished(&group_, "a/1", {});
  EXPECT_EQ(a->started, 1);
  EXPECT_THAT(a->tokens, ElementsAre(7, 8));
  EXPECT_EQ(a->finished, 1);
  EXPECT_EQ(group_.submitted.size(), 2u) << "the end of a request is no credit";
  dispatcher_.OnCredits(&group_, 3);
  EXPECT_THAT(group_.submitted, ElementsAre("a/1", "b/2", "c/3"));
  EXPECT_THAT(group_.prompts, ElementsAre(3, 3, 3));
}

TEST_F(DispatcherTest, IdsAreUniqueWhileTheyLive) {
  Ready(1);
  const auto a = Submit("a");
  EXPECT_TRUE(a->error.ok());
  const absl::Status again = Submit("a")->error;
  EXPECT_EQ(again.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(again.message()), HasSubstr("request_id: 'a'"));
  dispatcher_.OnFinished(&group_, "a/1", {});
  EXPECT_TRUE(Submit("a")->error.ok());
  ASSERT_TRUE(dispatcher_.Reserve("b", "").ok());
  EXPECT_EQ(dispatcher_.Reserve("b", "").code(), absl::StatusCode::kAlreadyExists);
  dispatcher_.Release("b");
  EXPECT_TRUE(dispatcher_.Reserve("b", "").ok());
}

TEST_F(DispatcherTest, ReservationsCountAgainstTheQueue) {
  Ready(0);
  ASSERT_TRUE(dispatcher_.Reserve("a", "").ok());
  ASSERT_TRUE(dispatcher_.Reserve("b", "").ok());
  EXPECT_EQ(dispatcher_.Reserve("c", "").code(), absl::StatusCode::kResourceExhausted);
  dispatcher_.Release("a");
  EXPECT_TRUE(dispatcher_.Reserve("c", "").ok());
}

TEST_F(DispatcherTest, CancelWhileWaiting) {
  Ready(0);
  const auto a = Submit("a");
  EXPECT_TRUE(dispatcher_.Cancel("a/1", absl::CancelledError("client")));
  EXPECT_EQ(a->error.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(a->failed, 1);
  EXPECT_FALSE(dispatcher_.Cancel("a/1", absl::CancelledError("client")));
  dispatcher_.OnCredits(&group_, 5);
  EXPECT_THAT(group_.submitted, IsEmpty());
  EXPECT_THAT(group_.cancelled, IsEmpty());
}

TEST_F(DispatcherTest, CancelWhileRunning) {
  Ready(1);
  const auto a = Submit("a");
  EXPECT_TRUE(dispatcher_.Cancel("a/1", absl::CancelledError("client")));
  EXPECT_THAT(group_.cancelled, ElementsAre("a/1"));
  EXPECT_EQ(a->failed, 1);
  EXPECT_FALSE(dispatcher_.Cancel("a/1", absl::CancelledError("again")));
  // The id is free at once, the place when the group says so; late output goes nowhere.
  EXPECT_EQ(dispatcher_.GetStats().running, 1);
  const auto again = Submit("a");
  EXPECT_TRUE(again->error.ok());
  dispatcher_.OnTokens(&group_, "a/1", Output({7}));
  dispatcher_.OnFailed(&group_, "a/1", absl::CancelledError("client"));
  EXPECT_THAT(a->tokens, IsEmpty());
  EXPECT_EQ(a->failed, 1);
  EXPECT_EQ(dispatcher_.GetStats().running, 0);
  dispatcher_.OnCredits(&group_, 2);
  EXPECT_THAT(group_.submitted, ElementsAre("a/1", "a/2"));
  dispatcher_.OnFinished(&group_, "a/2", {});
  EXPECT_EQ(again->finished, 1);
}

TEST_F(DispatcherTest, DeadlineInTheQueue) {
  Ready(0);
  const auto a = Submit("a", 3, Now() + absl::Seconds(10));
  const auto b = Submit("b");
  dispatcher_.ExpireWaiting();
  EXPECT_EQ(a->failed, 0);
  now_seconds += 10;
  dispatcher_.ExpireWaiting();
  EXPECT_EQ(a->failed, 1);
  EXPECT_EQ(a->error.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(b->failed, 0);
  EXPECT_EQ(dispatcher_.GetStats().oldest_waiting, absl::Seconds(10));
}

TEST_F(DispatcherTest, LostGroupFailsEverything) {
  int changes = 0;
  dispatcher_.SetServingCallback([&] { ++changes; });
  Ready(1);
  const auto running = Submit("a");
  const auto waiting = Submit("b");
  EXPECT_EQ(changes, 1);
  dispatcher_.OnLost(&group_, "exited with code 1");
  dispatcher_.OnLost(&group_, "second report");
  EXPECT_EQ(changes, 2);
  for (const auto& request : {running, waiting}) {
    EXPECT_EQ(request->failed, 1);
    EXPECT_EQ(request->error.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(DetailsOf(request->error).reason, "WORKER_LOST");
    EXPECT_THAT(std::string(request->error.message()), HasSubstr("exited with code 1"));
  }
  const absl::Status next = Submit("c")->error;
  EXPECT_EQ(next.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(next.message()), HasSubstr("exited with code 1"));
  const Dispatcher::Stats stats = dispatcher_.GetStats();
  EXPECT_FALSE(stats.serving);
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.waiting, 0);
  EXPECT_EQ(stats.groups[0].why_lost, "exited with code 1");
  dispatcher_.ExplainLoss(&group_, "was killed");
  EXPECT_THAT(dispatcher_.GetStats().detail, HasSubstr("was killed"));
  // What has been is told until it is over.
  dispatcher_.Revive(&group_);
  EXPECT_EQ(dispatcher_.GetStats().groups[0].why_lost, "was killed");
  Ready(1);
  EXPECT_EQ(dispatcher_.GetStats().groups[0].why_lost, "");
}

TEST_F(DispatcherTest, ShutDownFailsEverything) {
  Ready(1);
  const auto running = Submit("a");
  const auto waiting = Submit("b");
  dispatcher_.ShutDown();
  EXPECT_EQ(DetailsOf(running->error).reason, "DRAINING");
  EXPECT_EQ(DetailsOf(waiting->error).reason, "DRAINING");
  EXPECT_THAT(group_.cancelled, ElementsAre("a/1"));
  EXPECT_EQ(DetailsOf(Submit("c")->error).reason, "DRAINING");
  dispatcher_.OnFailed(&group_, "a/1", absl::UnavailableError("x"));
  EXPECT_EQ(dispatcher_.GetStats().running, 0);
  EXPECT_EQ(running->failed, 1);
}

TEST_F(DispatcherTest, GoingDownInSteps) {
  int changes = 0;
  dispatcher_.SetServingCallback([&] { ++changes; });
  Ready(1);
  const auto running = Submit("a");
  const auto waiting = Submit("b");
  ASSERT_TRUE(dispatcher_.Reserve("promised", "").ok());
  dispatcher_.Leave();
  EXPECT_EQ(changes, 2);
  EXPECT_FALSE(dispatcher_.GetStats().serving);
  EXPECT_TRUE(dispatcher_.GetStats().draining);
  EXPECT_TRUE(dispatcher_.Info().ok()) << "it is still there";
  dispatcher_.Release("promised");
  ASSERT_TRUE(dispatcher_.Reserve("promised", "").ok()) << "not everybody knows yet";

  dispatcher_.Drain();
  const absl::Status refused = dispatcher_.Reserve("new", "");
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(DetailsOf(refused).reason, "DRAINING");
  EXPECT_EQ(DetailsOf(refused).retry_after, absl::ZeroDuration());
  EXPECT_FALSE(dispatcher_.AwaitEmpty(Now()));
  const auto promised = std::make_shared<Recorder>();
  GroupRequest request;
  request.prompt_tokens = {1};
  EXPECT_TRUE(dispatcher_.Submit("promised", request, promised).ok()) << "it was taken before";
  EXPECT_EQ(running->failed + waiting->failed, 0);
  dispatcher_.OnFinished(&group_, "a/1", {});
  dispatcher_.OnCredits(&group_, 3);
  EXPECT_THAT(group_.submitted, ElementsAre("a/1", "b/2", "promised/3")) << "what waits is still served";

  ASSERT_TRUE(dispatcher_.Resume().ok());
  EXPECT_TRUE(dispatcher_.GetStats().serving);
  const int changes_before = changes;
  EXPECT_TRUE(dispatcher_.Resume().ok());
  EXPECT_EQ(changes, changes_before) << "it serves already";
  EXPECT_FALSE(dispatcher_.AwaitEmpty(absl::InfiniteFuture())) << "nobody waits for a drain that is over";
  dispatcher_.Drain();
  EXPECT_EQ(dispatcher_.EndAll(), 2);
  EXPECT_EQ(DetailsOf(waiting->error).reason, "DRAINING");
  EXPECT_FALSE(dispatcher_.AwaitEmpty(Now())) << "their group has not let go";
  dispatcher_.OnFailed(&group_, "b/2", absl::UnavailableError("x"));
  dispatcher_.OnFailed(&group_, "promised/3", absl::UnavailableError("x"));
  EXPECT_TRUE(dispatcher_.AwaitEmpty(Now()));
  dispatcher_.ShutDown();
  EXPECT_FALSE(dispatcher_.Resume().ok());
}

TEST_F(DispatcherTest, AProcessThatGoesIsNotCalledBack) {
  Ready(1);
  dispatcher_.LeaveForGood();
  EXPECT_TRUE(dispatcher_.Reserve("a", "").ok()) << "not everybody knows yet";
  dispatcher_.Release("a");
  EXPECT_EQ(dispatcher_.Resume().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(dispatcher_.GetStats().serving);
  EXPECT_TRUE(dispatcher_.GetStats().draining);
}

GroupRequest OneToken() {
  GroupRequest request;
  request.prompt_tokens = {1};
  return request;
}

TEST(Dispatcher, ARequestThatWaitsTooLongIsRefusedWithAHint) {
  FakeGroup group;
  Dispatcher dispatcher({.queue = {.max_wait = absl::Seconds(5)}}, &Now);
  dispatcher.AddGroup(&group);
  dispatcher.OnReady(&group, GroupInfo());
  const auto recorder = std::make_shared<Recorder>();
  ASSERT_TRUE(dispatcher.Reserve("a", "").ok());
  ASSERT_TRUE(dispatcher.Submit("a", OneToken(), recorder).ok());
  now_seconds += 4;
  dispatcher.ExpireWaiting();
  EXPECT_EQ(recorder->failed, 0);
  now_seconds += 1;
  dispatcher.ExpireWaiting();
  EXPECT_EQ(recorder->failed, 1);
  EXPECT_EQ(recorder->error.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(recorder->error).reason, "QUEUE_TIMEOUT");
  EXPECT_TRUE(DetailsOf(recorder->error).retry_after.has_value());
}

// How fast the queue moved says how long requests will wait only until a group has room again.
TEST(Dispatcher, AnIdleServerTakesManyAtOnceAfterSlowOnes) {
  FakeGroup group;
  Dispatcher dispatcher({.queue = {.max_requests = 100, .max_wait = absl::Seconds(120)}}, &Now);
  dispatcher.AddGroup(&group);
  dispatcher.OnReady(&group, GroupInfo());
  dispatcher.OnCredits(&group, 1);
  const auto submit = [&](const std::string& id) {
    if (!dispatcher.Reserve(id, "").ok()) return false;
    return dispatcher.Submit(id, GroupRequest(), std::make_shared<Recorder>()).ok();
  };
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(submit(absl::StrCat("long", i)));
  for (uint64_t credits = 2; credits <= 4; ++credits) {  // 10 s each
    now_seconds += 10;
    dispatcher.OnCredits(&group, credits);
  }
  ASSERT_EQ(group.submitted.size(), 4u);
  int taken = 0;
  for (int i = 0; i < 20; ++i) taken += submit(absl::StrCat("busy", i)) ? 1 : 0;
  EXPECT_EQ(taken, 13) << "nobody has room: the thirteenth waits for the twelve before it, 120 s";
  for (uint64_t credits = 5; credits <= 20; ++credits) {
    now_seconds += 10;
    dispatcher.OnCredits(&group, credits);
  }
  EXPECT_EQ(dispatcher.GetStats().waiting, 0);
  taken = 0;
  for (int i = 0; i < 60; ++i) taken += submit(absl::StrCat("short", i)) ? 1 : 0;
  EXPECT_EQ(taken, 60) << "there was room for three more";
}

TEST_F(DispatcherTest, PriorityGoesFirst) {
  Ready(0);
  Submit("low", 1, absl::InfiniteFuture(), "", -1);
  Submit("high", 1, absl::InfiniteFuture(), "", 1);
  dispatcher_.OnCredits(&group_, 2);
  EXPECT_THAT(group_.submitted, ElementsAre("high/2", "low/1"));
}

TEST(Dispatcher, AClientHasItsShareUntilItsRequestsHaveEnded) {
  FakeGroup group;
  Dispatcher dispatcher({.client = {.max_requests = 1, .requests_per_second = 0}}, &Now);
  dispatcher.AddGroup(&group);
  dispatcher.OnReady(&group, GroupInfo());
  dispatcher.OnCredits(&group, 10);
  const auto recorder = std::make_shared<Recorder>();
  const auto reserve = [&](const std::string& id, const std::string& client) {
    return DetailsOf(dispatcher.Reserve(id, client)).reason;
  };
  ASSERT_TRUE(dispatcher.Reserve("a", "one").ok());
  EXPECT_EQ(reserve("b", "one"), "CLIENT_LIMIT");
  EXPECT_TRUE(dispatcher.Reserve("c", "other").ok());
  dispatcher.Release("a");
  ASSERT_TRUE(dispatcher.Reserve("b", "one").ok());
  ASSERT_TRUE(dispatcher.Submit("b", OneToken(), recorder).ok());
  EXPECT_EQ(reserve("d", "one"), "CLIENT_LIMIT");
  dispatcher.Cancel("b/1", absl::CancelledError("client"));
  EXPECT_EQ(reserve("d", "one"), "CLIENT_LIMIT") << "the group still winds it down";
  dispatcher.OnFailed(&group, "b/1", absl::CancelledError("client"));
  EXPECT_TRUE(dispatcher.Reserve("d", "one").ok());
  // A request that the queue does not take gives its share back.
  dispatcher.ShutDown();
  EXPECT_FALSE(dispatcher.Submit("d", OneToken(), recorder).ok());
  EXPECT_EQ(reserve("e", "one"), "DRAINING");
}

class TwoGroupsTest : public ::testing::Test {
 protected:
  TwoGroupsTest() {
    for (FakeGroup* group : {&a_, &b_}) {
      dispatcher_.AddGroup(group);
      dispatcher_.OnReady(group, GroupInfo());
      dispatcher_.OnCredits(group, 8);
    }
  }
  // A prompt of `tokens` tokens from `first` on, and 10 of output.
  std::shared_ptr<Recorder> Submit(const std::string& id, size_t tokens, int32_t first) {
    auto recorder = std::make_shared<Recorder>();
    GroupRequest request;
    for (size_t i = 0; i < tokens; ++i) request.prompt_tokens.push_back(first + static_cast<int32_t>(i));
    request.max_tokens = 10;
    EXPECT_TRUE(dispatcher_.Reserve(id, "").ok());
    EXPECT_TRUE(dispatcher_.Submit(id, std::move(request), recorder).ok());
    return recorder;
  }
  FakeGroup a_, b_;
  Dispatcher dispatcher_{{}, &Now};
};

TEST_F(TwoGroupsTest, WorkIsSharedAndPromptsGoWhereTheirBeginningIs) {
  Submit("1", 200, 0);
  Submit("2", 100, 5000);
  EXPECT_THAT(a_.submitted, ElementsAre("1/1"));
  EXPECT_THAT(b_.submitted, ElementsAre("2/2"));
  // b has less to do, but a has seen 192 of these tokens.
  Submit("3", 300, 0);
  EXPECT_THAT(a_.submitted, ElementsAre("1/1", "3/3"));
  Submit("4", 300, 9000);
  EXPECT_THAT(b_.submitted, ElementsAre("2/2", "4/4"));
  dispatcher_.OnFinished(&a_, "1/1", {});
  dispatcher_.OnFinished(&a_, "3/3", {});
  // A group that was lost has lost its caches too.
  dispatcher_.OnLost(&a_, "x");
  dispatcher_.Revive(&a_);
  dispatcher_.OnReady(&a_, GroupInfo());
  dispatcher_.OnCredits(&a_, 8);
  dispatcher_.OnFinished(&b_, "2/2", {});
  dispatcher_.OnFinished(&b_, "4/4", {});
  Submit("5", 300, 9000);
  EXPECT_THAT(b_.submitted, ElementsAre("2/2", "4/4", "5/5"));
}

TEST_F(TwoGroupsTest, ALostGroupTakesItsOwnRequestsOnly) {
  const auto first = Submit("1", 10, 0);
  const auto second = Submit("2", 10, 500);
  dispatcher_.OnLost(&a_, "x");
  EXPECT_EQ(first->failed, 1);
  EXPECT_EQ(second->failed, 0);
  EXPECT_TRUE(dispatcher_.GetStats().serving);
  Submit("3", 10, 0);
  EXPECT_THAT(b_.submitted, ElementsAre("2/2", "3/3"));
}

TEST_F(TwoGroupsTest, ASilentGroupGetsNothingUntilItIsHeardAgain) {
  a_.silence = absl::Seconds(2);
  for (int i = 1; i <= 8; ++i) Submit(std::to_string(i), 10, 0);
  EXPECT_EQ(b_.submitted.size(), 8u);
  Submit("9", 10, 0);
  EXPECT_THAT(a_.submitted, IsEmpty()) << "it rather waits";
  a_.silence = absl::ZeroDuration();
  dispatcher_.ExpireWaiting();
  EXPECT_THAT(a_.submitted, ElementsAre("9/9"));
}

TEST_F(TwoGroupsTest, ARevivedGroupProvesItselfFirst) {
  dispatcher_.OnLost(&a_, "x");
  dispatcher_.Revive(&a_);
  dispatcher_.OnReady(&a_, GroupInfo());
  dispatcher_.OnCredits(&a_, 8);
  for (int i = 1; i <= 4; ++i) Submit(std::to_string(i), 10, 0);
  EXPECT_THAT(a_.submitted, ElementsAre("1/1")) << "one, until it has finished it";
  EXPECT_EQ(b_.submitted.size(), 3u);
  dispatcher_.OnFinished(&a_, "1/1", {});
  Submit("5", 10, 0);
  Submit("6", 10, 0);
  EXPECT_THAT(a_.submitted, ElementsAre("1/1", "5/5", "6/6"));
}

// --- Requests of lost groups go on

class ReplayTest : public ::testing::Test {
 protected:
  ReplayTest() {
    dispatcher_.AddGroup(&group_);
    Ready();
  }
  void Ready(uint64_t credits = 8) {
    dispatcher_.OnReady(&group_, GroupInfo());
    dispatcher_.OnCredits(&group_, credits);
  }
  // The next life of the group.
  void Lose() { dispatcher_.OnLost(&group_, "killed"); }
  void Return(uint64_t credits = 8) {
    dispatcher_.Revive(&group_);
    Ready(credits);
  }
  std::shared_ptr<Recorder> Submit(const std::string& id, absl::Time deadline = absl::InfiniteFuture()) {
    auto recorder = std::make_shared<Recorder>();
    GroupRequest request;
    request.prompt_tokens = {1, 2, 3};
    request.max_tokens = 10;
    request.deadline = deadline;
    EXPECT_TRUE(dispatcher_.Reserve(id, "").ok());
    EXPECT_TRUE(dispatcher_.Submit(id, std::move(request), recorder).ok());
    return recorder;
  }
  std::vector<std::string> Submitted() { return std::exchange(group_.submitted, {}); }

  FakeGroup group_;
  Dispatcher dispatcher_{{.queue = {}, .client = {}, .replay_patience = absl::Seconds(20)}, &Now};
};

// Log probabilities of a prompt that have come are not asked for again; with the first token all of them
// have.
TEST_F(ReplayTest, GoesOnBehindWhatWasSaidOfThePrompt) {
  const auto recorder = std::make_shared<Recorder>();
  GroupRequest request;
  request.prompt_tokens = {1, 2, 3, 4, 5};
  request.prompt_log_probs = 3;
  ASSERT_TRUE(dispatcher_.Reserve("a", "").ok());
  ASSERT_TRUE(dispatcher_.Submit("a", std::move(request), recorder).ok());
  EXPECT_EQ(group_.requests.back().prompt_log_probs, 3);
  EXPECT_EQ(group_.requests.back().prompt_log_probs_done, 0);
  StepOutput places;
  places.prompt_log_probs.resize(2);
  dispatcher_.OnTokens(&group_, "a/1", places);
  Lose();
  Return();
  EXPECT_EQ(group_.requests.back().prompt_log_probs, 3);
  EXPECT_EQ(group_.requests.back().prompt_log_probs_done, 2);
  dispatcher_.OnTokens(&group_, "a/1", places);
  Lose();
  Return();
  EXPECT_EQ(group_.requests.back().prompt_log_probs_done, 4);
  dispatcher_.OnTokens(&group_, "a/1", Output({7}));
  Lose();
  Return();
  EXPECT_EQ(group_.requests.back().prompt_log_probs, 0);
  EXPECT_THAT(group_.requests.back().output_tokens, ElementsAre(7));
}

TEST_F(ReplayTest, GoesOnBehindWhatWasEmitted) {
  const auto a = Submit("a");
  dispatcher_.OnStarted(&group_, "a/1", {});
  StepOutput step = Output({7, 8});
  step.rounds = {{.drafted = 3, .accepted = 1}};
  dispatcher_.OnTokens(&group_, "a/1", step);
  Lose();
  EXPECT_EQ(dispatcher_.GetStats().running, 0);
  EXPECT_EQ(dispatcher_.GetStats().waiting, 1);
  dispatcher_.OnTokens(&group_, "a/1", Output({99}));  // late words of the old life
  dispatcher_.OnFinished(&group_, "a/1", {});
  Return();
  EXPECT_THAT(Submitted(), ElementsAre("a/1", "a/1"));
  EXPECT_THAT(group_.outputs.back(), ElementsAre(7, 8));
  EXPECT_EQ(group_.prompts.back(), 3);
  dispatcher_.OnStarted(&group_, "a/1", {});
  step = Output({9});
  step.rounds = {{.drafted = 2, .accepted = 0}};
  dispatcher_.OnTokens(&group_, "a/1", step);
  FinishedOutput finished;
  finished.completion_tokens = 3;
  finished.rounds = 1;
  dispatcher_.OnFinished(&group_, "a/1", finished);
  EXPECT_EQ(a->started, 1);
  EXPECT_EQ(a->failed, 0);
  EXPECT_EQ(a->finished, 1);
  EXPECT_THAT(a->tokens, ElementsAre(7, 8, 9));
  EXPECT_EQ(a->summary.replays, 1);
  EXPECT_EQ(a->summary.rounds, 2);
  EXPECT_EQ(a->summary.drafted_tokens, 5);
  EXPECT_EQ(a->summary.accepted_tokens, 1);
  EXPECT_THAT(a->summary.drafted_per_position, ElementsAre(2, 2, 1));
  EXPECT_THAT(a->summary.accepted_per_position, ElementsAre(1, 0, 0));
}

TEST_F(ReplayTest, SuspectsComeOneAfterAnotherAndBeforeWhatIsNew) {
  const std::vector<std::shared_ptr<Recorder>> running = {Submit("a"), Submit("b"), Submit("c")};
  Submitted();
  Lose();
  EXPECT_EQ(dispatcher_.Reserve("d", "").code(), absl::StatusCode::kUnavailable) << "others may have room";
  Return();
  const auto later = Submit("d");
  EXPECT_THAT(Submitted(), ElementsAre("a/1"));
  dispatcher_.OnTokens(&group_, "a/1", Output({5}));
  EXPECT_THAT(Submitted(), ElementsAre("b/2"));
  dispatcher_.OnTokens(&group_, "a/1", Output({5}));
  EXPECT_THAT(Submitted(), IsEmpty());
  dispatcher_.OnFinished(&group_, "b/2", {});  // an end is as good as a token
  EXPECT_THAT(Submitted(), ElementsAre("c/3"));
  dispatcher_.OnTokens(&group_, "c/3", Output({5}));
  EXPECT_THAT(Submitted(), ElementsAre("d/4"));
}

TEST_F(ReplayTest, WhatKillsItsGroupAgainAndAgainIsRefusedAndNothingElseIs) {
  const auto good = Submit("good");
  const auto poison = Submit("poison");
  const auto other = Submit("other");
  Lose();
  // In what order they are tried does not matter: whoever is alone with the group when it dies has the blame.
  int losses = 1;
  std::vector<std::string> next = {};
  Submitted();
  Return();
  while (poison->failed == 0) {
    ASSERT_LT(losses, 10);
    for (const std::string& key : Submitted()) next.push_back(key);
    ASSERT_FALSE(next.empty());
    const std::string key = next.front();
    next.erase(next.begin());
    if (key == "poison/2") {
      Lose();
      ++losses;
      Return();
      next.clear();
    } else {
      dispatcher_.OnTokens(&group_, key, Output({5}));
    }
  }
  EXPECT_EQ(losses, 1 + kMaxBlame);
  EXPECT_EQ(poison->error.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(DetailsOf(poison->error).reason, "POISONED");
  EXPECT_EQ(good->failed + other->failed, 0);
  EXPECT_EQ(dispatcher_.GetStats().running + dispatcher_.GetStats().waiting, 2);
}

TEST_F(ReplayTest, OneThatKilledBeforeGoesFirstAndAlone) {
  const auto a = Submit("a");
  const auto b = Submit("b");
  Lose();
  Return();
  EXPECT_THAT(Submitted(), ElementsAre("a/1", "b/2", "a/1"));
  dispatcher_.OnTokens(&group_, "a/1", Output({5}));
  EXPECT_THAT(Submitted(), ElementsAre("b/2"));
  Lose();  // by b, as far as anybody can tell
  Return();
  EXPECT_THAT(Submitted(), ElementsAre("b/2"));
  dispatcher_.OnTokens(&group_, "b/2", Output({5}));
  EXPECT_THAT(Submitted(), ElementsAre("a/1"));
  EXPECT_EQ(a->failed + b->failed, 0);
}

TEST_F(ReplayTest, PatienceHasAnEnd) {
  const auto deadline = Now() + absl::Seconds(5);
  const auto a = Submit("a", deadline);
  const auto b = Submit("b");
  Lose();
  now_seconds += 5;
  dispatcher_.ExpireWaiting();
  EXPECT_EQ(a->error.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(b->failed, 0);
  now_seconds += 15;
  dispatcher_.ExpireWaiting();
  EXPECT_EQ(b->failed, 1);
  EXPECT_EQ(DetailsOf(b->error).reason, "WORKER_LOST");
  EXPECT_EQ(dispatcher_.GetStats().waiting, 0);
}

TEST_F(ReplayTest, WhatWaitsOutlivesTheLossToo) {
  Lose();
  Return(/*credits=*/0);
  const auto waiting = Submit("w");
  Lose();
  EXPECT_EQ(waiting->failed, 0);
  Return();
  EXPECT_THAT(Submitted(), ElementsAre("w/1"));
  dispatcher_.OnFinished(&group_, "w/1", {});
  EXPECT_EQ(waiting->finished, 1);
}

TEST_F(ReplayTest, AFailureOfTheWholeGroupIsItsLoss) {
  const auto a = Submit("a");
  const auto b = Submit("b");
  dispatcher_.OnFailed(&group_, "a/1", absl::UnavailableError("the worker group failed: device lost"));
  dispatcher_.OnFailed(&group_, "b/2", absl::InternalError("its own fault"));
  EXPECT_EQ(a->failed, 0);
  EXPECT_EQ(b->failed, 1);
  Submitted();
  Lose();
  Return();
  EXPECT_THAT(Submitted(), ElementsAre("a/1"));
}

TEST_F(ReplayTest, ClientsMayLeaveMeanwhile) {
  const auto a = Submit("a");
  const auto b = Submit("b");
  dispatcher_.Cancel("b/2", absl::CancelledError("before"));
  Lose();
  EXPECT_TRUE(dispatcher_.Cancel("a/1", absl::CancelledError("after")));
  EXPECT_EQ(a->failed, 1);
  Submitted();
  Return();
  EXPECT_THAT(Submitted(), IsEmpty());
  EXPECT_TRUE(dispatcher_.AwaitEmpty(Now()));
  const auto c = Submit("c");
  Lose();
  EXPECT_EQ(dispatcher_.EndAll(), 1);
  EXPECT_EQ(DetailsOf(c->error).reason, "DRAINING");
}

}  // namespace
}  // namespace dflash
