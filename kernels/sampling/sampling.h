// From logits to tokens. One rule for every row: plain decoding, every row of a verification, prefill's last
// row. Source: docs/spec/verification.md "Sampling".
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"

namespace dflash {

// Parameters of one row. Ranges are checked where requests enter, not here.
struct SamplingParams {
  float temperature = 0;  // 0: the highest logit, ties to the lowest id; the rest is then ignored
  int32_t top_k = 0;      // 0: off
  float top_p = 1;        // 1: off
  float min_p = 0;        // 0: off
  uint64_t seed = 0;
};

// Largest vocabulary: the integer sums of top-p stay below 2^63.
inline constexpr int64_t kMaxVocabulary = int64_t{1} << 22;

// tokens[r] = the token that the target emits at absolute position positions[r], from logits[r,
// 0..vocabulary). Columns at and beyond `vocabulary` (padding rows of the head) never win.
//
// Temperature 0: the highest logit, ties to the lowest id. Temperature T > 0: ids whose logit is -infinity
// are out; the others are sorted by (logit descending, id ascending) and filtered, in this order:
//   weight[v] = exp((logit[v] - best) / T), float32, best = the highest logit, so weight = 1 for it
//   top-k    keeps the first k
//   top-p    keeps the shortest prefix whose sum >= top_p * (sum over all that top-k kept), at least one id.
//   The
//            sums are of the integers floor(weight * 2^40), so they do not depend on their order; the
//            comparison is in double
//   min-p    keeps weight >= min_p: softmax probabilities of at least min_p times the best one (min_p
//            above 1 counts as 1)
// The token is argmax over the survivors v, ties to the lowest id, of
//   (logit[v] - best) / T + G(seed, position, v),  G = -ln(-log1p(-u)),  u = (x + 1/2) 2^-32, at most 1 -
//   2^-24
// where x is word v mod 4 of Philox4x32-10 with key = seed and counter = (position, v / 4, stream 0). That is
// an exact draw from the softmax over the survivors (Gumbel-max).
//
// Rows in which no token can be chosen (a NaN or +infinity among the logits, or nothing but -infinity) get
// token -1; the caller fails that request alone. logits: f32 [R, V], V >= vocabulary, any row stride; params
// [R], positions int64 [R], tokens int32 [R]: device memory. Errors: InvalidArgument when shapes or dtypes
// disagree or vocabulary is outside [1, kMaxVocabulary].
absl::Status SampleRows(ConstMatrixView logits, const SamplingParams* params, const int64_t* positions,
                        int64_t vocabulary, int32_t* tokens, const Stream& stream);

}  // namespace dflash
