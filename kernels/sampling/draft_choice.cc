#include "kernels/sampling/draft_choice.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/device/describe.h"
#include "kernels/sampling/draft_choice_backend.h"

namespace dflash {

absl::Status ListDrafts(ConstMatrixView logits, int64_t first_id, int64_t vocabulary,
                        DraftCandidate* candidates, const Stream& stream) {
  if (!IsWellFormed(logits) || logits.dtype != DType::kF32 || vocabulary < 1 || vocabulary > kMaxVocabulary ||
      first_id < 0 || first_id > kMaxVocabulary || logits.cols > kMaxVocabulary) {
    return absl::InvalidArgumentError(absl::StrCat("ListDrafts: logits ", Describe(logits),
                                                   " of tokens from ", first_id, " on, vocabulary ",
                                                   vocabulary));
  }
  if (logits.rows == 0) return absl::OkStatus();
  const int64_t real = std::clamp<int64_t>(vocabulary - first_id, 0, logits.cols);
  return backend::ListDrafts(logits.Cols(0, real), first_id, candidates, stream);
}

absl::Status ChooseDrafts(const DraftCandidate* candidates, int64_t parts, int64_t rows, int32_t* tokens,
                          float* confidences, const Stream& stream) {
  if (parts < 1 || rows < 0)
    return absl::InvalidArgumentError(absl::StrCat("ChooseDrafts: ", parts, " parts of ", rows, " rows"));
  if (rows == 0) return absl::OkStatus();
  return backend::ChooseDrafts(candidates, parts, rows, tokens, confidences, stream);
}

}  // namespace dflash
