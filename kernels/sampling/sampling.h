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

// tokens[r] = the token that the target emits at absolute position positions[r], from logits[r,
// 0..vocabulary). Columns at and beyond `vocabulary` (padding rows of the head) never win. With temperature T
// > 0: survivors are sorted by (logit descending, id ascending); top-k keeps the first k; softmax of logit /
// T over the survivors after each filter; top-p keeps the shortest prefix with sum >= p, summed in that
// order; min-p keeps probabilities >= min_p times the best; the token is argmax over survivors v of
//   logit[v] / T + G(seed, position, v),  G = -ln(-log1p(-u)),  u = (x + 1/2) 2^-32, at most 1 - 2^-24
// where x is word v mod 4 of Philox4x32-10 with key = seed and counter = (position, v / 4, stream 0); ties to
// the lowest id. That is an exact draw from the filtered distribution (Gumbel-max). logits: f32 [R, V], V >=
// vocabulary >= 1; params [R], positions int64 [R], tokens int32 [R]: device memory. Rows whose logits hold a
// NaN get token -1 (the caller fails that request alone). Errors: InvalidArgument when shapes disagree.
absl::Status SampleRows(ConstMatrixView logits, const SamplingParams* params, const int64_t* positions,
                        int64_t vocabulary, int32_t* tokens, const Stream& stream);

// tokens[r] = argmax of logits[r, 0..vocabulary), ties to the lowest id; -1 where a logit is NaN. The
// drafter's choice.
absl::Status ArgmaxRows(ConstMatrixView logits, int64_t vocabulary, int32_t* tokens, const Stream& stream);

}  // namespace dflash
