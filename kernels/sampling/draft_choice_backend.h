// What a backend provides behind draft_choice.h; the arguments have been checked.
#pragma once

#include "kernels/sampling/draft_choice.h"

namespace dflash::backend {

// `logits` holds the part's real tokens only. There may be none.
absl::Status ListDrafts(ConstMatrixView logits, int64_t first_id, DraftCandidate* candidates,
                        const Stream& stream);
absl::Status ChooseDrafts(const DraftCandidate* candidates, int64_t parts, int64_t rows, int32_t* tokens,
                          float* confidences, const Stream& stream);

}  // namespace dflash::backend
