// What one step makes every rank do: its control flow, decided on rank 0 and carried out by the others as it
// is written. Nothing in it depends on data of the step itself: the drafts' tokens and the accepted counts
// follow in-stream, through the Communicator (docs/adr, "One decider").
#pragma once

#include <cstdint>
#include <vector>

#include "base/phase.h"
#include "kernels/sampling/sampling.h"
#include "worker/cache/state_checkpoint.h"

namespace dflash {

struct RankPlan {
  // What became of slots since the last plan, in order. Every rank has the same slots and gets the same
  // numbers by the same changes; pages are named, since only rank 0 knows which are free.
  struct SlotChange {
    enum class Kind : uint8_t { kOpen, kGrow, kClose };
    Kind kind = Kind::kOpen;
    int32_t slot = 0;
    std::vector<int32_t> pages;  // GROW: behind those that the slot has
    SamplingParams sampling;     // OPEN
    StateCheckpoint begin = {};  // OPEN: the states that it begins with; position 0: nothing is there
  };
  // The rows of one sequence.
  struct Rows {
    int32_t slot = 0;
    Phase phase = Phase::kPrefill;
    // Known rows: those of a prompt, and VERIFY rows of a resumed request, whose emitted tokens are fed again
    // and all committed. The others are the running round's business: no tokens, position 0.
    int64_t start_position = 0;
    int64_t count = 0;            // known rows: how many. Others: the most that the round may use
    std::vector<int32_t> tokens;  // `count` of known rows
    bool last_logits = false;     // PREFILL
    std::vector<StateCheckpoint> checkpoints = {};  // PREFILL: to be kept on the way
    // Of rows whose logits are sampled: rules, which are broadcast, and log probabilities (RowProcessing).
    bool has_rules = false;
    int32_t log_probs = 0;
    int32_t prompt_log_probs = 0;  // PREFILL: of the tokens behind the rows (SequenceRows::log_probs)
    int32_t next_token = -1;       // likewise

    bool known() const { return !tokens.empty(); }
  };

  uint64_t number = 0;  // 1, 2, ...
  uint64_t hash = 0;    // ChainHash(hash of the plan before, this)
  std::vector<SlotChange> slots;
  int64_t draft_sequences = 0;  // for which the drafter proposes before the forward
  int64_t block_rows =
      0;  // no sequence of the round gets more rows; 0: a whole block (DecodeRounds::Enqueue)
  std::vector<Rows> rows;  // in the order of the batch, known ones first; may be empty in the last plan
};

// Of everything in the plan but `hash`, and of all plans before it (previous = 0 for the first).
uint64_t ChainHash(uint64_t previous, const RankPlan& plan);

}  // namespace dflash
