// A drafter proposes tokens that the target then verifies. DFlash is one; others may follow behind the same
// interface.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/matrix_view.h"
#include "base/phase.h"

namespace dflash {

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
    int64_t start_position = 0;  // = context_end(slot)
  };
  // Extends the context of each sequence by its committed rows; also while speculation is off, or the way
  // back is silently broken. taps: activation dtype [T, taps * D]. Errors: InvalidArgument when rows do not
  // continue the context or shapes disagree.
  virtual absl::Status Ingest(ConstMatrixView taps, const std::vector<CommittedRows>& rows) = 0;

  struct Anchor {
    int32_t slot = 0;
    int32_t token = 0;
    int64_t position = 0;  // = context_end(slot)
  };
  // Proposes tokens for positions anchor.position + 1, ... of every sequence, in one pass for all of them.
  // Returns one list per anchor: the best candidate per depth (at most max_drafts(), may be shorter).
  virtual absl::StatusOr<std::vector<std::vector<int32_t>>> Propose(const std::vector<Anchor>& anchors) = 0;

  // One past the last position in the slot's context.
  virtual int64_t context_end(int32_t slot) const = 0;
  // Starts a new sequence in a slot; its context begins (empty) at position `start`.
  virtual absl::Status Open(int32_t slot, int64_t start) = 0;
};

}  // namespace dflash
