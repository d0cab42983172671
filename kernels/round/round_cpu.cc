#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/batch/segments_cpu.h"
#include "kernels/round/round_backend.h"

namespace dflash::backend {
namespace {

absl::Status CheckSlot(const char* operation, int32_t slot, int64_t slots) {
  if (slot >= 0 && slot < slots) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(operation, ": slot ", slot, " of ", slots));
}

absl::Status CheckEntries(const char* operation, RoundEntries entries, DecodeStates states) {
  for (int64_t i = 0; i < entries.count; ++i) {
    const RoundEntry& entry = entries.data[i];
    DFLASH_RETURN_IF_ERROR(CheckSlot(operation, entry.slot, states.slots));
    if (entry.first_row < 0 || entry.max_drafts < 0 || entry.max_drafts >= entry.row_capacity) {
      return absl::InvalidArgumentError(absl::StrCat(operation, ": entry ", i, " has rows ", entry.first_row,
                                                     " + ", entry.row_capacity, " for ", entry.max_drafts,
                                                     " drafts"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckAdvance(const char* operation, SegmentList segments, const int32_t* row_counts,
                          const SlotLengths& lengths) {
  for (int64_t i = 0; i < segments.count; ++i) {
    DFLASH_RETURN_IF_ERROR(CheckSlot(operation, segments.data[i].slot, lengths.slots));
  }
  return CheckRowCounts(operation, segments, row_counts);
}

bool IsStop(const DecodeState& state, int32_t token) {
  const int32_t* end = state.stop_tokens + state.stop_count;
  return token < 0 || std::find(state.stop_tokens, end, token) != end;
}

}  // namespace

absl::Status MakeDraftBlocks(DecodeStates states, const int32_t* slots, int64_t count, int64_t block_rows,
                             int32_t mask_token, int32_t* tokens, Segment* segments, const Stream&) {
  for (int64_t i = 0; i < count; ++i) {
    DFLASH_RETURN_IF_ERROR(CheckSlot("MakeDraftBlocks", slots[i], states.slots));
    const DecodeState& state = states.data[slots[i]];
    const bool runs = state.room > 0;
    int32_t* block = tokens + i * block_rows;
    std::fill_n(block, block_rows, mask_token);
    if (runs) block[0] = state.anchor;
    segments[i] = {.slot = slots[i],
                   .first_row = static_cast<int32_t>(i * block_rows),
                   .row_count = runs ? static_cast<int32_t>(block_rows) : 0,
                   .start_position = state.position};
  }
  return absl::OkStatus();
}

absl::Status MakeVerifyRows(DecodeStates states, RoundEntries entries, const int32_t* proposals,
                            int64_t proposal_cols, int64_t vocabulary, const VerifyArrays& rows,
                            const Stream&) {
  DFLASH_RETURN_IF_ERROR(CheckEntries("MakeVerifyRows", entries, states));
  for (int64_t i = 0; i < entries.count; ++i) {
    const RoundEntry& entry = entries.data[i];
    const DecodeState& state = states.data[entry.slot];
    const int32_t* drafts = entry.proposal < 0 ? nullptr : proposals + entry.proposal * proposal_cols;
    int32_t used = 0;
    if (state.room > 0) {
      const int64_t most =
          drafts == nullptr ? 0 : std::min<int64_t>({entry.max_drafts, state.room - 1, proposal_cols});
      while (used < most && drafts[used] >= 0 && drafts[used] < vocabulary) ++used;
      ++used;  // the anchor
    }
    for (int32_t row = 0; row < entry.row_capacity; ++row) {
      const int64_t at = entry.first_row + row;
      const bool feeds = row < used;
      rows.tokens[at] = !feeds ? 0 : row == 0 ? state.anchor : drafts[row - 1];
      rows.positions[at] = feeds ? int64_t{state.position} + row + 1 : 0;
      rows.sampling[at] = feeds ? state.sampling : SamplingParams{};
    }
    rows.segments[i] = {.slot = entry.slot,
                        .first_row = entry.first_row,
                        .row_count = used,
                        .start_position = state.position};
  }
  return absl::OkStatus();
}

absl::Status AcceptRows(RoundEntries entries, const VerifyArrays& rows, const int32_t* sampled,
                        DecodeStates states, int32_t* row_counts, RoundResult* results, const Stream&) {
  DFLASH_RETURN_IF_ERROR(CheckEntries("AcceptRows", entries, states));
  for (int64_t i = 0; i < entries.count; ++i) {
    DecodeState& state = states.data[entries.data[i].slot];
    const Segment& segment = rows.segments[i];
    RoundResult result = {.rows = segment.row_count, .emitted = 0, .accepted = 0, .position = 0};
    const int32_t* emits = sampled + segment.first_row;
    const int32_t* feeds = rows.tokens + segment.first_row;
    bool goes_on = segment.row_count > 0;
    while (goes_on) {
      const int32_t row = result.emitted++;
      const bool accepted = row + 1 < segment.row_count && feeds[row + 1] == emits[row];
      result.accepted += accepted;
      const bool stopped = IsStop(state, emits[row]);
      state.anchor = emits[row];
      state.room = stopped ? 0 : state.room - 1;
      goes_on = accepted && state.room > 0;
    }
    state.position += result.emitted;
    result.position = state.position;
    row_counts[i] = result.emitted;
    results[i] = result;
  }
  return absl::OkStatus();
}

absl::Status AdvanceTargetLengths(SegmentList segments, const int32_t* row_counts, const SlotLengths& lengths,
                                  const Stream&) {
  DFLASH_RETURN_IF_ERROR(CheckAdvance("AdvanceTargetLengths", segments, row_counts, lengths));
  for (int64_t i = 0; i < segments.count; ++i) {
    const int32_t slot = segments.data[i].slot;
    const auto rows = row_counts[i];
    lengths.target_kv[slot] += rows;
    lengths.gdn_folded[slot] += lengths.gdn_pending[slot];
    lengths.gdn_pending[slot] = rows;
    lengths.pending_buffer[slot] ^= 1;
  }
  return absl::OkStatus();
}

absl::Status AdvanceDraftLengths(SegmentList segments, const int32_t* row_counts, const SlotLengths& lengths,
                                 const Stream&) {
  DFLASH_RETURN_IF_ERROR(CheckAdvance("AdvanceDraftLengths", segments, row_counts, lengths));
  for (int64_t i = 0; i < segments.count; ++i) {
    lengths.draft_context_end[segments.data[i].slot] += row_counts[i];
  }
  return absl::OkStatus();
}

}  // namespace dflash::backend
