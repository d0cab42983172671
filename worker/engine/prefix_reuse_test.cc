// Cold equals warm: a request that begins with a cached prefix gets the same text, the same proposals and the
// same acceptance as one that computes everything, whatever the cache has been through. Free pages hold a
// large number all the while, so that whoever reads what is not there shows it.
#include <algorithm>
#include <cstdio>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device/buffer.h"
#include "worker/draft/forwarding_drafter.h"
#include "worker/testing/company.h"
#include "worker/testing/tiny_pair.h"

namespace dflash {
namespace {

using testing::Company;
using testing::ExpectSameOutcome;
using testing::GenerationOutcome;
using testing::GoldenPrompt;
using testing::GoldenRequest;
using testing::LoadGoldenPrompts;
using testing::LoadTinyPair;
using testing::RunAll;
using testing::RunInCompany;
using testing::RunOneByOne;
using testing::StepTotals;
using testing::TinyPair;
using Tokens = std::vector<int32_t>;

constexpr float kSentinel = 3e4f;

Tokens Join(std::initializer_list<Tokens> parts) {
  Tokens tokens;
  for (const Tokens& part : parts) tokens.insert(tokens.end(), part.begin(), part.end());
  return tokens;
}

Tokens First(const Tokens& tokens, int64_t count) { return {tokens.begin(), tokens.begin() + count}; }

// Real text of the model's world, as long as wanted and without an end of a turn; every `seed` another from
// the first token on.
Tokens SomeText(int64_t count, size_t seed) {
  static const std::vector<GoldenPrompt> prompts = *LoadGoldenPrompts();
  const Tokens ends = GoldenRequest(prompts[0]).stop_token_ids;
  Tokens tokens = {100 + static_cast<int32_t>(seed)};
  for (size_t i = seed; static_cast<int64_t>(tokens.size()) < count; ++i) {
    const GoldenPrompt& prompt = prompts[i * 7 % prompts.size()];
    tokens = Join({tokens, prompt.prompt_ids, prompt.output_ids});
    std::erase_if(tokens, [&](int32_t token) { return std::count(ends.begin(), ends.end(), token) > 0; });
  }
  return First(tokens, count);
}

// A short chat, which the drafter is good at.
Tokens Question(size_t i) {
  static const std::vector<GoldenPrompt> prompts = *LoadGoldenPrompts();
  std::vector<const GoldenPrompt*> chats;
  for (const GoldenPrompt& prompt : prompts) {
    if (prompt.kind == "chat") chats.push_back(&prompt);
  }
  return chats[i % chats.size()]->prompt_ids;
}

GenerationRequest Request(Tokens prompt, int64_t max_tokens = 32) {
  GenerationRequest request = GoldenRequest(LoadGoldenPrompts()->front());
  request.prompt_tokens = std::move(prompt);
  request.max_tokens = max_tokens;
  return request;
}

// The DFlash drafter; writes down what it proposes, and checks that its context is all there.
class RecordingDrafter final : public ForwardingDrafter {
 public:
  explicit RecordingDrafter(TinyPair& pair) : ForwardingDrafter(pair.drafter.get()), pair_(pair) {}
  bool is_capturable() const override { return false; }
  absl::Status Propose(DecodeStates states, const int32_t* slots, int64_t count,
                       const Proposals& to) override {
    const Stream& stream = *pair_.stream;
    absl::Status status = ForwardingDrafter::Propose(states, slots, count, to);
    Tokens proposed(static_cast<size_t>(count * to.depth)), drafting(static_cast<size_t>(count));
    if (status.ok()) status = CopyToHost(proposed.data(), to.tokens, count * to.depth * 4, stream);
    if (status.ok()) status = CopyToHost(drafting.data(), slots, count * 4, stream);
    if (!status.ok()) return status;
    proposals.push_back(proposed);
    for (int32_t slot : drafting) {
      DecodeState state;
      int32_t start = -1, end = -1;
      status = CopyToHost(&state, states.data + slot, sizeof(state), stream);
      if (status.ok()) status = CopyToHost(&start, pair_.table->context_starts() + slot, 4, stream);
      if (status.ok())
        status = CopyToHost(&end, pair_.table->device_lengths().draft_context_end + slot, 4, stream);
      if (!status.ok()) return status;
      EXPECT_EQ(start, 0) << "the context covers all that comes before the anchor";
      EXPECT_EQ(end, state.position);
    }
    return status;
  }

  std::vector<Tokens> proposals;

 private:
  TinyPair& pair_;
};

// An engine with a prefix cache, one request at a time, next to one without.
class PrefixReuseTest : public ::testing::Test {
 protected:
  void Load(int64_t pages, int64_t checkpoints, int64_t slots = 2) {
    testing::TinyPairOptions options;
    options.slots = slots;
    options.pages = pages;
    options.max_tokens = 1024;
    options.checkpoints = checkpoints;
    auto pair = LoadTinyPair(options);
    ASSERT_TRUE(pair.ok()) << pair.status();
    pair_ = std::make_unique<TinyPair>(*std::move(pair));
    drafter_ = std::make_unique<RecordingDrafter>(*pair_);
    engine_ = MakeEngine(256, nullptr, drafter_.get());
  }
  std::unique_ptr<Engine> MakeEngine(int64_t prefill_rows, StepObserver* observer, Drafter* drafter) {
    EngineOptions options;
    options.vocabulary = pair_->vocabulary;
    options.max_prefill_tokens = prefill_rows;
    options.turn_end_tokens = GoldenRequest(LoadGoldenPrompts()->front()).stop_token_ids;
    options.observer = observer;
    return *Engine::Create(options, pair_->target.get(), drafter, pair_->table.get(), pair_->tokenizer.get(),
                           *pair_->stream);
  }

  // What nobody holds is overwritten.
  void SpoilFreePages() {
    std::vector<int32_t> free;
    for (int32_t page = 0; page < pair_->table->pages(); ++page) {
      if (pair_->table->is_free(page)) free.push_back(page);
    }
    ASSERT_TRUE(pair_->target->FillPages(free, kSentinel).ok());
    ASSERT_TRUE(pair_->drafter->FillPages(free, kSentinel).ok());
  }

  struct Result {
    GenerationOutcome outcome;
    std::vector<Tokens> proposals;
  };
  Result Run(const GenerationRequest& request) {
    SpoilFreePages();
    drafter_->proposals.clear();
    auto outcomes = RunAll(*engine_, {request});
    EXPECT_TRUE(outcomes.ok()) << outcomes.status();
    Result result = {std::move((*outcomes)[0]), std::move(drafter_->proposals)};
    EXPECT_TRUE(result.outcome.done) << result.outcome.status;
    return result;
  }
  // The same request without the cache: the reference.
  Result RunCold(GenerationRequest request) {
    request.use_prefix_cache = false;
    Result result = Run(request);
    EXPECT_EQ(result.outcome.started.cached_tokens, 0);
    return result;
  }
  // Runs a request that must begin with `cached` tokens and equal its cold run. Returns the accepted drafts.
  int64_t CheckWarm(const GenerationRequest& request, int64_t cached) {
    const Result warm = Run(request);
    EXPECT_EQ(warm.outcome.started.cached_tokens, cached);
    const Result cold = RunCold(request);
    ExpectSameOutcome(warm.outcome, cold.outcome);
    EXPECT_EQ(warm.proposals, cold.proposals);
    if (request.speculation != SpeculationMode::kOff) {
      EXPECT_GT(warm.outcome.finished.drafted_tokens, 0);
    }
    return warm.outcome.finished.accepted_tokens;
  }

  std::unique_ptr<TinyPair> pair_;
  std::unique_ptr<RecordingDrafter> drafter_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(PrefixReuseTest, TheSamePromptAgain) {
  Load(32, 8);
  int64_t accepted = 0;
  for (const int64_t length : {300, 256, 257, 65, 64}) {
    SCOPED_TRACE(length);
    const GenerationRequest request = Request(SomeText(length, static_cast<size_t>(length)));
    Run(request);
    accepted += CheckWarm(request, (length - 1) / 64 * 64);
  }
  EXPECT_GT(accepted, 0);
}

TEST_F(PrefixReuseTest, ASharedPrefixWithOthersInBetween) {
  Load(48, 12);
  const Tokens system = SomeText(230, 1);
  const auto with = [&](size_t question) {
    GenerationRequest request = Request(Join({system, Question(question)}));
    if (question % 2 == 1) request.sampling = {.temperature = 0.8f, .top_k = 20, .seed = question};
    return request;
  };
  // The first one leaves states at its end only. The second one finds pages for 192 tokens and no state,
  // computes all, and leaves a state where it branched off.
  Run(Request(Join({system, SomeText(100, 2), Question(0)})));
  Run(Request(SomeText(400, 3)));
  CheckWarm(with(1), 0);
  RunCold(Request(SomeText(300, 4)));
  int64_t accepted = 0;
  for (size_t question = 2; question < 7; ++question) {
    SCOPED_TRACE(question);
    accepted += CheckWarm(with(question), 192);
    Run(Request(SomeText(150, 5 + question)));
  }
  EXPECT_GT(accepted, 50);
}

// Two prompts share whole grid cells and differ in the very next token, or share part of the next cell.
TEST_F(PrefixReuseTest, TheNextTokenDiffers) {
  Load(48, 12);
  const Tokens text = SomeText(280, 2);
  Run(Request(Join({First(text, 256), Question(0)})));
  Run(Request(Join({First(text, 128), Question(1)})));
  for (const int64_t shared : {128, 129, 191}) {
    SCOPED_TRACE(shared);
    Tokens prompt = Join({First(text, shared), Question(static_cast<size_t>(shared))});
    prompt[static_cast<size_t>(shared)] = (text[static_cast<size_t>(shared)] + 1) % 4000;
    CheckWarm(Request(prompt), 128);
  }
}

TEST_F(PrefixReuseTest, AfterEviction) {
  Load(16, 3);
  const GenerationRequest request = Request(Join({SomeText(400, 1), Question(3)}), 24);
  const auto cached_before = [&](int64_t checkpoints_away, int64_t pages_away) {
    Run(request);
    // Others take pages, or the places of states only.
    for (int64_t i = 0; i < checkpoints_away; ++i) Run(Request(SomeText(70, static_cast<size_t>(20 + i)), 1));
    if (pages_away > 0) Run(Request(SomeText(pages_away * 64 - 1, 9), 1));
    return Run(request).outcome.started.cached_tokens;
  };
  const int64_t whole = (static_cast<int64_t>(request.prompt_tokens.size()) - 1) / 64 * 64;
  EXPECT_EQ(cached_before(0, 0), whole);
  CheckWarm(request, whole);
  EXPECT_EQ(cached_before(5, 0), 0) << "all states are others'";
  CheckWarm(request, whole);
  EXPECT_EQ(cached_before(0, 15), 0) << "all pages are others'";
  CheckWarm(request, whole);
}

// A long prompt loses its end to others and keeps its beginning, with the state that it left there.
TEST_F(PrefixReuseTest, PartiallyWarm) {
  Load(18, 6);
  const Tokens text = SomeText(200, 6);
  const GenerationRequest request = Request(Join({text, Question(0), SomeText(250, 8), Question(1)}), 8);
  Run(Request(Join({First(text, 140), SomeText(30, 11)}), 1));
  Run(request);
  Run(request);
  const int64_t whole = (static_cast<int64_t>(request.prompt_tokens.size()) - 1) / 64 * 64;
  Run(Request(SomeText(750, 9), 8));
  const Result warm = Run(request);
  EXPECT_GT(warm.outcome.started.cached_tokens, 0);
  EXPECT_LT(warm.outcome.started.cached_tokens, whole);
  const Result cold = RunCold(request);
  ExpectSameOutcome(warm.outcome, cold.outcome);
  EXPECT_EQ(warm.proposals, cold.proposals);
  CheckWarm(request, whole);
}

TEST_F(PrefixReuseTest, HitsAreTheSameWithAndWithoutSpeculation) {
  Load(48, 12);
  GenerationRequest plain = Request(Join({SomeText(150, 1), Question(2)}));
  plain.speculation = SpeculationMode::kOff;
  const GenerationRequest speculative = Request(plain.prompt_tokens);
  const int64_t cached = (static_cast<int64_t>(plain.prompt_tokens.size()) - 1) / 64 * 64;
  Run(plain);  // a drafter that is loaded ingests all the same
  CheckWarm(plain, cached);
  CheckWarm(speculative, cached);
  const GenerationRequest other = Request(Join({SomeText(150, 3), Question(4)}));
  GenerationRequest other_plain = other;
  other_plain.speculation = SpeculationMode::kOff;
  const int64_t other_cached = (static_cast<int64_t>(other.prompt_tokens.size()) - 1) / 64 * 64;
  Run(other);
  CheckWarm(other, other_cached);
  CheckWarm(other_plain, other_cached);
}

// Every turn begins with the whole prompt of the last one, down to the grid. What was answered is run as part
// of the new prompt: it was verified, and a prompt's rows have other bits.
TEST_F(PrefixReuseTest, ConversationsContinue) {
  Load(64, 12);
  Tokens prompt = Join({SomeText(90, 1), Question(0)});
  int64_t accepted = 0;
  Result turn = Run(Request(prompt));
  for (size_t k = 1; k < 5; ++k) {
    SCOPED_TRACE(k);
    const auto last = static_cast<int64_t>(prompt.size());
    prompt = Join({prompt, turn.outcome.tokens, SomeText(20, k), Question(k)});
    accepted += CheckWarm(Request(prompt), last / 64 * 64);
    turn = Run(Request(prompt));
  }
  EXPECT_GT(accepted, 30);
}

TEST_F(PrefixReuseTest, TenantsAndThoseWhoOptOutShareNothing) {
  Load(48, 12);
  GenerationRequest request = Request(Join({SomeText(150, 1), Question(2)}));
  const int64_t cached = (static_cast<int64_t>(request.prompt_tokens.size()) - 1) / 64 * 64;
  RunCold(request);
  CheckWarm(request, 0);  // who opts out leaves nothing
  CheckWarm(request, cached);
  request.cache_salt = "tenant";
  CheckWarm(request, 0);
  CheckWarm(request, cached);
  request.cache_salt = "another";
  CheckWarm(request, 0);
}

// Many requests over few prefixes, in pools that are too small for them: hits, evictions, preemptions and
// resumptions, cancellations.
TEST_F(PrefixReuseTest, InCompanyWithPreemptions) {
  Load(7, 4, /*slots=*/12);
  std::vector<GenerationRequest> requests;
  for (size_t i = 0; i < 16; ++i) {
    // Half of them are short questions with long answers, which grow out of the pages that there are.
    Tokens prompt = Join({SomeText(static_cast<int64_t>(70 + 64 * (i % 2)), i % 4 / 2), Question(i % 5)});
    requests.push_back(Request(std::move(prompt), i % 2 == 0 ? 150 : 24));
    requests.back().id = "request " + std::to_string(i);
    if (i % 3 == 1) requests.back().sampling = {.temperature = 0.7f, .top_p = 0.9f, .seed = i};
    if (i % 5 == 4) requests.back().speculation = SpeculationMode::kOff;
    if (i % 2 == 0) requests.back().stop_token_ids.clear();
  }
  std::vector<GenerationRequest> uncached = requests;
  for (GenerationRequest& request : uncached) request.use_prefix_cache = false;
  const auto expected = RunOneByOne(*engine_, uncached);
  ASSERT_TRUE(expected.ok()) << expected.status();
  StepTotals totals;
  int64_t cached = 0;
  for (const uint32_t seed : {1u, 2u}) {
    SpoilFreePages();
    const auto engine = MakeEngine(128, &totals, pair_->drafter.get());
    const auto outcomes = RunInCompany(*engine, requests, {.seed = seed, .most_arrivals = 3, .cancelled = 6});
    ASSERT_TRUE(outcomes.ok()) << outcomes.status();
    for (size_t i = 0; i < requests.size(); ++i) {
      SCOPED_TRACE(i);
      ExpectSameOutcome((*outcomes)[i], (*expected)[i]);
      cached += (*outcomes)[i].started.cached_tokens;
    }
    const EngineGauges gauges = engine->Gauges();
    EXPECT_EQ(gauges.pages_free + gauges.pages_evictable, gauges.pages_total);
    EXPECT_EQ(pair_->table->free_slots(), pair_->table->slots());
  }
  std::printf("%ld preemptions, %ld tokens from the cache, %ld of %ld drafts accepted\n",
              static_cast<long>(totals.preemptions), static_cast<long>(cached),
              static_cast<long>(totals.accepted), static_cast<long>(totals.drafted));
  EXPECT_GT(totals.preemptions, 0);
  EXPECT_GT(cached, 500);
  EXPECT_GT(totals.accepted, 100);
  EXPECT_EQ(pair_->table->free_pages() + engine_->Gauges().pages_evictable, pair_->table->pages())
      << "an engine that is gone holds nothing";
}

// The defect that this is all about: a prefix comes back without the drafter's context. The text survives it,
// the acceptance does not, and the tests above would see it.
TEST_F(PrefixReuseTest, LostDrafterContextIsSeen) {
  Load(32, 8);
  const GenerationRequest request = Request(Join({SomeText(200, 1), Question(3)}), 64);
  Run(request);
  std::vector<int32_t> held;
  for (int32_t page = 0; page < pair_->table->pages(); ++page) {
    if (!pair_->table->is_free(page)) held.push_back(page);
  }
  ASSERT_GT(held.size(), 2u);
  ASSERT_TRUE(pair_->drafter->FillPages(held, kSentinel).ok());
  const Result defective = Run(request);
  EXPECT_GT(defective.outcome.started.cached_tokens, 0);
  const Result cold = RunCold(request);
  EXPECT_EQ(defective.outcome.tokens, cold.outcome.tokens);
  EXPECT_NE(defective.proposals, cold.proposals);
  EXPECT_LT(defective.outcome.finished.accepted_tokens, cold.outcome.finished.accepted_tokens);
}

// Several outputs of one prompt, asked for at the same time: one of them runs it, the others wait for that
// and begin behind its last page. An unrelated one does not wait.
TEST_F(PrefixReuseTest, OutputsOfOnePromptShareIt) {
  Load(64, 8, /*slots=*/5);
  std::vector<GenerationRequest> requests;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    requests.push_back(Request(Join({SomeText(500, 1), Question(3)})));
    requests.back().id = std::to_string(seed);
    requests.back().sampling = {.temperature = 0.8f, .top_k = 20, .top_p = 1, .min_p = 0, .seed = seed};
  }
  requests.push_back(Request(Question(5)));
  const auto rows = static_cast<int64_t>(requests[0].prompt_tokens.size());
  std::vector<GenerationOutcome> alone;
  int64_t accepted = 0;
  for (const GenerationRequest& request : requests) {
    alone.push_back(RunCold(request).outcome);
    accepted += alone.back().finished.accepted_tokens;
  }
  EXPECT_GT(accepted, 0);

  class PrefillRows final : public StepObserver {
   public:
    void OnStep(const StepReport& report, const EngineGauges&) override {
      rows += report.prefill_rows;
      evicted += report.evicted_pages;
    }
    int64_t rows = 0, evicted = 0;
  } steps;
  const std::unique_ptr<Engine> engine = MakeEngine(128, &steps, drafter_.get());
  const auto together = RunAll(*engine, requests);
  ASSERT_TRUE(together.ok()) << together.status();
  for (size_t i = 0; i < requests.size(); ++i) ExpectSameOutcome((*together)[i], alone[i]);
  EXPECT_EQ((*together)[0].started.cached_tokens, 0);
  for (size_t i = 1; i < 4; ++i) EXPECT_EQ((*together)[i].started.cached_tokens, (rows - 1) / 64 * 64);
  const auto unrelated = static_cast<int64_t>(requests[4].prompt_tokens.size());
  EXPECT_EQ(steps.rows, rows + 3 * (rows - (rows - 1) / 64 * 64) + unrelated);
  EXPECT_EQ(steps.evicted, 0);
}

// Numbers that are none may be in any page of the request that met them.
TEST_F(PrefixReuseTest, AFaultLeavesNothingBehind) {
  Load(32, 8);
  const GenerationRequest request = Request(Join({SomeText(200, 1), Question(3)}));
  Run(request);
  std::vector<int32_t> held;
  for (int32_t page = 0; page < pair_->table->pages(); ++page) {
    if (!pair_->table->is_free(page)) held.push_back(page);
  }
  ASSERT_TRUE(pair_->target->FillPages(held, std::numeric_limits<float>::quiet_NaN()).ok());
  const auto outcomes = RunAll(*engine_, {request});
  ASSERT_TRUE(outcomes.ok()) << outcomes.status();
  EXPECT_FALSE((*outcomes)[0].done);
  EXPECT_EQ((*outcomes)[0].status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(engine_->Gauges().pages_free, engine_->Gauges().pages_total);
  CheckWarm(request, 0);
}

}  // namespace
}  // namespace dflash
