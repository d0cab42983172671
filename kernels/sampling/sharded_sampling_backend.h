// What a backend provides behind sharded_sampling.h; the arguments have been checked.
#pragma once

#include "kernels/sampling/sharded_sampling.h"

namespace dflash::backend {

// `logits` holds the part's real tokens only: columns beyond the vocabulary are cut off. There may be none.
absl::Status ListBest(ConstMatrixView logits, int64_t first_id, int64_t count, CandidateKey* keys,
                      const Stream& stream);
absl::Status SampleFromLists(const CandidateKey* lists, int64_t parts, int64_t rows, int64_t count,
                             const SamplingParams* params, const int64_t* positions, int32_t* tokens,
                             const Stream& stream);
absl::Status BeginSelection(const CandidateKey* best, int64_t parts, int64_t rows, RowSelection* selections,
                            const Stream& stream);
absl::Status CountDigits(ConstMatrixView logits, int64_t first_id, const SamplingParams* params,
                         SamplingFilter filter, int shift, const RowSelection* selections, uint64_t* sums,
                         const Stream& stream);
absl::Status ChooseDigit(const uint64_t* sums, int64_t parts, int64_t rows, const SamplingParams* params,
                         SamplingFilter filter, int shift, RowSelection* selections, const Stream& stream);
absl::Status DrawBelowLimit(ConstMatrixView logits, int64_t first_id, const SamplingParams* params,
                            const int64_t* positions, const RowSelection* selections, CandidateKey* keys,
                            const Stream& stream);
absl::Status ChooseTokens(const CandidateKey* draws, int64_t parts, int64_t rows,
                          const SamplingParams* params, const RowSelection* selections, int32_t* tokens,
                          const Stream& stream);

}  // namespace dflash::backend
