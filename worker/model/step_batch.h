// The rows of a step as the host describes them, checked and sorted for a forward pass. No device.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "base/phase.h"
#include "kernels/batch/segments.h"
#include "worker/cache/sequence_table.h"
#include "worker/cache/state_checkpoint.h"

namespace dflash {

// The rows of one sequence in a step: its next tokens after the committed length.
struct SequenceRows {
  int32_t slot = 0;
  Phase phase = Phase::kPrefill;
  int64_t start_position = 0;    // = committed length of the slot
  std::vector<int32_t> tokens;   // at least one
  std::vector<int32_t> parents;  // VERIFY: of the verify plan; may be empty for a chain
  bool last_logits = false;  // PREFILL: logits of the last row are wanted. VERIFY rows always yield logits
  // PREFILL: copies of the recurrent and conv states to be kept on the way, in ascending order of position;
  // inside the rows or at their end, at most kMaxCheckpoints. Rows with checkpoints start on the grid.
  std::vector<StateCheckpoint> checkpoints = {};
  // PREFILL: log probabilities of the tokens that follow the rows are wanted: one and the number of best
  // tokens beside each; 0: none. The last row's follower is next_token; -1: it is no token of the prompt.
  int32_t log_probs = 0;
  int32_t next_token = -1;
};
inline constexpr int64_t kMaxCheckpoints = 8;

struct StepBatch {
  std::vector<SequenceRows> sequences;  // a slot at most once
  int64_t vocabulary = 0;               // real token ids; where log probabilities are wanted
};

// What a batch may hold.
struct StepLimits {
  int64_t vocabulary = 0;
  int64_t prefill_rows = 0, verify_rows = 0;
  int64_t block_rows = 0;  // of one sequence in a verification
  int64_t logits_rows = 0;
  int64_t checkpoints = 0;
};

// The errors of Target::Forward that follow from batch and lengths.
absl::Status CheckBatch(const StepBatch& batch, const StepLimits& limits, const SequenceTable& table);

// The recurrent states of a slot that become a checkpoint.
struct StateCopy {
  int32_t slot = 0;
  int32_t checkpoint = 0;
};

// The sequences of one phase in a batch.
struct PhaseRows {
  std::vector<size_t> members;     // indices into StepBatch::sequences
  std::vector<Segment> segments;   // one per member; rows are numbered from 0 in the phase
  std::vector<int32_t> tokens;     // one per row
  std::vector<int32_t> logits_of;  // rows whose logits are wanted
  // PREFILL: the segments cut at their checkpoints. The recurrence goes from cut to cut, everything else over
  // whole segments.
  struct Part {
    std::vector<Segment> segments;
    std::vector<StateCopy> copies;  // after them
  };
  std::vector<Part> parts;
  std::vector<Segment> checkpoints;  // per checkpoint: the rows before it; its index is the slot
};

// Of a batch that passed CheckBatch.
PhaseRows RowsOfPhase(const StepBatch& batch, Phase phase);

}  // namespace dflash
