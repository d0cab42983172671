// A leader's engine with followers as threads: they carry out its plans and end in the same state.
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/host_communicator.h"
#include "worker/rank/follower.h"
#include "worker/rank/leader.h"
#include "worker/testing/tiny_pair.h"

namespace dflash {
namespace {

using testing::GoldenPrompt;
using ::testing::HasSubstr;
using testing::TinyPair;

constexpr int64_t kBlockRows = 16;

TinyPair OneThreadPair() {
  testing::TinyPairOptions options;
  options.threads = 1;
  return testing::LoadTinyPair(options).value();
}

// One follower: takes plans from a queue until it is closed or a step fails.
class FollowerThread {
 public:
  explicit FollowerThread(Communicator* communicator) : communicator_(communicator) {
    pair_ = OneThreadPair();
    follower_ =
        RankFollower::Create(kBlockRows, pair_.target.get(), pair_.table.get(), communicator, *pair_.stream)
            .value();
    thread_ = std::thread([this] { Run(); });
  }
  ~FollowerThread() { (void)Join(); }

  void Push(const RankPlan& plan) {
    absl::MutexLock lock(&mutex_);
    plans_.push_back(plan);
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
    for (;;) {
      RankPlan plan;
      {
        absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(
            +[](FollowerThread* self) { return self->closed_ || !self->plans_.empty(); }, this));
        if (plans_.empty()) return;
        plan = std::move(plans_.front());
        plans_.pop_front();
      }
      result_ = follower_->Run(plan);
      if (result_.ok()) continue;
      communicator_->Abort(result_);
      return;
    }
  }

  Communicator* const communicator_;
  TinyPair pair_;
  std::unique_ptr<RankFollower> follower_;
  absl::Status result_;
  absl::Mutex mutex_;
  std::deque<RankPlan> plans_;
  bool closed_ = false;
  std::thread thread_;
};

// A group of `size` ranks in this process. `tamper` may change the first plan on its way to rank 1.
class Group final : public PlanSender {
 public:
  explicit Group(int size) {
    communicators_ = HostCommunicator::CreateGroup({.size = size}).value();
    for (int rank = 1; rank < size; ++rank)
      followers.push_back(std::make_unique<FollowerThread>(communicators_[static_cast<size_t>(rank)].get()));
    pair = OneThreadPair();
    ranks = std::make_unique<RankLeader>(this, communicators_[0].get(), *pair.stream);
    EngineOptions options;
    options.vocabulary = pair.vocabulary;
    options.max_prefill_tokens = 64;
    options.ranks = ranks.get();
    engine = Engine::Create(options, pair.target.get(), pair.drafter.get(), pair.table.get(),
                            pair.tokenizer.get(), *pair.stream)
                 .value();
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

  std::vector<std::unique_ptr<HostCommunicator>> communicators_;
  std::vector<std::unique_ptr<FollowerThread>> followers;
  TinyPair pair;
  std::unique_ptr<RankLeader> ranks;
  std::unique_ptr<Engine> engine;
  int plans = 0;
  std::function<void(RankPlan&)> tamper;
};

class RankGroup : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, RankGroup, ::testing::Values(2, 4), ::testing::PrintToStringParamName());

// More requests than slots, with and without drafts, greedy and sampled: slots and pages change hands all
// the time, prompts and rounds share steps.
TEST_P(RankGroup, FollowersEndInTheLeadersState) {
  const std::vector<GoldenPrompt> golden = testing::LoadGoldenPrompts().value();
  Group group(GetParam());
  std::vector<GenerationRequest> requests;
  for (size_t i = 0; i < 7; ++i) {
    GenerationRequest request = testing::GoldenRequest(golden[i * 3]);
    if (i % 3 == 1) request.speculation = SpeculationMode::kOff;
    if (i % 3 == 2) request.max_draft_tokens = 3;
    requests.push_back(std::move(request));
  }
  const auto outcomes = testing::RunAll(*group.engine, requests).value();
  for (size_t i = 0; i < outcomes.size(); ++i) {
    EXPECT_EQ(outcomes[i].status, absl::OkStatus());
    EXPECT_EQ(outcomes[i].tokens, golden[i * 3].output_ids);
    if (i % 3 == 0) {
      EXPECT_GT(outcomes[i].finished.accepted_tokens, 0);
    }
  }
  EXPECT_GT(group.plans, 20);
  // One that is not finished, so that there is state to compare.
  GenerationRequest open = testing::GoldenRequest(golden[0]);
  class Ignore final : public RequestSink {
    void OnStarted(const StartedReport&) override {}
    void OnTokens(TokensReport) override {}
    void OnFinished(const FinishedReport&) override {}
    void OnFailed(const absl::Status&) override {}
  };
  group.engine->Submit(open, std::make_unique<Ignore>());
  for (int step = 0; step < 4; ++step) ASSERT_TRUE(group.engine->Step().value());
  int32_t slot = -1;
  for (int32_t s = 0; s < group.pair.table->slots(); ++s) {
    if (group.pair.table->lengths(s).target_kv > 0) slot = s;
  }
  ASSERT_GE(slot, 0);
  const auto state = group.pair.target->ExportState(slot).value();
  for (const auto& follower : group.followers) {
    ASSERT_EQ(follower->Join(), absl::OkStatus());
    const SequenceTable& table = *follower->pair().table;
    EXPECT_EQ(table.free_slots(), group.pair.table->free_slots());
    EXPECT_EQ(table.free_pages(), group.pair.table->free_pages());
    EXPECT_EQ(follower->pair().target->ExportState(slot).value(), state);
  }
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
         plan.rows[0].start_position = 64;
         plan.hash = ChainHash(0, plan);
       },
       "slot 0 starts at 64"},
  };
  for (const auto& [fault, words] : faults) {
    Group group(2);
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
