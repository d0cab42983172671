#include "kernels/round/round.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/round/round_backend.h"

namespace dflash {
namespace {

absl::Status Check(const char* operation, DecodeStates states, int64_t count, const void* list) {
  if (states.data != nullptr && states.slots >= 1 && count >= 0 && (count == 0 || list != nullptr)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(operation, ": ", count, " sequences of ", states.slots, " slots"));
}

absl::Status CheckLengths(const char* operation, const int32_t* row_counts, const SlotLengths& lengths) {
  if (row_counts != nullptr && lengths.slots >= 1 && lengths.target_kv != nullptr &&
      lengths.gdn_folded != nullptr && lengths.gdn_pending != nullptr && lengths.pending_buffer != nullptr &&
      lengths.draft_context_end != nullptr) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(operation, ": lengths of ", lengths.slots, " slots"));
}

}  // namespace

absl::Status MakeDraftBlocks(DecodeStates states, const int32_t* slots, int64_t count, int64_t block_rows,
                             int32_t mask_token, int32_t* tokens, Segment* segments, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(Check("MakeDraftBlocks", states, count, slots));
  if (block_rows < 1 || mask_token < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("MakeDraftBlocks: blocks of ", block_rows, " rows, mask token ", mask_token));
  }
  if (count == 0) return absl::OkStatus();
  return backend::MakeDraftBlocks(states, slots, count, block_rows, mask_token, tokens, segments, stream);
}

absl::Status MakeVerifyRows(DecodeStates states, RoundEntries entries, const int32_t* proposals,
                            int64_t proposal_cols, int64_t vocabulary, const VerifyArrays& rows,
                            const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(Check("MakeVerifyRows", states, entries.count, entries.data));
  if (proposal_cols < 0 || vocabulary < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("MakeVerifyRows: proposals of ", proposal_cols, " tokens, vocabulary ", vocabulary));
  }
  if (entries.count == 0) return absl::OkStatus();
  return backend::MakeVerifyRows(states, entries, proposals, proposals == nullptr ? 0 : proposal_cols,
                                 vocabulary, rows, stream);
}

absl::Status AcceptRows(RoundEntries entries, const VerifyArrays& rows, const int32_t* sampled,
                        DecodeStates states, int32_t* row_counts, RoundResult* results,
                        const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(Check("AcceptRows", states, entries.count, entries.data));
  if (entries.count == 0) return absl::OkStatus();
  return backend::AcceptRows(entries, rows, sampled, states, row_counts, results, stream);
}

absl::Status AdvanceTargetLengths(SegmentList segments, const int32_t* row_counts, const SlotLengths& lengths,
                                  const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckSegmentList("AdvanceTargetLengths", segments));
  DFLASH_RETURN_IF_ERROR(CheckLengths("AdvanceTargetLengths", row_counts, lengths));
  if (segments.count == 0) return absl::OkStatus();
  return backend::AdvanceTargetLengths(segments, row_counts, lengths, stream);
}

absl::Status AdvanceDraftLengths(SegmentList segments, const int32_t* row_counts, const SlotLengths& lengths,
                                 const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckSegmentList("AdvanceDraftLengths", segments));
  DFLASH_RETURN_IF_ERROR(CheckLengths("AdvanceDraftLengths", row_counts, lengths));
  if (segments.count == 0) return absl::OkStatus();
  return backend::AdvanceDraftLengths(segments, row_counts, lengths, stream);
}

}  // namespace dflash
