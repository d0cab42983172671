// What a backend provides behind logit_rules.h and log_probs.h; the arguments have been checked, `logits` has
// the columns of real tokens only.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"
#include "kernels/sampling/log_probs.h"
#include "kernels/sampling/logit_rules.h"

namespace dflash::backend {

absl::Status ProcessLogits(const LogitRules& rules, int64_t first_id, MatrixView logits,
                           const Stream& stream);
absl::Status SumRows(ConstMatrixView logits, int64_t first_id, const int32_t* tokens, LogSum* sums,
                     const Stream& stream);

}  // namespace dflash::backend
