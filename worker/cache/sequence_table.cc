#include "worker/cache/sequence_table.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"

namespace dflash {

absl::Status SequenceTable::SetOnDevice(SlotArray array, int32_t slot, int64_t value) {
  const auto narrow = static_cast<int32_t>(value);
  return CopyToDevice(DeviceArray(array) + slot, &narrow, sizeof(narrow), *stream_);
}

absl::StatusOr<SequenceTable> SequenceTable::Create(const Options& options, const Stream& stream) {
  if (options.slots < 1 || options.pages < 1 || options.max_tokens < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("sequence table needs at least one slot, page and token, got ", options.slots, ", ",
                     options.pages, ", ", options.max_tokens));
  }
  SequenceTable table;
  table.options_ = options;
  table.stream_ = &stream;
  table.pages_per_slot_ = (options.max_tokens + kPageTokens - 1) / kPageTokens;
  // Handed out from the back: the lowest number first.
  for (int64_t slot = options.slots - 1; slot >= 0; --slot)
    table.free_slots_.push_back(static_cast<int32_t>(slot));
  for (int64_t page = 0; page < options.pages; ++page)
    table.free_pages_.insert(table.free_pages_.end(), static_cast<int32_t>(page));
  table.references_.resize(static_cast<size_t>(options.pages));
  table.lengths_.resize(static_cast<size_t>(options.slots));
  table.pages_of_.resize(static_cast<size_t>(options.slots));
  const std::vector<int32_t> none(static_cast<size_t>(options.slots * table.pages_per_slot_), -1);
  const auto bytes = static_cast<int64_t>(none.size() * sizeof(int32_t));
  DFLASH_ASSIGN_OR_RETURN(table.page_table_, Buffer::Allocate(bytes, stream));
  DFLASH_RETURN_IF_ERROR(CopyToDevice(table.page_table_.data(), none.data(), bytes, stream));
  DFLASH_ASSIGN_OR_RETURN(table.slot_arrays_, Buffer::Allocate(static_cast<int64_t>(SlotArray::kCount) *
                                                                   options.slots * int64_t{sizeof(int32_t)},
                                                               stream));
  return table;
}

absl::StatusOr<int32_t> SequenceTable::Open() {
  if (free_slots_.empty()) return absl::ResourceExhaustedError("no free state slot");
  const int32_t slot = free_slots_.back();
  free_slots_.pop_back();
  lengths_[static_cast<size_t>(slot)] = {};
  for (SlotArray array : {SlotArray::kTargetKv, SlotArray::kGdnFolded, SlotArray::kGdnPending,
                          SlotArray::kDraftContextEnd, SlotArray::kDraftContextStart}) {
    DFLASH_RETURN_IF_ERROR(SetOnDevice(array, slot, 0));
  }
  return slot;
}

absl::Status SequenceTable::Reserve(int32_t slot, int64_t tokens) {
  if (tokens > options_.max_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("a sequence of ", tokens, " tokens exceeds the limit of ", options_.max_tokens));
  }
  const int64_t needed =
      (tokens + kPageTokens - 1) / kPageTokens - static_cast<int64_t>(pages_of(slot).size());
  if (needed <= 0) return absl::OkStatus();
  if (needed > free_pages()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("needs ", needed, " more pages, ", free_pages(), " are free"));
  }
  const std::vector<int32_t> fresh(free_pages_.begin(), std::next(free_pages_.begin(), needed));
  return Append(slot, fresh);
}

absl::Status SequenceTable::Append(int32_t slot, const std::vector<int32_t>& pages) {
  std::vector<int32_t>& held = pages_of_[static_cast<size_t>(slot)];
  const auto first = static_cast<int64_t>(held.size());
  if (first + static_cast<int64_t>(pages.size()) > pages_per_slot_) {
    return absl::InvalidArgumentError(absl::StrCat("slot ", slot, " cannot have ", pages.size(),
                                                   " pages more than its ", first, "; at most ",
                                                   pages_per_slot_, " in all"));
  }
  for (int32_t page : pages) {
    if (page < 0 || page >= options_.pages)
      return absl::InvalidArgumentError(absl::StrCat("page ", page, " of ", options_.pages));
  }
  for (int32_t page : pages) {
    Retain(page);
    held.push_back(page);
  }
  return UploadPages(slot, first);
}

absl::Status SequenceTable::UploadPages(int32_t slot, int64_t first) const {
  const std::vector<int32_t>& pages = pages_of(slot);
  const int64_t count = static_cast<int64_t>(pages.size()) - first;
  if (count == 0) return absl::OkStatus();
  return CopyToDevice(page_table_.As<int32_t>() + slot * pages_per_slot_ + first, pages.data() + first,
                      count * int64_t{sizeof(int32_t)}, *stream_);
}

absl::Status SequenceTable::Close(int32_t slot) {
  std::vector<int32_t>& pages = pages_of_[static_cast<size_t>(slot)];
  DFLASH_CHECK(std::find(free_slots_.begin(), free_slots_.end(), slot) == free_slots_.end(),
               "slot closed twice");
  const std::vector<int32_t> held = std::exchange(pages, std::vector<int32_t>(pages.size(), -1));
  DFLASH_RETURN_IF_ERROR(UploadPages(slot, 0));
  pages.clear();
  for (int32_t page : held) Release(page);
  lengths_[static_cast<size_t>(slot)] = {};
  free_slots_.push_back(slot);
  return absl::OkStatus();
}

void SequenceTable::Retain(int32_t page) {
  if (references_[static_cast<size_t>(page)]++ == 0) free_pages_.erase(page);
}

void SequenceTable::Release(int32_t page) {
  DFLASH_CHECK(references_[static_cast<size_t>(page)] > 0, "a free page was released");
  if (--references_[static_cast<size_t>(page)] == 0) free_pages_.insert(page);
}

absl::Status SequenceTable::CheckLengths(int32_t slot, int64_t anchor_position, bool has_drafter) const {
  const SequenceLengths& lengths = lengths_[static_cast<size_t>(slot)];
  if (lengths.target_kv == anchor_position && lengths.gdn_folded + lengths.gdn_pending == anchor_position &&
      (!has_drafter || lengths.draft_context_end == anchor_position)) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat("stores of a sequence disagree: anchor at ", anchor_position,
                                          ", target_kv ", lengths.target_kv, ", gdn ", lengths.gdn_folded,
                                          " + ", lengths.gdn_pending, ", draft context ends at ",
                                          lengths.draft_context_end));
}

absl::Status SequenceTable::AdvancePrompt(int32_t slot, int64_t rows) {
  SequenceLengths& lengths = lengths_[static_cast<size_t>(slot)];
  lengths.target_kv += rows;
  lengths.gdn_folded += rows;
  DFLASH_RETURN_IF_ERROR(SetOnDevice(SlotArray::kTargetKv, slot, lengths.target_kv));
  return SetOnDevice(SlotArray::kGdnFolded, slot, lengths.gdn_folded);
}

absl::Status SequenceTable::AdvanceDraftContext(int32_t slot, int64_t rows) {
  SequenceLengths& lengths = lengths_[static_cast<size_t>(slot)];
  lengths.draft_context_end += rows;
  return SetOnDevice(SlotArray::kDraftContextEnd, slot, lengths.draft_context_end);
}

absl::Status SequenceTable::SetFolded(int32_t slot) {
  SequenceLengths& lengths = lengths_[static_cast<size_t>(slot)];
  lengths.gdn_folded += std::exchange(lengths.gdn_pending, 0);
  DFLASH_RETURN_IF_ERROR(SetOnDevice(SlotArray::kGdnFolded, slot, lengths.gdn_folded));
  return SetOnDevice(SlotArray::kGdnPending, slot, 0);
}

absl::Status SequenceTable::OpenDraftContext(int32_t slot, int64_t start) {
  lengths_[static_cast<size_t>(slot)].draft_context_end = start;
  DFLASH_RETURN_IF_ERROR(SetOnDevice(SlotArray::kDraftContextEnd, slot, start));
  return SetDraftContextStart(slot, start);
}

absl::Status SequenceTable::SetDraftContextStart(int32_t slot, int64_t start) {
  lengths_[static_cast<size_t>(slot)].draft_context_start = start;
  return SetOnDevice(SlotArray::kDraftContextStart, slot, start);
}

int64_t SequenceTable::LengthsBytes() const { return slot_arrays_.bytes(); }

absl::Status SequenceTable::CopyLengths(const PinnedBuffer& to) const {
  return CopyToPinned(to, slot_arrays_.data(), LengthsBytes(), *stream_);
}

void SequenceTable::TakeLengths(const PinnedBuffer& from, int32_t slot) {
  const auto of = [&](SlotArray array) {
    return from.As<int32_t>()[static_cast<int64_t>(array) * options_.slots + slot];
  };
  SequenceLengths& lengths = lengths_[static_cast<size_t>(slot)];
  lengths.target_kv = of(SlotArray::kTargetKv);
  lengths.gdn_folded = of(SlotArray::kGdnFolded);
  lengths.gdn_pending = of(SlotArray::kGdnPending);
  lengths.draft_context_end = of(SlotArray::kDraftContextEnd);
}

SlotLengths SequenceTable::device_lengths() const {
  return {.target_kv = DeviceArray(SlotArray::kTargetKv),
          .gdn_folded = DeviceArray(SlotArray::kGdnFolded),
          .gdn_pending = DeviceArray(SlotArray::kGdnPending),
          .pending_buffer = DeviceArray(SlotArray::kPendingBuffer),
          .draft_context_end = DeviceArray(SlotArray::kDraftContextEnd),
          .slots = options_.slots};
}

PageTable SequenceTable::page_table() const {
  return {.pages = page_table_.As<int32_t>(), .slots = options_.slots, .pages_per_slot = pages_per_slot_};
}

PendingRecords SequenceTable::pending() const {
  return {.buffer = DeviceArray(SlotArray::kPendingBuffer), .count = DeviceArray(SlotArray::kGdnPending)};
}

const int32_t* SequenceTable::context_starts() const { return DeviceArray(SlotArray::kDraftContextStart); }

}  // namespace dflash
