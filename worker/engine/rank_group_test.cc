// A leader's engine with followers as threads: they carry out its plans and end in the same state.
#include <algorithm>
#include <cstdio>
#include <deque>
#include <memory>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "text/testing/exploding_schemas.h"
#include "worker/comm/forwarding_communicator.h"
#include "worker/comm/host_communicator.h"
#include "worker/rank/follower.h"
#include "worker/rank/leader.h"
#include "worker/testing/company.h"
#include "worker/testing/tiny_pair.h"

namespace dflash {
namespace {

using testing::GoldenPrompt;
using ::testing::HasSubstr;
using testing::TinyPair;

struct Shape {
  int size = 1;
  DraftPlacement placement = DraftPlacement::kRankZero;
  int64_t slots = 4;
  int64_t pages = 0;  // 0: all that the slots can need
  int64_t checkpoints = 0;
  // Captured rounds, so many of them ahead of what the leader has read; -1: rounds as they come.
  int64_t captured_ahead = -1;
};

// Here a captured round is a function that is called again, so calls that wait do no harm in it.
class CapturableCommunicator final : public ForwardingCommunicator {
 public:
  explicit CapturableCommunicator(std::unique_ptr<Communicator> inner)
      : ForwardingCommunicator(inner.get()), owned_(std::move(inner)) {}
  bool capturable() const override { return true; }

 private:
  const std::unique_ptr<Communicator> owned_;
};

// Shapes whose rounds are captured before the first request.
constexpr int64_t kWarmSequences = 2;

TinyPair LoadRank(const Shape& shape, Communicator* communicator) {
  testing::TinyPairOptions options;
  options.threads = 1;
  options.slots = shape.slots;
  options.pages = shape.pages;
  options.communicator = communicator;
  options.draft_placement = shape.placement;
  options.checkpoints = shape.checkpoints;
  return testing::LoadTinyPair(options).value();
}

// One follower: takes plans from a queue until it is closed or a step fails.
class FollowerThread {
 public:
  FollowerThread(const Shape& shape, Communicator* communicator)
      : communicator_(communicator), pair_(LoadRank(shape, communicator)) {
    follower_ =
        RankFollower::Create({.vocabulary = pair_.vocabulary,
                              .captured_rounds = shape.captured_ahead >= 0,
                              .rounds_ahead = std::max<int64_t>(shape.captured_ahead, 0)},
                             pair_.target.get(), pair_.rank_drafter(), pair_.table.get(), *pair_.stream)
            .value();
    thread_ = std::thread([this] { Run(); });
  }
  ~FollowerThread() { (void)Join(); }

  void Push(const RankPlan& plan) {
    absl::MutexLock lock(&mutex_);
    plans_.push_back(plan);
    ++follower_plans_;
  }
  // Lets it finish what it has got.
  absl::Status Join() {
    {
      absl::MutexLock lock(&mutex_);
      closed_ = true;
    }
    if (thread_.joinable()) thread_.join();
    return result_;
  }
  TinyPair& pair() { return pair_; }

 private:
  void Run() {
    result_ = follower_->WarmUp(kWarmSequences);
    while (result_.ok()) {
      RankPlan plan;
      {
        absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(
            +[](FollowerThread* self) { return self->closed_ || !self->plans_.empty(); }, this));
        if (plans_.empty()) break;
        plan = std::move(plans_.front());
        plans_.pop_front();
      }
      result_ = follower_->Run(plan);
    }
    if (result_.ok()) {
      result_ = follower_->Finish();
      EXPECT_EQ(follower_->last_plan(), follower_plans_);
    }
    if (!result_.ok()) communicator_->Abort(result_);
  }

  Communicator* const communicator_;
  TinyPair pair_;
  std::unique_ptr<RankFollower> follower_;
  absl::Status result_;
  absl::Mutex mutex_;
  std::deque<RankPlan> plans_;
  uint64_t follower_plans_ = 0;
  bool closed_ = false;
  std::thread thread_;
};

// A group of `size` ranks in this process. `tamper` may change the first plan on its way to rank 1.
class Group final : public PlanSender {
 public:
  explicit Group(const Shape& shape, StepObserver* observer = nullptr) {
    auto group = HostCommunicator::CreateGroup({.size = shape.size}).value();
    for (std::unique_ptr<HostCommunicator>& communicator : group) {
      communicators_.push_back(std::move(communicator));
      if (shape.captured_ahead < 0) continue;
      communicators_.back() = std::make_unique<CapturableCommunicator>(std::move(communicators_.back()));
    }
    for (int rank = 1; rank < shape.size; ++rank) {
      followers.push_back(
          std::make_unique<FollowerThread>(shape, communicators_[static_cast<size_t>(rank)].get()));
    }
    pair = LoadRank(shape, communicators_[0].get());
    ranks = std::make_unique<RankLeader>(this);
    EngineOptions options;
    options.vocabulary = pair.vocabulary;
    options.max_prefill_tokens = 64;
    options.ranks = ranks.get();
    options.observer = observer;
    options.captured_rounds = shape.captured_ahead >= 0;
    options.rounds_ahead = std::max<int64_t>(shape.captured_ahead, 0);
    engine = Engine::Create(options, pair.target.get(), pair.drafter.get(), pair.table.get(),
                            pair.tokenizer.get(), *pair.stream)
                 .value();
    EXPECT_EQ(engine->WarmUp(kWarmSequences), absl::OkStatus());
  }
  absl::Status Send(const RankPlan& plan) override {
    ++plans;
    for (size_t i = 0; i < followers.size(); ++i) {
      RankPlan copy = plan;
      if (i == 0 && plans == 1 && tamper) tamper(copy);
      followers[i]->Push(copy);
    }
    return absl::OkStatus();
  }

  std::vector<std::unique_ptr<Communicator>> communicators_;
  std::vector<std::unique_ptr<FollowerThread>> followers;
  TinyPair pair;
  std::unique_ptr<RankLeader> ranks;
  std::unique_ptr<Engine> engine;
  int plans = 0;
  std::function<void(RankPlan&)> tamper;
};

class RankGroup : public ::testing::TestWithParam<Shape> {};
INSTANTIATE_TEST_SUITE_P(
    Shapes, RankGroup,
    ::testing::Values(Shape{2}, Shape{4}, Shape{2, DraftPlacement::kSharded},
                      Shape{.size = 2, .captured_ahead = 0}, Shape{.size = 2, .captured_ahead = 1},
                      Shape{.size = 2, .placement = DraftPlacement::kSharded, .captured_ahead = 2}),
    [](const auto& info) {
      std::string name = std::to_string(info.param.size);
      if (info.param.placement == DraftPlacement::kSharded) name += "DrafterSharded";
      if (info.param.captured_ahead >= 0)
        name += "Captured" + std::to_string(info.param.captured_ahead) + "Ahead";
      return name;
    });

// More requests than slots, with and without drafts, greedy and sampled in every way: slots and pages change
// hands all the time, prompts and rounds share steps. The followers carry out plans only, so every token
// shows that they did what the leader decided.
TEST_P(RankGroup, AnswersAsOneRankDoes) {
  const std::vector<GoldenPrompt> golden = testing::LoadGoldenPrompts().value();
  std::vector<GenerationRequest> requests;
  for (size_t i = 0; i < 7; ++i) {
    GenerationRequest request = testing::GoldenRequest(golden[i * 3]);
    if (i % 3 == 1) request.speculation = SpeculationMode::kOff;
    if (i % 3 == 2) request.max_draft_tokens = 3;
    request.max_tokens = 48;
    requests.push_back(std::move(request));
  }
  for (const SamplingParams& sampling :
       {SamplingParams{.temperature = 0.8f, .top_k = 20, .top_p = 0.9f, .seed = 7},
        SamplingParams{.temperature = 1.0f, .top_p = 0.95f, .min_p = 0.01f, .seed = 8}}) {
    GenerationRequest request = testing::GoldenRequest(golden[1]);
    request.sampling = sampling;
    request.max_tokens = 32;
    requests.push_back(std::move(request));
  }
  TinyPair alone = LoadRank({}, nullptr);
  const auto engine = testing::MakeEngine(alone, alone.drafter.get()).value();
  const auto expected = testing::RunAll(*engine, requests).value();

  Group group(GetParam());
  const auto outcomes = testing::RunAll(*group.engine, requests).value();
  int64_t accepted = 0;
  for (size_t i = 0; i < outcomes.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(outcomes[i].status, absl::OkStatus());
    EXPECT_EQ(outcomes[i].tokens, expected[i].tokens);
    EXPECT_EQ(outcomes[i].finished.accepted_tokens, expected[i].finished.accepted_tokens);
    accepted += outcomes[i].finished.accepted_tokens;
  }
  EXPECT_GT(accepted, 50);
  EXPECT_GT(group.plans, 20);
  for (const auto& follower : group.followers) {
    ASSERT_EQ(follower->Join(), absl::OkStatus());
    const SequenceTable& table = *follower->pair().table;
    // What the last step closed is said with the next plan, which never came.
    EXPECT_LT(table.free_slots(), group.pair.table->free_slots());
    EXPECT_EQ(group.pair.table->free_slots(), table.slots());
  }
}

// What company_test says of one rank: requests come and go over pools in which they do not all fit, and each
// gets what it gets alone. The followers' pages are those that the leader names.
class RankGroupCompany : public ::testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(CapturedAhead, RankGroupCompany, ::testing::Values(-1, 1),
                         [](const auto& info) { return info.param < 0 ? "No" : "Yes"; });

void CheckCompany(size_t count, const testing::MixedRequestsOptions& sizes, int64_t slots, int64_t pages,
                  int64_t captured_ahead) {
  const std::vector<GenerationRequest> requests = testing::MixedRequests(count, 21, sizes);
  Group alone(Shape{2});
  const auto expected = testing::RunOneByOne(*alone.engine, requests).value();

  testing::StepTotals totals;
  Group group(Shape{.size = 2, .slots = slots, .pages = pages, .captured_ahead = captured_ahead}, &totals);
  const auto actual =
      testing::RunInCompany(*group.engine, requests, {.seed = 21, .most_arrivals = 5, .cancelled = count / 4})
          .value();
  for (size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE(requests[i].id);
    testing::ExpectSameOutcome(actual[i], expected[i]);
  }
  EXPECT_GT(totals.preemptions, 0);
  EXPECT_GT(totals.refed_rows, 0);
  EXPECT_GT(totals.accepted, 0);
  EXPECT_GT(totals.drafted, totals.accepted);
  EXPECT_EQ(group.pair.table->free_pages(), group.pair.table->pages());
  EXPECT_EQ(group.followers[0]->Join(), absl::OkStatus());
  std::printf(
      "%ld steps, at most %ld sequences, %ld preemptions, %ld rows fed again, %ld of %ld drafts accepted\n",
      totals.steps, totals.most_running, totals.preemptions, totals.refed_rows, totals.accepted,
      totals.drafted);
}

TEST_P(RankGroupCompany, ChangesNothing) {
  CheckCompany(32, {.longest_prompt = 150, .most_tokens = 100}, /*slots=*/16, /*pages=*/9, GetParam());
}

TEST_P(RankGroupCompany, ChangesNothingFull) {
  CheckCompany(64, {.longest_prompt = 400, .most_tokens = 200}, /*slots=*/64, /*pages=*/40, GetParam());
}

// Rules and log probabilities: what rank 0 broadcasts makes the followers' parts of the logits the same
// distribution.
TEST_P(RankGroup, ProcessesLogitsOnEveryRank) {
  std::vector<GenerationRequest> requests =
      testing::MixedRequests(16, 5, {.longest_prompt = 40, .most_tokens = 30});
  std::mt19937 random(6);
  for (GenerationRequest& request : requests) testing::AddParameters(random, request);
  // Rank 0 cuts blocks whose masks take much.
  const std::vector<GoldenPrompt> golden = testing::LoadGoldenPrompts().value();
  for (const testing::ExplodingSchema& exploding : testing::ExplodingSchemas()) {
    if (exploding.end != testing::ExplodingSchema::End::kFollowed) continue;
    for (const GoldenPrompt& prompt : std::span(golden).first(4)) {
      requests.push_back(testing::GoldenRequest(prompt));
      requests.back().constraint.json_schema = exploding.schema;
      requests.back().max_tokens = 60;
    }
  }
  ASSERT_GT(requests.size(), 16u);
  TinyPair alone = LoadRank({}, nullptr);
  const auto engine = testing::MakeEngine(alone, alone.drafter.get()).value();
  const auto expected = testing::RunAll(*engine, requests).value();
  Group group(GetParam());
  const auto outcomes = testing::RunAll(*group.engine, requests).value();
  int64_t accepted = 0, with_log_probs = 0, of_prompts = 0;
  for (size_t i = 0; i < outcomes.size(); ++i) {
    SCOPED_TRACE(requests[i].id);
    ASSERT_TRUE(outcomes[i].done) << outcomes[i].status;
    EXPECT_EQ(outcomes[i].tokens, expected[i].tokens);
    accepted += outcomes[i].finished.accepted_tokens;
    ASSERT_EQ(outcomes[i].log_probs.size(), expected[i].log_probs.size());
    for (size_t k = 0; k < expected[i].log_probs.size(); ++k) {
      ++with_log_probs;
      EXPECT_NEAR(outcomes[i].log_probs[k].log_prob, expected[i].log_probs[k].log_prob, 1e-3);
    }
    ASSERT_EQ(outcomes[i].prompt_log_probs.size(), expected[i].prompt_log_probs.size());
    for (size_t k = 0; k < expected[i].prompt_log_probs.size(); ++k) {
      const TokenLogProbs &place = outcomes[i].prompt_log_probs[k],
                          &alone_place = expected[i].prompt_log_probs[k];
      ++of_prompts;
      EXPECT_NEAR(place.log_prob, alone_place.log_prob, 1e-3);
      ASSERT_EQ(place.top.size(), alone_place.top.size());
      for (size_t t = 0; t < place.top.size(); ++t)
        EXPECT_NEAR(place.top[t].log_prob, alone_place.top[t].log_prob, 1e-3);
    }
  }
  EXPECT_GT(accepted, 10);
  EXPECT_GT(with_log_probs, 10);
  EXPECT_GT(of_prompts, 10);
  for (const auto& follower : group.followers) ASSERT_EQ(follower->Join(), absl::OkStatus());
}

// Rank 0 alone knows what is cached; the others restore and keep states because the plan says so.
TEST_P(RankGroup, BeginsWithCachedPrefixesOnEveryRank) {
  const std::vector<GoldenPrompt> golden = testing::LoadGoldenPrompts().value();
  std::vector<int32_t> system;
  for (const GoldenPrompt& prompt : std::span(golden).first(4)) {
    if (system.size() < 160) system.insert(system.end(), prompt.prompt_ids.begin(), prompt.prompt_ids.end());
  }
  std::vector<GenerationRequest> requests;
  for (size_t i = 0; i < 6; ++i) {
    GenerationRequest request = testing::GoldenRequest(golden[i % 4]);
    request.prompt_tokens.insert(request.prompt_tokens.begin(), system.begin(), system.end());
    if (i % 3 == 2) request.sampling = {.temperature = 0.8f, .top_k = 20, .top_p = 0.9f, .seed = 7};
    request.max_tokens = 24;
    requests.push_back(std::move(request));
  }
  TinyPair alone = LoadRank({}, nullptr);
  const auto engine = testing::MakeEngine(alone, alone.drafter.get()).value();
  const auto expected = testing::RunAll(*engine, requests).value();

  Shape shape = GetParam();
  shape.checkpoints = 3;  // too few for all: some are evicted
  Group group(shape);
  int64_t cached = 0, accepted = 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (size_t i = 0; i < requests.size(); i += 2) {
      const auto outcomes = testing::RunAll(*group.engine, {requests[i], requests[i + 1]}).value();
      for (size_t k = 0; k < 2; ++k) {
        SCOPED_TRACE(i + k);
        EXPECT_EQ(outcomes[k].status, absl::OkStatus());
        EXPECT_EQ(outcomes[k].tokens, expected[i + k].tokens);
        EXPECT_EQ(outcomes[k].finished.accepted_tokens, expected[i + k].finished.accepted_tokens);
        cached += outcomes[k].started.cached_tokens;
        accepted += outcomes[k].finished.accepted_tokens;
      }
    }
  }
  EXPECT_GT(cached, 8 * 128);
  EXPECT_GT(accepted, 50);
  for (const auto& follower : group.followers) ASSERT_EQ(follower->Join(), absl::OkStatus());
}

TEST(RankFollower, RefusesWhatTheLeaderDidNotSend) {
  const std::vector<GoldenPrompt> golden = testing::LoadGoldenPrompts().value();
  const std::pair<std::function<void(RankPlan&)>, const char*> faults[] = {
      {[](RankPlan& plan) { plan.rows[0].tokens[0] ^= 1; }, "is not what the leader sent"},
      {[](RankPlan& plan) { ++plan.number; }, "after plan"},
      {[](RankPlan& plan) { plan.hash ^= 1; }, "is not what the leader sent"},
      {[](RankPlan& plan) {
         plan.slots[0].slot = 3;
         plan.hash = ChainHash(0, plan);
       },
       "the leader opened slot 3, this rank 0"},
      {[](RankPlan& plan) {
         plan.slots[1].pages[0] = 1 << 20;
         plan.hash = ChainHash(0, plan);
       },
       "the leader's pages do not fit here"},
      {[](RankPlan& plan) {
         plan.rows[0].start_position = 64;
         plan.hash = ChainHash(0, plan);
       },
       "slot 0 starts at 64"},
  };
  for (const auto& [fault, words] : faults) {
    Group group(Shape{2});
    group.tamper = fault;
    const auto outcomes = testing::RunAll(*group.engine, {testing::GoldenRequest(golden[0])});
    EXPECT_FALSE(outcomes.ok());
    const absl::Status result = group.followers[0]->Join();
    EXPECT_THAT(std::string(result.message()), HasSubstr(words));
    EXPECT_THAT(std::string(outcomes.status().message()), HasSubstr(words)) << "the leader hears why";
  }
}

}  // namespace
}  // namespace dflash
