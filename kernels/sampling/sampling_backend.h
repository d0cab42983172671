// What a backend provides behind sampling.h; the arguments have been checked.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"
#include "kernels/sampling/sampling.h"

namespace dflash::backend {

absl::Status SampleRows(ConstMatrixView logits, const SamplingParams* params, const int64_t* positions,
                        int64_t vocabulary, int32_t* tokens, const Stream& stream);

}  // namespace dflash::backend
