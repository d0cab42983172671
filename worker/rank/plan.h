// What one step makes every rank do: its control flow, decided on rank 0 and carried out by the others as it
// is written. Nothing in it depends on data of the step itself: the drafts' tokens and the accepted counts
// follow in-stream, through the Communicator (docs/adr, "One decider").
#pragma once

#include <cstdint>
#include <vector>

#include "base/phase.h"
#include "kernels/sampling/sampling.h"

namespace dflash {

struct RankPlan {
  // Slots taken and given back since the last plan, in order. Every rank has the same slots and pages, so it
  // gets the same numbers by the same changes.
  struct SlotChange {
    bool open = false;
    int32_t slot = 0;
    int64_t reserved_tokens = 0;  // of an open one: positions that have pages
    SamplingParams sampling;      // of an open one
  };
  // The rows of one sequence.
  struct Rows {
    int32_t slot = 0;
    Phase phase = Phase::kPrefill;
    int64_t start_position = 0;   // PREFILL. VERIFY: 0, positions are the running round's business
    int64_t count = 0;            // PREFILL: rows. VERIFY: the most that it may use
    std::vector<int32_t> tokens;  // PREFILL: `count` of them. VERIFY: none
    bool last_logits = false;     // PREFILL
  };

  uint64_t number = 0;  // 1, 2, ...
  uint64_t hash = 0;    // ChainHash(hash of the plan before, this)
  std::vector<SlotChange> slots;
  int64_t draft_sequences = 0;  // for which the drafter proposes before the forward
  std::vector<Rows> rows;       // in the order of the batch; may be empty in the last plan of a group
};

// Of everything in the plan but `hash`, and of all plans before it (previous = 0 for the first).
uint64_t ChainHash(uint64_t previous, const RankPlan& plan);

}  // namespace dflash
