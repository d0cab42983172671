// What a request's parameters do to its logits before the filters of sampling.h: tokens that are forbidden,
// biases and penalties. The rules of a row follow from the tokens before it, drafts among them, so every row
// of a block has its own. Source: docs/spec/verification.md "Request parameters".
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"

namespace dflash {

// One token's: x = logit + bias; x > 0 ? x / repetition : x * repetition; - penalty. In float32, each step
// rounded.
struct LogitEdit {
  int32_t id = 0;
  float bias = 0;  // -infinity forbids the token
  float repetition = 1;
  float penalty = 0;
};

// One row's. Ranges of edits are half-open; no id occurs twice in one.
struct RowRules {
  int32_t shared_begin = 0, shared_end = 0;  // those of all rows of a block
  int32_t own_begin = 0, own_end = 0;  // those of this row alone, sorted by id; they replace shared ones
  int32_t mask = -1;                   // row of masks: tokens without a bit are forbidden; -1: none
  int32_t only = -1;                   // the one token that is allowed; -1: no such rule
};

// Rules of all rows of a step. Device memory.
struct LogitRules {
  const RowRules* rows = nullptr;
  const LogitEdit* edits = nullptr;
  const uint32_t* masks = nullptr;  // [.., mask_words]: bit id % 32 of word id / 32
  int64_t mask_words = 0;           // at least one bit for every token
  bool restricts = false;           // some row has a mask or an only token
};

// Changes logits f32 [R, part] of the tokens from `first_id` on in place, as rules.rows[0, R) say; columns of
// tokens at and beyond `vocabulary` keep their values. Forbidden tokens get -infinity, but NaN and +infinity
// stay, so that such a row fails whatever its rules are. Errors: InvalidArgument when shapes or dtypes
// disagree.
absl::Status ProcessLogits(const LogitRules& rules, int64_t first_id, int64_t vocabulary, MatrixView logits,
                           const Stream& stream);

}  // namespace dflash
