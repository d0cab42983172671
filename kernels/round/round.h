// A round of decoding as the device sees it: what to draft from, which rows to verify, how far the target
// follows its drafts, and where every sequence stands afterwards. Nothing here waits for the host, so a whole
// round can be captured.
// Source: docs/spec/verification.md "The equality rule".
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/batch/segments.h"
#include "kernels/device/stream.h"
#include "kernels/sampling/sampling.h"

namespace dflash {

inline constexpr int64_t kMaxStopTokens = 128;

// A sequence in decode. One per slot, device memory; AcceptRows moves it on.
struct DecodeState {
  int32_t anchor = 0;      // last emitted token: known, not yet run through the target
  int32_t position = 0;    // of the anchor = tokens that every store of the sequence covers
  int32_t room = 0;        // tokens it may still emit; 0: it has ended, and its rounds are empty
  int32_t stop_count = 0;  // [0, kMaxStopTokens]
  SamplingParams sampling;
  int32_t stop_tokens[kMaxStopTokens] = {};
};

struct DecodeStates {
  DecodeState* data = nullptr;  // device memory
  int64_t slots = 0;
};

// One sequence's share of a round. Device memory: the layout of the rows is the plan's, how many of them are
// used is decided on the device.
struct RoundEntry {
  int32_t slot = 0;  // at most once in a round
  int32_t first_row = 0;
  int32_t row_capacity = 1;  // rows [first_row, first_row + row_capacity) are its own
  int32_t max_drafts = 0;    // most drafts to verify, < row_capacity
  int32_t proposal = -1;     // row of the drafter's proposals, -1: it gets none
};

struct RoundEntries {
  const RoundEntry* data = nullptr;  // device memory
  int64_t count = 0;
};

// Rows of a verification, device memory; segments[i] belongs to entry i, the others are per row.
struct VerifyArrays {
  int32_t* tokens = nullptr;
  int64_t* positions = nullptr;  // of the token that the target emits after the row
  SamplingParams* sampling = nullptr;
  Segment* segments = nullptr;
};

// What a round did to a sequence.
struct RoundResult {
  int32_t rows = 0;      // verified: the anchor and its drafts; 0: the sequence had ended before
  int32_t emitted = 0;   // new tokens = rows to commit
  int32_t accepted = 0;  // drafts that equal an emitted token
  int32_t position = 0;  // of the new anchor
};

// The rows of a block-diffusion drafter: for every listed slot [anchor, mask, ..., mask] at positions
// [position, position + block_rows), rows [i * block_rows, (i + 1) * block_rows) for slots[i]. A sequence
// that has ended gets a segment without rows and mask tokens. slots: int32 [count]; tokens: int32 [count *
// block_rows]; segments [count]: device memory. Errors: InvalidArgument when numbers disagree.
absl::Status MakeDraftBlocks(DecodeStates states, const int32_t* slots, int64_t count, int64_t block_rows,
                             int32_t mask_token, int32_t* tokens, Segment* segments, const Stream& stream);

// The rows to verify: entry i gets its anchor and then the drafts of its proposal, at most max_drafts of them
// and no more than its room allows (the last row always emits a token of the target's own); a draft outside
// [0, vocabulary) ends the proposal. Unused rows of an entry belong to no segment and hold token 0, position
// 0 and temperature 0. proposals: int32 [.., proposal_cols], device memory, may be null when no entry has
// one. Errors: InvalidArgument when numbers disagree.
absl::Status MakeVerifyRows(DecodeStates states, RoundEntries entries, const int32_t* proposals,
                            int64_t proposal_cols, int64_t vocabulary, const VerifyArrays& rows,
                            const Stream& stream);

// Follows the target's own tokens through the rows that MakeVerifyRows made. Here a draft is accepted: from
// the anchor's row on, sampled[row] is emitted, and while it equals the next row's token, the walk goes on
// there. It ends at a token without such a draft, at a stop token, at a row whose logits were not numbers
// (sampled token -1, which is emitted), or when the room is used up. A draft equal to the emitted stop token
// counts as accepted although its row is not committed. Writes row_counts[i] (= emitted: the rows to commit)
// and results[i], and moves the states on: the last emitted token is the new anchor; a sequence that stopped
// has no room. An entry whose segment is empty gets zeros, and its state stays. The emitted tokens are
// sampled[first_row, first_row + emitted). sampled: int32 per row; row_counts: int32 [count]; results
// [count]. Errors: InvalidArgument when numbers disagree.
absl::Status AcceptRows(RoundEntries entries, const VerifyArrays& rows, const int32_t* sampled,
                        DecodeStates states, int32_t* row_counts, RoundResult* results, const Stream& stream);

// Tokens that the stores of the sequences cover, int32 per slot, device memory.
struct SlotLengths {
  int32_t* target_kv = nullptr;          // positions in the target's key/value pages
  int32_t* gdn_folded = nullptr;         // tokens inside the recurrent states
  int32_t* gdn_pending = nullptr;        // accepted delta records that are not yet folded
  int32_t* pending_buffer = nullptr;     // 0 or 1: the buffer that holds them
  int32_t* draft_context_end = nullptr;  // one past the last position in the drafter's context
  int64_t slots = 0;
};

// After the commit of a verification, the first row_counts[i] rows of segment i: what was pending has been
// folded, and the other buffer's first row_counts[i] records are pending now, also when that is none. Both
// operations write the lengths that they are named for. row_counts: int32 [segments], device memory. Errors:
// InvalidArgument when numbers disagree.
absl::Status AdvanceTargetLengths(SegmentList segments, const int32_t* row_counts, const SlotLengths& lengths,
                                  const Stream& stream);

// The drafter has taken the same rows into its context.
absl::Status AdvanceDraftLengths(SegmentList segments, const int32_t* row_counts, const SlotLengths& lengths,
                                 const Stream& stream);

}  // namespace dflash
