// What a backend provides behind round.h; the arguments have been checked.
#pragma once

#include "kernels/round/round.h"

namespace dflash::backend {

absl::Status MakeDraftBlocks(DecodeStates states, const int32_t* slots, int64_t count, int64_t block_rows,
                             int32_t mask_token, int32_t* tokens, Segment* segments, const Stream& stream);
absl::Status MakeVerifyRows(DecodeStates states, RoundEntries entries, const int32_t* proposals,
                            int64_t proposal_cols, int64_t vocabulary, const VerifyArrays& rows,
                            const Stream& stream);
absl::Status AcceptRows(RoundEntries entries, const VerifyArrays& rows, const int32_t* sampled,
                        DecodeStates states, int32_t* row_counts, RoundResult* results, const Stream& stream);
absl::Status AdvanceTargetLengths(SegmentList segments, const int32_t* row_counts, const SlotLengths& lengths,
                                  const Stream& stream);
absl::Status AdvanceDraftLengths(SegmentList segments, const int32_t* row_counts, const SlotLengths& lengths,
                                 const Stream& stream);

}  // namespace dflash::backend
