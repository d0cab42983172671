// Where every sequence's state lies and how long it is: slots, pages, and the lengths that must move
// together.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/batch/segments.h"
#include "kernels/device/buffer.h"
#include "kernels/device/stream.h"
#include "kernels/gated_delta_net/gated_delta_net.h"

namespace dflash {

// Tokens that each store of one sequence covers. Between two steps all of them describe the same prefix:
//   target_kv == gdn_folded + gdn_pending == draft_context_end == position of the anchor
struct SequenceLengths {
  int64_t target_kv = 0;            // positions in the target's key/value pages
  int64_t gdn_folded = 0;           // tokens inside the recurrent states S
  int64_t gdn_pending = 0;          // accepted delta records not yet folded into S
  int64_t draft_context_start = 0;  // first position in the drafter's context (0 unless a prefix is missing)
  int64_t draft_context_end = 0;    // one past the last position in the drafter's context
};

// Owns the slots and the page table (host side and its copy on the device), not the pools themselves: target
// and drafter index their pools with it. Not thread-safe: the engine's thread only.
class SequenceTable {
 public:
  struct Options {
    int64_t slots = 0;       // sequences at a time, >= 1
    int64_t pages = 0;       // in every pool, >= 1
    int64_t max_tokens = 0;  // longest sequence, >= 1
  };
  // InvalidArgument: an option below 1.
  static absl::StatusOr<SequenceTable> Create(const Options& options, const Stream& stream);

  // Takes a free slot for an empty sequence. ResourceExhausted: none is free.
  absl::StatusOr<int32_t> Open();
  // Makes sure that positions [0, tokens) have pages. ResourceExhausted (nothing is taken) when too few are
  // free; InvalidArgument beyond max_tokens.
  absl::Status Reserve(int32_t slot, int64_t tokens);
  // Gives the slot and its pages back.
  absl::Status Close(int32_t slot);

  SequenceLengths& lengths(int32_t slot) { return lengths_[static_cast<size_t>(slot)]; }
  const SequenceLengths& lengths(int32_t slot) const { return lengths_[static_cast<size_t>(slot)]; }
  // Internal (naming the lengths) when the stores of a sequence do not all end at `anchor_position`;
  // `draft_context_end` is what the drafter says of its own.
  absl::Status CheckLengths(int32_t slot, int64_t anchor_position, int64_t draft_context_end) const;

  // Which delta records wait to be folded, after a commit of `accepted` rows.
  absl::Status SetPending(int32_t slot, int64_t accepted);
  absl::Status SetDraftContextStart(int32_t slot, int64_t start);

  PageTable page_table() const;           // device memory
  PendingRecords pending() const;         // device memory
  const int32_t* context_starts() const;  // device memory, per slot

  int64_t slots() const { return options_.slots; }
  int64_t pages() const { return options_.pages; }
  int64_t free_pages() const { return static_cast<int64_t>(free_pages_.size()); }
  int64_t free_slots() const { return static_cast<int64_t>(free_slots_.size()); }

 private:
  // One number per slot that the device reads.
  class SlotArray {
   public:
    static absl::StatusOr<SlotArray> Create(int64_t slots, const Stream& stream);
    absl::Status Set(int32_t slot, int32_t value, const Stream& stream);
    int32_t host(int32_t slot) const { return host_[static_cast<size_t>(slot)]; }
    const int32_t* device() const { return device_.As<int32_t>(); }

   private:
    std::vector<int32_t> host_;
    Buffer device_;
  };

  Options options_;
  const Stream* stream_ = nullptr;
  int64_t pages_per_slot_ = 0;
  std::vector<int32_t> free_slots_;
  std::vector<int32_t> free_pages_;
  std::vector<SequenceLengths> lengths_;
  std::vector<std::vector<int32_t>> pages_of_;
  Buffer page_table_;
  SlotArray pending_buffer_;
  SlotArray pending_count_;
  SlotArray context_start_;
};

}  // namespace dflash
