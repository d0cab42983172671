// A drafter proposes tokens that the target then verifies. DFlash is one; others may follow behind the same
// interface.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/matrix_view.h"
#include "base/phase.h"
#include "kernels/batch/segments.h"
#include "kernels/round/round.h"

namespace dflash {

// What a drafter proposes, device memory, [sequences, depth].
struct Proposals {
  int64_t depth = 0;          // tokens wanted of every sequence, [1, max_drafts()]
  int32_t* tokens = nullptr;  // the best candidate per depth; -1, if any, ends a proposal
  // The probability that the drafter gives each of them, in [0, 1]. Null: nobody wants to know. A drafter
  // that has no probabilities leaves them as they are.
  float* confidences = nullptr;
};

class Drafter {
 public:
  virtual ~Drafter() = default;

  // Depth of a full proposal, e.g. block size - 1.
  virtual int64_t max_drafts() const = 0;

  // Tapped rows of one sequence that the target has committed, in position order.
  struct CommittedRows {
    int32_t slot = 0;
    Phase phase = Phase::kPrefill;
    int64_t first_row = 0;  // in taps
    int64_t row_count = 0;
    int64_t start_position = 0;  // = end of the slot's context
  };
  // Extends the context of each sequence by its committed rows; also while speculation is off, or the way
  // back is silently broken. Advances SequenceTable's draft_context_end. taps: activation dtype [T, taps *
  // D]. Errors: InvalidArgument when rows do not continue the context or shapes disagree.
  virtual absl::Status Ingest(ConstMatrixView taps, const std::vector<CommittedRows>& rows) = 0;

  // The same for the rows of a verification that a decode round has committed, the first row_counts[i] of
  // segment i; all in device memory. Advances the lengths on the device.
  virtual absl::Status IngestVerified(ConstMatrixView taps, SegmentList segments,
                                      const int32_t* row_counts) = 0;

  // Proposes tokens for the positions after the anchor of every listed slot, in one pass for all of them. How
  // many are wanted changes none of them (but what a backend's arithmetic makes of other numbers of rows: on
  // the CPU nothing). InvalidArgument: more sequences than it was made for, or a depth out of range. What it
  // writes for a sequence that has ended means nothing. slots: int32 [count], device memory.
  virtual absl::Status Propose(DecodeStates states, const int32_t* slots, int64_t count,
                               const Proposals& proposals) = 0;

  // Whether IngestVerified and Propose only enqueue work, so that a round may be captured.
  virtual bool is_capturable() const { return true; }

  // Starts a new sequence in a slot; its context begins (empty) at position `start`.
  virtual absl::Status Open(int32_t slot, int64_t start) = 0;
};

}  // namespace dflash
