// The drafter's choice: the best token of every row, and the probability that the row's softmax gives it.
// What a drafter says about itself tells hard text from a broken integration: confident and rejected means
// defect. Logits may lie in parts, every rank of a group having those of its own tokens; a rank's candidates
// are 16 bytes a row, and whoever calls moves them between the ranks. Source: docs/spec/verification.md
// "Health".
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"
#include "kernels/sampling/sharded_sampling.h"

namespace dflash {

// The best token of a row's part.
struct DraftCandidate {
  CandidateKey key = kNoCandidate;  // kUnusableRow where a NaN or +infinity is among the part's logits
  float mass = 0;                   // sum over the part of exp(logit - the best one's), at least 1
  uint32_t padding = 0;
};

// candidates[r] of a part: column c of the logits is token first_id + c, tokens at and beyond `vocabulary` do
// not exist (a part may have none). logits: f32 [R, part], any row stride; candidates [R], device memory.
// Errors: InvalidArgument when shapes or dtypes disagree or a number is out of range.
absl::Status ListDrafts(ConstMatrixView logits, int64_t first_id, int64_t vocabulary,
                        DraftCandidate* candidates, const Stream& stream);

// tokens[r] = the highest logit of row r over all parts, ties to the lowest id: the same bits in any number
// of parts. -1 where no token can be chosen, as in SampleRows. confidences[r] = its softmax probability, 0
// with token -1; close to the exact one, not the same bits on every backend or in every number of parts. May
// be null. candidates: [parts, rows] as an all-gather leaves them; device memory. Errors: InvalidArgument
// when numbers are out of range.
absl::Status ChooseDrafts(const DraftCandidate* candidates, int64_t parts, int64_t rows, int32_t* tokens,
                          float* confidences, const Stream& stream);

}  // namespace dflash
