// Where every sequence's state lies and how long it is: slots, pages, and the lengths that must move
// together.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/batch/segments.h"
#include "kernels/device/buffer.h"
#include "kernels/device/pinned_buffer.h"
#include "kernels/device/stream.h"
#include "kernels/gated_delta_net/gated_delta_net.h"
#include "kernels/round/round.h"

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

// Owns the slots, the page table and the lengths (host side and their copies on the device), not the pools
// themselves: target and drafter index their pools with it. Pages are counted: several slots may share the
// pages of a common prefix, and whoever wants one to stay (the prefix cache) holds a reference of its own; a
// page is free when nobody holds it. The lengths on the device are moved by the work
// of the steps; the host's follow at once for what the host itself describes, and when it reads the result of
// a round (TakeLengths). Everything done to a slot is enqueued on the stream, so it comes after the rounds
// before it. Not thread-safe: the engine's thread only.
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
  // Appends pages that the caller names to the slot's, free ones or such that others hold too; each gains a
  // reference. InvalidArgument (nothing is changed): no such page, or more than max_tokens need.
  absl::Status Append(int32_t slot, const std::vector<int32_t>& pages);
  // Gives the slot and its references of pages back.
  absl::Status Close(int32_t slot);

  const std::vector<int32_t>& pages_of(int32_t slot) const { return pages_of_[static_cast<size_t>(slot)]; }
  // References that do not belong to a slot. Release is for those only.
  void Retain(int32_t page);
  void Release(int32_t page);
  int32_t references(int32_t page) const { return references_[static_cast<size_t>(page)]; }
  bool is_free(int32_t page) const { return references(page) == 0; }

  SequenceLengths& lengths(int32_t slot) { return lengths_[static_cast<size_t>(slot)]; }
  const SequenceLengths& lengths(int32_t slot) const { return lengths_[static_cast<size_t>(slot)]; }
  // Internal (naming the lengths) when the stores of a sequence do not all end at `anchor_position`; the
  // drafter's context counts where there is a drafter.
  absl::Status CheckLengths(int32_t slot, int64_t anchor_position, bool has_drafter) const;

  // What the host itself makes of a slot, here and on the device: a prompt's next `rows` rows are in the
  // target's stores; its pending records have been folded outside a verification; `rows` rows are in the
  // drafter's context.
  absl::Status AdvancePrompt(int32_t slot, int64_t rows);
  absl::Status SetFolded(int32_t slot);
  absl::Status AdvanceDraftContext(int32_t slot, int64_t rows);
  // The drafter's context of a slot begins at `start`; with OpenDraftContext it is empty.
  absl::Status OpenDraftContext(int32_t slot, int64_t start);
  absl::Status SetDraftContextStart(int32_t slot, int64_t start);

  // Copies the device's lengths of all slots to `to` (LengthsBytes() bytes), in the order of the stream, and
  // takes those of one slot over from there once they have arrived.
  int64_t LengthsBytes() const;
  absl::Status CopyLengths(const PinnedBuffer& to) const;
  void TakeLengths(const PinnedBuffer& from, int32_t slot);

  SlotLengths device_lengths() const;
  PageTable page_table() const;           // device memory
  PendingRecords pending() const;         // device memory
  const int32_t* context_starts() const;  // device memory, per slot

  int64_t slots() const { return options_.slots; }
  int64_t pages() const { return options_.pages; }
  int64_t free_pages() const { return static_cast<int64_t>(free_pages_.size()); }
  int64_t free_slots() const { return static_cast<int64_t>(free_slots_.size()); }

 private:
  // Numbers per slot on the device: arrays of slots() int32, one behind the other.
  enum class SlotArray : uint8_t {
    kTargetKv,
    kGdnFolded,
    kGdnPending,
    kPendingBuffer,
    kDraftContextEnd,
    kDraftContextStart,
    kCount
  };
  int32_t* DeviceArray(SlotArray array) const {
    return slot_arrays_.As<int32_t>() + static_cast<int64_t>(array) * options_.slots;
  }
  absl::Status SetOnDevice(SlotArray array, int32_t slot, int64_t value);
  // Writes the slot's pages from the `first` on to the table on the device.
  absl::Status UploadPages(int32_t slot, int64_t first) const;

  Options options_;
  const Stream* stream_ = nullptr;
  int64_t pages_per_slot_ = 0;
  std::vector<int32_t> free_slots_;
  std::set<int32_t> free_pages_;
  std::vector<int32_t> references_;  // per page
  std::vector<SequenceLengths> lengths_;
  std::vector<std::vector<int32_t>> pages_of_;
  Buffer page_table_;
  Buffer slot_arrays_;
};

}  // namespace dflash
