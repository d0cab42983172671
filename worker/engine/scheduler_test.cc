#include "worker/engine/scheduler.h"

#include "gtest/gtest.h"

namespace dflash {
namespace {

SchedulerSnapshot Snapshot(std::vector<ScheduledSequence> sequences) {
  return {.sequences = std::move(sequences),
          .waiting_pages = {},
          .free_slots = 0,
          .free_pages = 0,
          .max_prefill_rows = 128};
}

TEST(PlanAdmissionTest, StopsAtTheFirstRequestThatDoesNotFit) {
  SchedulerSnapshot snapshot = Snapshot({});
  snapshot.waiting_pages = {3, 9, 1};
  snapshot.free_slots = 3;
  snapshot.free_pages = 10;
  EXPECT_EQ(PlanAdmission(snapshot), 1);
  snapshot.free_pages = 13;
  EXPECT_EQ(PlanAdmission(snapshot), 3);
  snapshot.free_slots = 2;
  EXPECT_EQ(PlanAdmission(snapshot), 2);
  snapshot.waiting_pages = {};
  EXPECT_EQ(PlanAdmission(snapshot), 0);
}

TEST(PlanStepTest, ChunksEndOnTheGridOrAtThePromptsEnd) {
  const StepPlan plan =
      PlanStep(Snapshot({{.prompt_tokens = 100, .prefilled = 64, .room = 9, .max_drafts = 15},
                         {.prompt_tokens = 300, .prefilled = 0, .room = 9, .max_drafts = 15},
                         {.prompt_tokens = 20, .prefilled = 0, .room = 9, .max_drafts = 15}}));
  ASSERT_EQ(plan.prefill.size(), 3u);
  EXPECT_EQ(plan.prefill[0].rows, 36);  // the rest of the first prompt
  EXPECT_EQ(plan.prefill[1].rows, 64);  // 92 rows are left: one grid cell
  EXPECT_EQ(plan.prefill[2].rows, 20);  // 28 rows are left
  EXPECT_TRUE(plan.verify.empty());
}

TEST(PlanStepTest, DecodingSequencesVerifyWithinTheirRoom) {
  const StepPlan plan =
      PlanStep(Snapshot({{.prompt_tokens = 5, .prefilled = 5, .room = 100, .max_drafts = 15},
                         {.prompt_tokens = 5, .prefilled = 5, .room = 4, .max_drafts = 15},
                         {.prompt_tokens = 5, .prefilled = 5, .room = 1, .max_drafts = 15},
                         {.prompt_tokens = 5, .prefilled = 5, .room = 50, .max_drafts = 0},
                         {.prompt_tokens = 5, .prefilled = 0, .room = 50, .max_drafts = 0},
                         {.prompt_tokens = 5, .prefilled = 5, .room = 0, .max_drafts = 15}}));
  ASSERT_EQ(plan.verify.size(), 4u);
  EXPECT_EQ(plan.verify[0].max_drafts, 15);
  EXPECT_EQ(plan.verify[1].max_drafts, 3);
  EXPECT_EQ(plan.verify[2].max_drafts, 0);
  EXPECT_EQ(plan.verify[3].max_drafts, 0);
  ASSERT_EQ(plan.prefill.size(), 1u);
  EXPECT_EQ(plan.prefill[0].sequence, 4);
}

}  // namespace
}  // namespace dflash
