// Decides what a step runs: a pure function of a snapshot, without clocks or threads.
#pragma once

#include <cstdint>
#include <vector>

namespace dflash {

// A sequence with a state slot, in order of admission.
struct ScheduledSequence {
  int64_t prompt_tokens = 0;
  int64_t prefilled = 0;   // prompt tokens already run; decoding once equal to prompt_tokens
  int64_t room = 0;        // most tokens it may still emit; 0: it has ended, or rounds under way may end it
  int64_t max_drafts = 0;  // 0: speculation off for this request
};

struct SchedulerSnapshot {
  std::vector<ScheduledSequence> sequences;
  std::vector<int64_t> waiting_pages;  // pages each waiting request needs to its end, in order of arrival
  int64_t free_slots = 0;
  int64_t free_pages = 0;
  int64_t max_prefill_rows = 0;  // per step, a multiple of 64
};

// How many of the waiting requests, from the front, get a slot now. First come, first served: a request that
// does not fit holds back those behind it, so that a long one is not starved by short ones.
int64_t PlanAdmission(const SchedulerSnapshot& snapshot);

struct StepPlan {
  struct Prefill {
    int64_t sequence = 0;  // index in the snapshot
    int64_t rows = 0;      // next prompt tokens; a multiple of 64 unless it is the rest of the prompt
  };
  struct Verify {
    int64_t sequence = 0;
    int64_t max_drafts = 0;  // at most this many drafts after the anchor; 0 = plain decoding
  };
  std::vector<Prefill> prefill;
  std::vector<Verify> verify;
  bool empty() const { return prefill.empty() && verify.empty(); }
};

// Every decoding sequence that has room verifies; prompts share the prefill rows in order of admission.
StepPlan PlanStep(const SchedulerSnapshot& snapshot);

}  // namespace dflash
