#include "worker/engine/scheduler.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Literal rows. A request of `prompt` tokens that may emit `most` and has emitted `emitted`.
ScheduledRequest Request(int64_t arrival, int64_t prompt, int64_t most, int64_t emitted = 0) {
  return {.arrival = arrival,
          .client = {},
          .prompt_tokens = prompt,
          .max_tokens = most,
          .emitted_tokens = emitted};
}

RunningSequence InPrompt(int64_t arrival, int64_t prompt, int64_t stored, int64_t pages = 0) {
  return {.request = Request(arrival, prompt, 100),
          .stored = stored,
          .max_drafts = 15,
          .pages = pages,
          .released_pages = pages};
}

// Decodes: `emitted` tokens, the last of them its anchor.
RunningSequence Decoding(int64_t arrival, int64_t prompt, int64_t most, int64_t emitted, int64_t pages) {
  return {.request = Request(arrival, prompt, most, emitted),
          .stored = prompt + emitted - 1,
          .max_drafts = 15,
          .pages = pages,
          .released_pages = pages};
}

SchedulerSnapshot Snapshot(std::vector<RunningSequence> running, int64_t free_pages = 1000) {
  return {.running = std::move(running),
          .waiting = {},
          .free_slots = 0,
          .free_pages = free_pages,
          .max_prefill_rows = 128,
          .block_rows = 16};
}

std::vector<std::pair<int64_t, int64_t>> Of(const std::vector<StepPlan::Rows>& rows) {
  std::vector<std::pair<int64_t, int64_t>> pairs;
  for (const StepPlan::Rows& row : rows) pairs.emplace_back(row.sequence, row.rows);
  return pairs;
}
std::vector<std::pair<int64_t, int64_t>> Of(const std::vector<StepPlan::Verify>& members) {
  std::vector<std::pair<int64_t, int64_t>> pairs;
  for (const StepPlan::Verify& member : members) pairs.emplace_back(member.sequence, member.max_drafts);
  return pairs;
}
std::vector<std::pair<int64_t, int64_t>> Of(const std::vector<StepPlan::Reserve>& reserved) {
  std::vector<std::pair<int64_t, int64_t>> pairs;
  for (const StepPlan::Reserve& reserve : reserved) pairs.emplace_back(reserve.sequence, reserve.tokens);
  return pairs;
}

using Pair = std::pair<int64_t, int64_t>;

TEST(PlanAdmissionTest, OneRequestRunsAPromptForAll) {
  SchedulerSnapshot snapshot = Snapshot({InPrompt(0, 160, 64, 3)}, /*free_pages=*/100);
  for (int64_t i = 1; i < 6; ++i) snapshot.waiting.push_back({.request = Request(i, 160, 100)});
  snapshot.free_slots = 5;
  EXPECT_THAT(PlanAdmission(snapshot), ElementsAre(0, 1, 2, 3, 4));
  // Two wait for the running one, one of two others for the other; the last has a prompt of its own.
  snapshot.running[0].request.prompt = snapshot.waiting[0].request.prompt =
      snapshot.waiting[3].request.prompt = 7;
  snapshot.waiting[1].request.prompt = snapshot.waiting[2].request.prompt = 8;
  EXPECT_THAT(PlanAdmission(snapshot), ElementsAre(1, 4));
  // Nobody waits for one of lower priority.
  snapshot.waiting[3].request.priority = 1;
  EXPECT_THAT(PlanAdmission(snapshot), ElementsAre(3, 1, 4));
  // It is through.
  snapshot.waiting[3].request.priority = 0;
  snapshot.running[0].stored = 160;
  EXPECT_THAT(PlanAdmission(snapshot), ElementsAre(0, 1, 4));
}

TEST(PlanAdmissionTest, StopsAtTheFirstRequestThatDoesNotFit) {
  SchedulerSnapshot snapshot = Snapshot({}, /*free_pages=*/10);
  // 3, 9 and 1 pages with the two blocks of 16 that follow the prompt.
  snapshot.waiting = {
      {.request = Request(0, 160, 100)}, {.request = Request(1, 500, 100)}, {.request = Request(2, 30, 100)}};
  snapshot.free_slots = 3;
  EXPECT_THAT(PlanAdmission(snapshot), ElementsAre(0));
  snapshot.free_pages = 13;
  EXPECT_THAT(PlanAdmission(snapshot), ElementsAre(0, 1, 2));
  snapshot.free_slots = 2;
  EXPECT_THAT(PlanAdmission(snapshot), ElementsAre(0, 1));
  snapshot.free_slots = 0;
  EXPECT_THAT(PlanAdmission(snapshot), IsEmpty());
  snapshot.waiting = {};
  snapshot.free_slots = 2;
  EXPECT_THAT(PlanAdmission(snapshot), IsEmpty());
}

TEST(PlanAdmissionTest, AsksForNoMorePagesThanARequestCanUse) {
  SchedulerSnapshot snapshot = Snapshot({}, /*free_pages=*/1);
  snapshot.free_slots = 1;
  snapshot.waiting = {{.request = Request(0, 60, 5)}};  // stores 64 tokens at most
  EXPECT_THAT(PlanAdmission(snapshot), ElementsAre(0));
  snapshot.waiting = {{.request = Request(0, 60, 6)}};
  EXPECT_THAT(PlanAdmission(snapshot), IsEmpty());
  snapshot.waiting = {{.request = Request(0, 60, 6), .cached_pages = 1}};
  EXPECT_THAT(PlanAdmission(snapshot), ElementsAre(0));
}

TEST(PlanAdmissionTest, LeavesRunningSequencesThePagesThatTheyLack) {
  // The first has 2 of the 8 pages of its prompt and two blocks, the second all it needs, the third is over.
  SchedulerSnapshot snapshot =
      Snapshot({InPrompt(0, 480, 128, 2), Decoding(1, 20, 100, 3, 1), InPrompt(2, 480, 0)}, /*free_pages=*/7);
  snapshot.running[2].ended = true;
  snapshot.free_slots = 1;
  snapshot.waiting = {{.request = Request(3, 20, 10)}};
  EXPECT_THAT(PlanAdmission(snapshot), ElementsAre(0));
  snapshot.free_pages = 6;
  EXPECT_THAT(PlanAdmission(snapshot), IsEmpty());
}

TEST(PlanAdmissionTest, OrderIsOverdueThenPriorityThenResumedThenFairThenArrival) {
  SchedulerSnapshot snapshot = Snapshot({Decoding(0, 20, 100, 3, 1)});
  snapshot.running[0].request.client = "busy";
  snapshot.free_slots = 7;
  const auto waiting = [](int64_t arrival, const std::string& client, int32_t priority) {
    WaitingRequest entry = {.request = Request(arrival, 20, 10)};
    entry.request.client = client;
    entry.request.priority = priority;
    return entry;
  };
  snapshot.waiting = {
      waiting(1, "busy", 0),   // 0: last, its client has a sequence
      waiting(2, "other", 0),  // 1: 4th
      waiting(3, "other", 0),  // 2: 6th: by then other has one too, and arrived after 0
      waiting(4, "busy", 0),   // 3: 3rd, resumed
      waiting(5, "busy", 1),   // 4: 2nd
      waiting(6, "busy", -1),  // 5: 1st, overdue
  };
  snapshot.waiting[3].request.emitted_tokens = 4;
  snapshot.waiting[5].request.overtaken = kMaxOvertaken;
  // By the fourth choice "busy" has four sequences, so both of "other" come before its first request.
  EXPECT_THAT(PlanAdmission(snapshot), ElementsAre(5, 4, 3, 1, 2, 0));
}

TEST(PlanStepTest, ChunksEndOnTheGridOrAtThePromptsEnd) {
  const StepPlan plan = PlanStep(Snapshot({InPrompt(0, 100, 64), InPrompt(1, 300, 0), InPrompt(2, 20, 0)}));
  // The shortest first: 20, then the 36 that the first has left. Both end, so the long one has to wait.
  EXPECT_THAT(Of(plan.prefill), ElementsAre(Pair{0, 36}, Pair{2, 20}));
  EXPECT_THAT(Of(plan.reserve), ElementsAre(Pair{0, 100}, Pair{2, 20}));
  EXPECT_THAT(plan.verify, IsEmpty());
  EXPECT_TRUE(plan.needs_results());
  // None ends: whole grid cells.
  SchedulerSnapshot snapshot = Snapshot({InPrompt(0, 300, 64), InPrompt(1, 300, 0)});
  snapshot.max_prefill_rows = 320;
  EXPECT_THAT(Of(PlanStep(snapshot).prefill), ElementsAre(Pair{0, 236}));
  snapshot.max_prefill_rows = 192;
  EXPECT_THAT(Of(PlanStep(snapshot).prefill), ElementsAre(Pair{0, 192}));
}

TEST(PlanStepTest, AShortPromptOvertakesALongOneButNotForEver) {
  SchedulerSnapshot snapshot = Snapshot({InPrompt(0, 3000, 64), InPrompt(1, 100, 0), InPrompt(2, 90, 0)});
  EXPECT_THAT(Of(PlanStep(snapshot).prefill), ElementsAre(Pair{2, 90}));
  snapshot.running[0].paused_steps = kMaxPausedSteps - 1;
  EXPECT_THAT(Of(PlanStep(snapshot).prefill), ElementsAre(Pair{2, 90}));
  snapshot.running[0].paused_steps = kMaxPausedSteps;
  EXPECT_THAT(Of(PlanStep(snapshot).prefill), ElementsAre(Pair{0, 128}));
  snapshot.running[1].request.priority = 1;
  snapshot.running[0].paused_steps = 0;
  EXPECT_THAT(Of(PlanStep(snapshot).prefill), ElementsAre(Pair{1, 100}));
}

// More short prompts than the rows of a step hold, for ever: the long one that came first moves whenever it
// has waited for kMaxPausedSteps steps.
TEST(PlanStepTest, ManyShortPromptsDoNotStarveALongOne) {
  constexpr int64_t kChunk = 64, kChunks = 10;
  std::vector<RunningSequence> running = {InPrompt(0, kChunks * kChunk, 0)};
  int64_t arrivals = 1;
  for (; arrivals < 16; ++arrivals) running.push_back(InPrompt(arrivals, 96, 0));
  SchedulerSnapshot snapshot = Snapshot(running);
  snapshot.max_prefill_rows = kChunk;
  int64_t steps = 0;
  for (; snapshot.running[0].stored < kChunks * kChunk; ++steps) {
    ASSERT_LE(steps, kChunks * (kMaxPausedSteps + 1));
    const StepPlan plan = PlanStep(snapshot);
    for (RunningSequence& sequence : snapshot.running) ++sequence.paused_steps;
    for (const StepPlan::Rows& rows : plan.prefill) {
      RunningSequence& sequence = snapshot.running[static_cast<size_t>(rows.sequence)];
      sequence.stored += rows.rows;
      sequence.paused_steps = 0;
      if (rows.sequence > 0 && sequence.stored == sequence.request.prompt_tokens)
        sequence = InPrompt(arrivals++, 96, 0);  // the next client's
    }
  }
  EXPECT_GT(arrivals, 16 + steps / 4) << "short prompts move, too";
}

TEST(PlanStepTest, DecodingSequencesVerifyWithinTheirRoom) {
  SchedulerSnapshot snapshot = Snapshot({Decoding(0, 5, 101, 1, 1), Decoding(1, 5, 5, 1, 1),
                                         Decoding(2, 5, 2, 1, 1), Decoding(3, 5, 51, 1, 1), InPrompt(4, 5, 0),
                                         Decoding(5, 5, 3, 1, 1), Decoding(6, 5, 90, 1, 1)});
  snapshot.running[3].max_drafts = 0;
  snapshot.running[5].rounds_in_flight = 2;  // may have used up its room
  snapshot.running[6].ended = true;
  const StepPlan plan = PlanStep(snapshot);
  EXPECT_THAT(Of(plan.verify), ElementsAre(Pair{0, 15}, Pair{1, 3}, Pair{2, 0}, Pair{3, 0}));
  EXPECT_THAT(Of(plan.prefill), ElementsAre(Pair{4, 5}));
  EXPECT_EQ(plan.block.rows, 16);
}

TEST(PlanStepTest, EmittedTokensAreFedAgainInBlocks) {
  // 40 emitted: 39 to feed, 16 of them are through.
  SchedulerSnapshot snapshot = Snapshot({Decoding(0, 70, 100, 40, 2), Decoding(1, 10, 100, 40, 1)});
  snapshot.running[0].stored = 70 + 16;
  snapshot.running[1].stored = 10 + 32;
  const StepPlan plan = PlanStep(snapshot);
  EXPECT_THAT(Of(plan.refeed), ElementsAre(Pair{0, 16}, Pair{1, 7}));
  EXPECT_THAT(plan.verify, IsEmpty());
  EXPECT_TRUE(plan.needs_results());
}

TEST(PlanStepTest, BlocksGetShorterWhenTogetherTheyAreTooLong) {
  std::vector<RunningSequence> running;
  for (int64_t i = 0; i < 6; ++i) running.push_back(Decoding(i, 5, 100, 1, 1));
  running[5].max_drafts = 0;
  running[4].max_drafts = 3;
  SchedulerSnapshot snapshot = Snapshot(running);
  snapshot.max_verify_rows = 41;  // 8 for each of five, 1 for the plain one
  StepPlan plan = PlanStep(snapshot);
  EXPECT_EQ(plan.block.rows, 8);
  EXPECT_THAT(Of(plan.verify),
              ElementsAre(Pair{0, 7}, Pair{1, 7}, Pair{2, 7}, Pair{3, 7}, Pair{4, 3}, Pair{5, 0}));
  snapshot.max_verify_rows = 4;
  plan = PlanStep(snapshot);
  EXPECT_EQ(plan.block.rows, 1);
  EXPECT_THAT(Of(plan.verify),
              ElementsAre(Pair{0, 0}, Pair{1, 0}, Pair{2, 0}, Pair{3, 0}, Pair{4, 0}, Pair{5, 0}));
  snapshot.max_verify_rows = 0;
  EXPECT_EQ(PlanStep(snapshot).block.rows, 16);
  snapshot.max_verify_rows = 1000;
  EXPECT_EQ(PlanStep(snapshot).block.rows, 16);
}

// The length is chosen by what rounds cost, within the limit and what requests allow.
TEST(PlanStepTest, BlocksHaveTheLengthThatPays) {
  SchedulerSnapshot snapshot = Snapshot({Decoding(0, 5, 100, 1, 1), Decoding(1, 5, 100, 1, 1)});
  snapshot.running[1].request.max_tokens = 3;  // one draft more
  BlockStatistics blocks;
  for (int i = 0; i < 3000; ++i) blocks.survival.Observe(15, 2);
  blocks.costs.Observe(16, 2, 4.0);
  blocks.costs.Observe(8, 2, 3.0);
  blocks.costs.Observe(4, 2, 1.0);
  blocks.costs.Observe(1, 2, 0.9);
  snapshot.blocks = &blocks;
  StepPlan plan = PlanStep(snapshot);
  EXPECT_EQ(plan.block.rows, 4);
  EXPECT_EQ(plan.block.reason, BlockReason::kBest);
  EXPECT_THAT(Of(plan.verify), ElementsAre(Pair{0, 3}, Pair{1, 1}));
  // One request wants whole blocks; the others keep to what pays.
  snapshot.running.push_back(Decoding(2, 5, 100, 1, 1));
  snapshot.running[2].whole_blocks = true;
  blocks.costs.Observe(16, 3, 6.0);
  blocks.costs.Observe(4, 3, 1.5);
  plan = PlanStep(snapshot);
  EXPECT_EQ(plan.block.rows, 16);
  EXPECT_EQ(plan.block.reason, BlockReason::kAsked);
  EXPECT_THAT(Of(plan.verify), ElementsAre(Pair{0, 3}, Pair{1, 1}, Pair{2, 15}));
  snapshot.running.pop_back();
  snapshot.max_verify_rows = 2;
  plan = PlanStep(snapshot);
  EXPECT_EQ(plan.block.reason, BlockReason::kRowLimit);
  EXPECT_THAT(Of(plan.verify), ElementsAre(Pair{0, 0}, Pair{1, 0}));
}

// Two rounds in flight and the next one may store 48 tokens more than the host knows of.
TEST(PlanStepTest, PagesCoverTheRoundsInFlight) {
  SchedulerSnapshot snapshot = Snapshot({Decoding(0, 20, 1000, 1, 1)});
  EXPECT_THAT(Of(PlanStep(snapshot).reserve), IsEmpty());  // 20 + 16 fit into its page
  snapshot.running[0].rounds_in_flight = 2;
  EXPECT_THAT(Of(PlanStep(snapshot).reserve), ElementsAre(Pair{0, 68}));
  snapshot.running[0].request.max_tokens = 45;  // it never stores more than 64 tokens
  EXPECT_THAT(Of(PlanStep(snapshot).reserve), IsEmpty());
}

TEST(PlanStepTest, PagesRunOutAndTheLeastImportantGivesItsOwnBack) {
  // The first needs a second page, the second and third need none.
  SchedulerSnapshot snapshot =
      Snapshot({Decoding(0, 60, 1000, 1, 1), Decoding(1, 20, 1000, 5, 1), Decoding(2, 20, 1000, 5, 1)},
               /*free_pages=*/0);
  StepPlan plan = PlanStep(snapshot);
  EXPECT_THAT(plan.preempt, ElementsAre(2));
  EXPECT_THAT(Of(plan.reserve), ElementsAre(Pair{0, 76}));
  EXPECT_THAT(Of(plan.verify), ElementsAre(Pair{0, 15}, Pair{1, 15}));
  EXPECT_TRUE(plan.needs_results());
  snapshot.running[1].request.priority = -1;
  EXPECT_THAT(PlanStep(snapshot).preempt, ElementsAre(1));
  snapshot.running[1].request.overtaken = kMaxOvertaken;
  EXPECT_THAT(PlanStep(snapshot).preempt, ElementsAre(2));
  snapshot.free_pages = 1;
  EXPECT_THAT(PlanStep(snapshot).preempt, IsEmpty());
  // Nobody less important: the last one pauses and keeps its page.
  snapshot = Snapshot({Decoding(0, 20, 1000, 5, 1), Decoding(1, 60, 1000, 1, 1)}, 0);
  plan = PlanStep(snapshot);
  EXPECT_THAT(plan.preempt, IsEmpty());
  EXPECT_THAT(Of(plan.verify), ElementsAre(Pair{0, 15}));
}

TEST(PlanStepTest, APromptRunsAsFarAsItsPagesReach) {
  SchedulerSnapshot snapshot = Snapshot({InPrompt(0, 300, 64, 1)}, /*free_pages=*/1);
  EXPECT_THAT(Of(PlanStep(snapshot).prefill), ElementsAre(Pair{0, 64}));
  snapshot.free_pages = 0;
  EXPECT_THAT(Of(PlanStep(snapshot).prefill), IsEmpty());
  // It takes what a less important one holds, and all of it if need be; sequences without pages keep their
  // slot.
  snapshot = Snapshot({InPrompt(0, 300, 64, 1), Decoding(1, 20, 100, 1, 1), InPrompt(2, 300, 0)}, 0);
  StepPlan plan = PlanStep(snapshot);
  EXPECT_THAT(plan.preempt, ElementsAre(1));
  EXPECT_THAT(Of(plan.prefill), ElementsAre(Pair{0, 64}));
  // The short one goes first, but there is no page for it: then the most important one runs.
  snapshot = Snapshot({InPrompt(0, 300, 64, 2), InPrompt(1, 64, 0)}, 0);
  EXPECT_THAT(Of(PlanStep(snapshot).prefill), ElementsAre(Pair{0, 64}));
}

// A model of the engine that knows nothing but plans: whatever arrives, every request comes to its end, no
// page is given twice, and the most important one moves on in every step.
TEST(SchedulerTest, EverythingComesToItsEnd) {
  constexpr int64_t kPages = 12, kSlots = 5;
  int64_t most_preemptions = 0;
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    SchedulerSnapshot now = Snapshot({}, kPages);
    now.free_slots = kSlots;
    now.max_verify_rows = seed % 3 == 0 ? 20 : 0;
    int64_t arrivals = 0, ended = 0, preemptions = 0;
    constexpr int64_t kRequests = 40;
    for (int step = 0; ended < kRequests; ++step) {
      ASSERT_LT(step, 20000);
      if (arrivals < kRequests && random() % 4 == 0) {
        ScheduledRequest request = Request(arrivals++, 1 + static_cast<int64_t>(random() % 400),
                                           1 + static_cast<int64_t>(random() % 300));
        request.client = std::to_string(random() % 3);
        request.priority = static_cast<int32_t>(random() % 3);
        now.waiting.push_back({.request = request});
      }
      const std::vector<int64_t> admitted = PlanAdmission(now);
      std::vector<char> gone(now.waiting.size(), 0);
      for (int64_t index : admitted) {
        WaitingRequest& chosen = now.waiting[static_cast<size_t>(index)];
        now.running.push_back({.request = chosen.request, .max_drafts = 15});
        --now.free_slots;
        gone[static_cast<size_t>(index)] = 1;
        for (size_t i = 0; i < now.waiting.size(); ++i) {
          if (!gone[i] && now.waiting[i].request.arrival < chosen.request.arrival)
            ++now.waiting[i].request.overtaken;
        }
      }
      std::vector<WaitingRequest> still;
      for (size_t i = 0; i < gone.size(); ++i) {
        if (!gone[i]) still.push_back(now.waiting[i]);
      }
      now.waiting = still;
      if (now.running.empty()) continue;

      const StepPlan plan = PlanStep(now);
      ASSERT_FALSE(plan.empty());
      std::vector<char> preempted(now.running.size(), 0);
      for (int64_t index : plan.preempt) {
        RunningSequence& victim = now.running[static_cast<size_t>(index)];
        preempted[static_cast<size_t>(index)] = 1;
        now.free_pages += victim.pages;
        ++preemptions;
      }
      for (const StepPlan::Reserve& reserve : plan.reserve) {
        RunningSequence& sequence = now.running[static_cast<size_t>(reserve.sequence)];
        const int64_t pages = (reserve.tokens + 63) / 64;
        ASSERT_GT(pages, sequence.pages);
        now.free_pages -= pages - sequence.pages;
        sequence.pages = sequence.released_pages = pages;
      }
      ASSERT_GE(now.free_pages, 0);
      int64_t prefill_rows = 0, verify_rows = 0;
      std::vector<char> moved(now.running.size(), 0);
      const auto move = [&](int64_t index) -> RunningSequence& {
        EXPECT_FALSE(preempted[static_cast<size_t>(index)] || moved[static_cast<size_t>(index)]);
        moved[static_cast<size_t>(index)] = 1;
        return now.running[static_cast<size_t>(index)];
      };
      for (RunningSequence& sequence : now.running) ++sequence.paused_steps;
      for (const StepPlan::Rows& rows : plan.prefill) {
        RunningSequence& sequence = move(rows.sequence);
        ASSERT_EQ(sequence.stored % 64, 0);
        sequence.stored += rows.rows;
        sequence.paused_steps = 0;
        prefill_rows += rows.rows;
        ASSERT_LE(sequence.stored, sequence.request.prompt_tokens);
        ASSERT_LE(sequence.stored, sequence.pages * 64);
        if (sequence.stored == sequence.request.prompt_tokens && sequence.request.emitted_tokens == 0)
          sequence.request.emitted_tokens = 1;
      }
      for (const StepPlan::Rows& rows : plan.refeed) {
        RunningSequence& sequence = move(rows.sequence);
        sequence.stored += rows.rows;
        ASSERT_LE(rows.rows, 16);
        ASSERT_LE(sequence.stored, sequence.pages * 64);
      }
      for (const StepPlan::Verify& member : plan.verify) {
        RunningSequence& sequence = move(member.sequence);
        ASSERT_LT(member.max_drafts, plan.block.rows);
        verify_rows += 1 + member.max_drafts;
        const int64_t emitted =
            1 + static_cast<int64_t>(random() % static_cast<uint32_t>(member.max_drafts + 1));
        sequence.request.emitted_tokens += emitted;
        sequence.stored += emitted;
        ASSERT_LE(sequence.request.emitted_tokens, sequence.request.max_tokens);
        ASSERT_LE(sequence.stored, sequence.pages * 64);
      }
      ASSERT_LE(prefill_rows, now.max_prefill_rows);
      ASSERT_LE(verify_rows, now.max_verify_rows > 0 ? now.max_verify_rows : kSlots * 16);
      // The most important one that is past its prompt has always moved.
      size_t first = 0;
      const auto importance = [](const ScheduledRequest& request) {
        return std::tuple(request.overtaken < kMaxOvertaken, -request.priority, request.arrival);
      };
      for (size_t i = 1; i < now.running.size(); ++i) {
        if (importance(now.running[i].request) < importance(now.running[first].request)) first = i;
      }
      const bool in_prompt = now.running[first].stored < now.running[first].request.prompt_tokens;
      EXPECT_TRUE(in_prompt || moved[first]);
      std::vector<RunningSequence> kept;
      for (size_t i = 0; i < now.running.size(); ++i) {
        RunningSequence& sequence = now.running[i];
        const bool over = sequence.request.emitted_tokens == sequence.request.max_tokens;
        if (!over && !preempted[i]) {
          kept.push_back(sequence);
          continue;
        }
        ++now.free_slots;
        if (over) now.free_pages += sequence.pages;
        if (over) ++ended;
        if (!over) now.waiting.push_back({.request = sequence.request});
      }
      now.running = kept;
    }
    EXPECT_EQ(now.free_pages, kPages);
    EXPECT_EQ(now.free_slots, kSlots);
    most_preemptions = std::max(most_preemptions, preemptions);
  }
  EXPECT_GT(most_preemptions, 0);
}

}  // namespace
}  // namespace dflash
