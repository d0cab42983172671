#include "worker/engine/scheduler.h"

#include <algorithm>

#include "kernels/batch/segments.h"

namespace dflash {

int64_t PlanAdmission(const SchedulerSnapshot& snapshot) {
  int64_t admitted = 0;
  int64_t pages = snapshot.free_pages;
  for (int64_t needed : snapshot.waiting_pages) {
    if (admitted == snapshot.free_slots || needed > pages) break;
    pages -= needed;
    ++admitted;
  }
  return admitted;
}

StepPlan PlanStep(const SchedulerSnapshot& snapshot) {
  StepPlan plan;
  int64_t rows_left = snapshot.max_prefill_rows;
  for (size_t i = 0; i < snapshot.sequences.size(); ++i) {
    const ScheduledSequence& sequence = snapshot.sequences[i];
    const auto index = static_cast<int64_t>(i);
    if (sequence.room <= 0) continue;
    const int64_t remaining = sequence.prompt_tokens - sequence.prefilled;
    if (remaining == 0) {
      // The last row always emits a token of the target's own, so at most room - 1 drafts can be used.
      plan.verify.push_back(
          {.sequence = index, .max_drafts = std::min(sequence.max_drafts, sequence.room - 1)});
      continue;
    }
    // A chunk ends on the 64-token grid or at the prompt's end, so that no bit depends on how a prompt was
    // cut.
    const int64_t rows = remaining <= rows_left ? remaining : rows_left / kPageTokens * kPageTokens;
    if (rows == 0) continue;
    plan.prefill.push_back({.sequence = index, .rows = rows});
    rows_left -= rows;
  }
  return plan;
}

}  // namespace dflash
