#include "worker/cache/sequence_table.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"

namespace dflash {

absl::StatusOr<SequenceTable::SlotArray> SequenceTable::SlotArray::Create(int64_t slots,
                                                                          const Stream& stream) {
  SlotArray array;
  array.host_.assign(static_cast<size_t>(slots), 0);
  DFLASH_ASSIGN_OR_RETURN(array.device_, Buffer::Allocate(slots * int64_t{sizeof(int32_t)}, stream));
  return array;
}

absl::Status SequenceTable::SlotArray::Set(int32_t slot, int32_t value, const Stream& stream) {
  host_[static_cast<size_t>(slot)] = value;
  return CopyToDevice(device_.As<int32_t>() + slot, &value, sizeof(value), stream);
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
  for (int64_t page = options.pages - 1; page >= 0; --page)
    table.free_pages_.push_back(static_cast<int32_t>(page));
  table.lengths_.resize(static_cast<size_t>(options.slots));
  table.pages_of_.resize(static_cast<size_t>(options.slots));
  const std::vector<int32_t> none(static_cast<size_t>(options.slots * table.pages_per_slot_), -1);
  const auto bytes = static_cast<int64_t>(none.size() * sizeof(int32_t));
  DFLASH_ASSIGN_OR_RETURN(table.page_table_, Buffer::Allocate(bytes, stream));
  DFLASH_RETURN_IF_ERROR(CopyToDevice(table.page_table_.data(), none.data(), bytes, stream));
  DFLASH_ASSIGN_OR_RETURN(table.pending_buffer_, SlotArray::Create(options.slots, stream));
  DFLASH_ASSIGN_OR_RETURN(table.pending_count_, SlotArray::Create(options.slots, stream));
  DFLASH_ASSIGN_OR_RETURN(table.context_start_, SlotArray::Create(options.slots, stream));
  return table;
}

absl::StatusOr<int32_t> SequenceTable::Open() {
  if (free_slots_.empty()) return absl::ResourceExhaustedError("no free state slot");
  const int32_t slot = free_slots_.back();
  free_slots_.pop_back();
  lengths_[static_cast<size_t>(slot)] = {};
  DFLASH_RETURN_IF_ERROR(pending_count_.Set(slot, 0, *stream_));
  DFLASH_RETURN_IF_ERROR(context_start_.Set(slot, 0, *stream_));
  return slot;
}

absl::Status SequenceTable::Reserve(int32_t slot, int64_t tokens) {
  if (tokens > options_.max_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("a sequence of ", tokens, " tokens exceeds the limit of ", options_.max_tokens));
  }
  std::vector<int32_t>& pages = pages_of_[static_cast<size_t>(slot)];
  const int64_t needed = (tokens + kPageTokens - 1) / kPageTokens - static_cast<int64_t>(pages.size());
  if (needed <= 0) return absl::OkStatus();
  if (needed > free_pages()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("needs ", needed, " more pages, ", free_pages(), " are free"));
  }
  const int64_t first = static_cast<int64_t>(pages.size());
  for (int64_t i = 0; i < needed; ++i) {
    pages.push_back(free_pages_.back());
    free_pages_.pop_back();
  }
  return CopyToDevice(page_table_.As<int32_t>() + slot * pages_per_slot_ + first, pages.data() + first,
                      needed * int64_t{sizeof(int32_t)}, *stream_);
}

absl::Status SequenceTable::Close(int32_t slot) {
  std::vector<int32_t>& pages = pages_of_[static_cast<size_t>(slot)];
  DFLASH_CHECK(std::find(free_slots_.begin(), free_slots_.end(), slot) == free_slots_.end(),
               "slot closed twice");
  const std::vector<int32_t> none(pages.size(), -1);
  DFLASH_RETURN_IF_ERROR(CopyToDevice(page_table_.As<int32_t>() + slot * pages_per_slot_, none.data(),
                                      static_cast<int64_t>(none.size() * sizeof(int32_t)), *stream_));
  free_pages_.insert(free_pages_.end(), pages.rbegin(), pages.rend());
  pages.clear();
  lengths_[static_cast<size_t>(slot)] = {};
  free_slots_.push_back(slot);
  return absl::OkStatus();
}

absl::Status SequenceTable::CheckLengths(int32_t slot, int64_t anchor_position,
                                         int64_t draft_context_end) const {
  const SequenceLengths& lengths = lengths_[static_cast<size_t>(slot)];
  if (lengths.target_kv == anchor_position && lengths.gdn_folded + lengths.gdn_pending == anchor_position &&
      draft_context_end == anchor_position) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat("stores of a sequence disagree: anchor at ", anchor_position,
                                          ", target_kv ", lengths.target_kv, ", gdn ", lengths.gdn_folded,
                                          " + ", lengths.gdn_pending, ", draft context ends at ",
                                          lengths.draft_context_end));
}

absl::Status SequenceTable::SetPending(int32_t slot, int64_t accepted) {
  DFLASH_RETURN_IF_ERROR(pending_buffer_.Set(slot, 1 - pending_buffer_.host(slot), *stream_));
  return pending_count_.Set(slot, static_cast<int32_t>(accepted), *stream_);
}

absl::Status SequenceTable::SetDraftContextStart(int32_t slot, int64_t start) {
  lengths_[static_cast<size_t>(slot)].draft_context_start = start;
  return context_start_.Set(slot, static_cast<int32_t>(start), *stream_);
}

PageTable SequenceTable::page_table() const {
  return {.pages = page_table_.As<int32_t>(), .slots = options_.slots, .pages_per_slot = pages_per_slot_};
}

PendingRecords SequenceTable::pending() const {
  return {.buffer = pending_buffer_.device(), .count = pending_count_.device()};
}

const int32_t* SequenceTable::context_starts() const { return context_start_.device(); }

}  // namespace dflash
