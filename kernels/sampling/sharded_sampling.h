// Sampling where the logits of a row lie in parts: every rank of a group has those of its own tokens. What
// the ranks exchange are short lists and sums, never logits; the tokens are those of SampleRows over the
// whole row, bit for bit. These are the local steps; whoever calls them moves their results between the
// ranks. Source: docs/spec/verification.md "Sampling".
//
// In common: logits f32 [R, part], column c is token first_id + c, tokens at and beyond `vocabulary` do not
// exist (a part may have none). Params, positions and tokens as in SampleRows. All pointers are device
// memory. `parts` is the number of ranks; arrays over all of them are ordered by rank, as an all-gather
// leaves them. Errors of all: InvalidArgument when shapes or dtypes disagree or a number is out of range.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"
#include "kernels/sampling/sampling.h"

namespace dflash {

// A token and its logit as one number: ascending keys are (logit descending, id ascending).
using CandidateKey = uint64_t;
inline constexpr CandidateKey kNoCandidate = ~uint64_t{0};
inline constexpr CandidateKey kUnusableRow = 0;  // a NaN or +infinity is among the logits
// The two of a candidate.
int32_t TokenOf(CandidateKey key);
float LogitOf(CandidateKey key);

// Longest list. Rows with top-k up to it need one exchange.
inline constexpr int64_t kMaxListed = 64;

// How much of its distribution a row needs: what decides which steps a batch takes. Ordered.
enum class SamplingReach : uint8_t {
  kBest,  // temperature 0: a list of one
  kList,  // top-k up to kMaxListed: a list of kMaxListed
  kAll,   // anything else: selection
};
SamplingReach ReachOf(const SamplingParams& params);

// keys[r, 0..count) = the best of the part's candidates of row r, ascending, then kNoCandidate. A row with a
// NaN or +infinity begins with kUnusableRow. count in [1, kMaxListed].
absl::Status ListBest(ConstMatrixView logits, int64_t first_id, int64_t vocabulary, int64_t count,
                      CandidateKey* keys, const Stream& stream);

// tokens[r] from lists [parts, rows, count] of ListBest. Every row's reach must be covered by `count`:
// temperature 0, or top_k in [1, count]; params and positions may be null where all temperatures are 0.
absl::Status SampleFromLists(const CandidateKey* lists, int64_t parts, int64_t rows, int64_t count,
                             const SamplingParams* params, const int64_t* positions, int32_t* tokens,
                             const Stream& stream);

// Selection, for rows of any reach. The last key that a filter keeps is found digit by digit, eight bits at a
// time, from sums over the ranks of integers (counts for top-k, floor(weight * 2^40) for top-p), so neither
// order nor number of parts changes a bit:
//   BeginSelection
//   for filter in (top-k, top-p), for shift in (56, 48, ..., 0): CountDigits; ChooseDigit over all ranks'
//   counts DrawBelowLimit; ChooseTokens over all ranks' draws
struct RowSelection {
  CandidateKey best = kNoCandidate;   // of the whole row
  CandidateKey limit = kNoCandidate;  // the last key that is still in
  uint64_t digits = 0;                // of the limit that is being searched, the upper ones
  uint64_t before = 0;                // sum of all keys before `digits`
  double enough = 0;                  // the sum that the filter wants
};
enum class SamplingFilter : uint8_t { kTopK, kTopP };
inline constexpr int64_t kDigits = 256;

// selections[rows] from the lists of one [parts, rows] of ListBest.
absl::Status BeginSelection(const CandidateKey* best, int64_t parts, int64_t rows, RowSelection* selections,
                            const Stream& stream);
// sums[r, d] = sum over the part's candidates of row r whose key agrees with the digits chosen so far and has
// d at `shift`. Zeros in rows without this filter.
absl::Status CountDigits(ConstMatrixView logits, int64_t first_id, int64_t vocabulary,
                         const SamplingParams* params, SamplingFilter filter, int shift,
                         const RowSelection* selections, uint64_t* sums, const Stream& stream);
// Moves every row's search by one digit; sums [parts, rows, kDigits]. After shift 0 the limit stands.
absl::Status ChooseDigit(const uint64_t* sums, int64_t parts, int64_t rows, const SamplingParams* params,
                         SamplingFilter filter, int shift, RowSelection* selections, const Stream& stream);
// keys[r] = the key of the part's highest score (log-weight + noise) among the candidates up to the limit.
absl::Status DrawBelowLimit(ConstMatrixView logits, int64_t first_id, int64_t vocabulary,
                            const SamplingParams* params, const int64_t* positions,
                            const RowSelection* selections, CandidateKey* keys, const Stream& stream);
// tokens[r] from the draws [parts, rows].
absl::Status ChooseTokens(const CandidateKey* draws, int64_t parts, int64_t rows,
                          const SamplingParams* params, const RowSelection* selections, int32_t* tokens,
                          const Stream& stream);

}  // namespace dflash
