// Many requests at once: what each of them gets, down to the acceptance of every round, is what it gets
// alone, whoever arrives, is cancelled or is preempted meanwhile; and nothing is left of any of them.
// Tests named *Full take long (label slow).
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device/graph.h"
#include "worker/testing/company.h"
#include "worker/testing/tiny_pair.h"

namespace dflash {
namespace {

using testing::Company;
using testing::ExpectSameOutcome;
using testing::GenerationOutcome;
using testing::LoadTinyPair;
using testing::MixedRequests;
using testing::MixedRequestsOptions;
using testing::RunInCompany;
using testing::RunOneByOne;
using testing::StepTotals;
using testing::TinyPair;

absl::StatusOr<TinyPair> LoadPools(int64_t slots, int64_t pages, int64_t max_tokens = 1024,
                                   int64_t checkpoints = 0) {
  testing::TinyPairOptions options;
  options.slots = slots;
  options.pages = pages;
  options.max_tokens = max_tokens;
  options.checkpoints = checkpoints;
  return LoadTinyPair(options);
}

std::unique_ptr<Engine> MakeEngine(TinyPair& pair, int64_t prefill_rows, StepObserver* observer) {
  EngineOptions options;
  options.vocabulary = pair.vocabulary;
  options.max_prefill_tokens = prefill_rows;
  options.observer = observer;
  return *Engine::Create(options, pair.target.get(), pair.drafter.get(), pair.table.get(),
                         pair.tokenizer.get(), *pair.stream);
}

void ExpectIdle(const Engine& engine, const TinyPair& pair) {
  EXPECT_EQ(engine.Gauges().running, 0);
  EXPECT_EQ(engine.Gauges().waiting, 0);
  EXPECT_EQ(pair.table->free_slots(), pair.table->slots());
  // All pages are free, or hold prefixes that nobody uses.
  EXPECT_EQ(pair.table->free_pages() + engine.Gauges().pages_evictable, pair.table->pages());
}

// Runs the requests alone, then together over pools in which they do not all fit.
void CheckCompany(size_t count, uint32_t seed, const MixedRequestsOptions& sizes, int64_t slots,
                  int64_t pages) {
  const std::vector<GenerationRequest> requests = MixedRequests(count, seed, sizes);
  absl::StatusOr<TinyPair> roomy = LoadTinyPair();
  ASSERT_TRUE(roomy.ok()) << roomy.status();
  const auto expected = RunOneByOne(*MakeEngine(*roomy, 512, nullptr), requests);
  ASSERT_TRUE(expected.ok()) << expected.status();

  absl::StatusOr<TinyPair> pair = LoadPools(slots, pages);
  ASSERT_TRUE(pair.ok()) << pair.status();
  StepTotals totals;
  const std::unique_ptr<Engine> engine = MakeEngine(*pair, 128, &totals);
  const auto actual =
      RunInCompany(*engine, requests, {.seed = seed, .most_arrivals = 6, .cancelled = count / 4});
  ASSERT_TRUE(actual.ok()) << actual.status();
  for (size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE(requests[i].id);
    ExpectSameOutcome((*actual)[i], (*expected)[i]);
  }
  ExpectIdle(*engine, *pair);
  std::printf(
      "%ld steps, %ld mixed; at most %ld sequences; %ld preemptions, %ld rows fed again; %ld of %ld "
      "drafts accepted\n",
      totals.steps, totals.mixed_steps, totals.most_running, totals.preemptions, totals.refed_rows,
      totals.accepted, totals.drafted);
  EXPECT_GT(totals.mixed_steps, 0);
  EXPECT_GT(totals.preemptions, 0);
  EXPECT_GT(totals.refed_rows, 0);
  EXPECT_GT(totals.accepted, 0);
  EXPECT_GT(totals.drafted, totals.accepted);
}

TEST(CompanyTest, ChangesNothing) {
  CheckCompany(64, 1, {.longest_prompt = 90, .most_tokens = 120}, /*slots=*/64, /*pages=*/14);
}

TEST(CompanyTest, ChangesNothingFull) {
  for (uint32_t seed : {2, 3, 4, 5})
    CheckCompany(64, seed, {.longest_prompt = 700, .most_tokens = 300}, /*slots=*/64, /*pages=*/60);
}

// The most that fits: every request alone fills the pools, so each one drives the others out.
TEST(CompanyTest, OneThatNeedsEverythingGetsIt) {
  absl::StatusOr<TinyPair> pair = LoadPools(3, 3, 192);
  ASSERT_TRUE(pair.ok()) << pair.status();
  StepTotals totals;
  const std::unique_ptr<Engine> engine = MakeEngine(*pair, 64, &totals);
  std::vector<GenerationRequest> requests = MixedRequests(3, 7, {});
  for (GenerationRequest& request : requests) {
    request.prompt_tokens.resize(20, 17);
    request.max_tokens = 150;
    request.stop_token_ids.clear();
    request.stop_strings.clear();
  }
  const auto expected = RunOneByOne(*engine, requests);
  ASSERT_TRUE(expected.ok()) << expected.status();
  EXPECT_EQ(totals.preemptions, 0);
  const auto actual = RunInCompany(*engine, requests, {.most_arrivals = 3});
  ASSERT_TRUE(actual.ok()) << actual.status();
  for (size_t i = 0; i < requests.size(); ++i) ExpectSameOutcome((*actual)[i], (*expected)[i]);
  EXPECT_GT(totals.preemptions, 0);
  ExpectIdle(*engine, *pair);
}

// What is stored of a resumed request, recurrent states and drafter context too, is bit for bit what is
// stored of one that nobody has disturbed.
TEST(CompanyTest, ResumedStateIsTheSameToTheBit) {
  std::vector<GenerationRequest> requests = MixedRequests(2, 7, {});
  for (GenerationRequest& request : requests) {
    request.prompt_tokens.resize(20, 17);
    request.max_tokens = 150;
    request.stop_token_ids.clear();
    request.stop_strings.clear();
    request.speculation = SpeculationMode::kDFlash;
    request.priority = 0;
  }
  constexpr size_t kTokens = 100;
  struct Stored {
    size_t tokens = 0;
    std::vector<std::vector<float>> stores;
  };
  // Runs the last of the first `count` requests until it has emitted `tokens`.
  const auto run = [&](size_t count, size_t tokens, StepTotals& totals) {
    Stored stored;
    absl::StatusOr<TinyPair> pair = LoadPools(2, 3, 192);
    EXPECT_TRUE(pair.ok()) << pair.status();
    const std::unique_ptr<Engine> engine = MakeEngine(*pair, 64, &totals);
    std::vector<GenerationOutcome> outcomes(2);
    for (size_t i = 2 - count; i < 2; ++i) engine->Submit(requests[i], testing::Record(&outcomes[i]));
    const std::vector<int32_t>& emitted = outcomes[1].tokens;
    while (emitted.size() < tokens && *engine->Step()) {
    }
    stored.tokens = emitted.size();
    EXPECT_EQ(engine->Gauges().running, 1) << "the other one has ended";
    for (int32_t slot = 0; slot < 2; ++slot) {
      if (pair->table->lengths(slot).target_kv == 0) continue;
      EXPECT_EQ(pair->table->lengths(slot).target_kv, static_cast<int64_t>(20 + emitted.size() - 1));
      stored.stores = *pair->target->ExportState(slot);
      const std::vector<std::vector<float>> context = *pair->drafter->ExportContext(slot);
      stored.stores.insert(stored.stores.end(), context.begin(), context.end());
    }
    return stored;
  };
  StepTotals alone, together;
  const Stored expected = run(1, kTokens, alone);
  const Stored actual = run(2, expected.tokens, together);
  EXPECT_EQ(alone.preemptions, 0);
  EXPECT_GT(together.preemptions, 0);
  EXPECT_GT(together.refed_rows, 16);
  EXPECT_EQ(actual.tokens, expected.tokens);
  EXPECT_GT(expected.stores.size(), 10u);
  ASSERT_EQ(actual.stores.size(), expected.stores.size());
  for (size_t i = 0; i < expected.stores.size(); ++i) EXPECT_EQ(actual.stores[i], expected.stores[i]) << i;
}

// Shorter blocks change rounds and no text.
TEST(CompanyTest, RowsOfARoundAreBounded) {
  class MostRows final : public StepObserver {
   public:
    void OnStep(const StepReport& report, const EngineGauges&) override {
      most = std::max(most, report.verify_rows);
      for (const DecodedRound& decoded : report.rounds) accepted += decoded.round.accepted;
    }
    int64_t most = 0, accepted = 0;
  };
  absl::StatusOr<TinyPair> pair = LoadPools(8, 0);
  ASSERT_TRUE(pair.ok()) << pair.status();
  const std::vector<GenerationRequest> requests =
      MixedRequests(8, 9, {.longest_prompt = 100, .most_tokens = 32});
  const auto expected = RunOneByOne(*MakeEngine(*pair, 512, nullptr), requests);
  ASSERT_TRUE(expected.ok()) << expected.status();
  EngineOptions options;
  options.vocabulary = pair->vocabulary;
  options.max_verify_rows = 40;
  for (const bool captured : {false, true}) {
    MostRows observer;
    options.captured_rounds = captured;
    options.observer = &observer;
    const auto engine = Engine::Create(options, pair->target.get(), pair->drafter.get(), pair->table.get(),
                                       pair->tokenizer.get(), *pair->stream);
    ASSERT_TRUE(engine.ok()) << engine.status();
    const auto actual = testing::RunAll(**engine, requests);
    ASSERT_TRUE(actual.ok()) << actual.status();
    for (size_t i = 0; i < requests.size(); ++i) EXPECT_EQ((*actual)[i].tokens, (*expected)[i].tokens) << i;
    EXPECT_LE(observer.most, 40);
    EXPECT_GT(observer.most, 24);
    EXPECT_GT(observer.accepted, 0);
  }
}

int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * 4096;
}

// Requests come and go in batches; after each one the pools are as they were at the beginning.
// With checkpoints, requests begin with what others have left of their prompts.
void CheckChurn(int batches, size_t batch, int64_t checkpoints) {
  absl::StatusOr<TinyPair> pair = LoadPools(12, 10, 1024, checkpoints);
  ASSERT_TRUE(pair.ok()) << pair.status();
  StepTotals totals;
  const std::unique_ptr<Engine> engine = MakeEngine(*pair, 128, &totals);
  int64_t before = 0, finished = 0, cached = 0;
  std::vector<GenerationOutcome> first;
  for (int n = 0; n < batches; ++n) {
    // The same ones again and again, so that each can be compared with what it got the first time.
    const std::vector<GenerationRequest> requests = MixedRequests(
        batch, 11, {.longest_prompt = checkpoints > 0 ? 160 : 60, .most_tokens = checkpoints > 0 ? 200 : 80});
    const auto outcomes = RunInCompany(
        *engine, requests, {.seed = static_cast<uint32_t>(n), .most_arrivals = 8, .cancelled = batch / 5});
    ASSERT_TRUE(outcomes.ok()) << outcomes.status();
    if (n == 0) first = *outcomes;
    for (size_t i = 0; i < batch; ++i) {
      ExpectSameOutcome((*outcomes)[i], first[i]);
      cached += (*outcomes)[i].started.cached_tokens;
    }
    finished += static_cast<int64_t>(batch + batch / 5);
    ExpectIdle(*engine, *pair);
    if (::testing::Test::HasFailure()) return;
    if (n == batches / 4) before = ResidentBytes();
  }
  const int64_t grown = ResidentBytes() - before;
  std::printf(
      "%ld requests in %ld steps, %ld preemptions, %ld tokens from the prefix cache; resident memory grew by "
      "%ld KiB in the last three quarters\n",
      finished, totals.steps, totals.preemptions, cached, grown / 1024);
  EXPECT_EQ(cached > 0, checkpoints > 0);
  EXPECT_GT(totals.preemptions, 0);
  EXPECT_GT(totals.accepted, 0);
  // Where rounds are captured, there are graphs of more and more shapes.
  if (!Graph::IsCaptureCostly()) {
    EXPECT_LT(grown, int64_t{4} << 20);
  }
}

TEST(CompanyTest, ChurnLeavesNothing) { CheckChurn(/*batches=*/4, /*batch=*/25, /*checkpoints=*/0); }

TEST(CompanyTest, ChurnWithPrefixCacheLeavesNothing) {
  CheckChurn(/*batches=*/3, /*batch=*/20, /*checkpoints=*/5);
}

TEST(CompanyTest, ChurnLeavesNothingFull) { CheckChurn(/*batches=*/84, /*batch=*/100, /*checkpoints=*/0); }

TEST(CompanyTest, ChurnWithPrefixCacheLeavesNothingFull) {
  CheckChurn(/*batches=*/84, /*batch=*/100, /*checkpoints=*/5);
}

}  // namespace
}  // namespace dflash
