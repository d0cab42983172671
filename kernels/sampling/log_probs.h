// Log probabilities of tokens under the softmax of their row, where the logits of a row may lie in parts.
// These are the local steps; worker/model/sharded_sampler.h moves results between ranks. Source:
// docs/spec/verification.md "Request parameters".
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"
#include "kernels/sampling/sharded_sampling.h"

namespace dflash {

// A part's share of a row: log of the part's total weight = best + ln(sum).
struct LogSum {
  float best = 0;   // highest logit; -infinity: the part has no candidate
  float token = 0;  // the token's logit; -infinity: it is not in this part
  double sum = 0;   // of exp(logit - best) over the part
};

// sums[r] from logits f32 [R, part] of the tokens from `first_id` on, without those at and beyond
// `vocabulary`, and the token tokens[r] (-1: none). The bits of a row depend on the row alone. tokens int32
// [R], sums [R]: device memory. Errors: InvalidArgument when shapes or dtypes disagree.
absl::Status SumRows(ConstMatrixView logits, int64_t first_id, int64_t vocabulary, const int32_t* tokens,
                     LogSum* sums, const Stream& stream);

// ln of the token's probability and of the whole row's total weight, from the sums of all parts, sums[part *
// stride].
struct RowLogProbs {
  double token = 0;  // -infinity: its logit is that, or there is no such token
  double total = 0;
};
RowLogProbs MergeLogSums(const LogSum* sums, int64_t parts, int64_t stride);

}  // namespace dflash
