#include "kernels/sampling/sampling.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/describe.h"
#include "kernels/sampling/sampling_backend.h"

namespace dflash {
namespace {

absl::Status Check(const char* operation, ConstMatrixView logits, int64_t vocabulary) {
  if (!IsWellFormed(logits) || logits.dtype != DType::kF32 || vocabulary < 1 || vocabulary > kMaxVocabulary ||
      vocabulary > logits.cols) {
    return absl::InvalidArgumentError(
        absl::StrCat(operation, ": vocabulary ", vocabulary, " of logits ", Describe(logits)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status SampleRows(ConstMatrixView logits, const SamplingParams* params, const int64_t* positions,
                        int64_t vocabulary, int32_t* tokens, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(Check("SampleRows", logits, vocabulary));
  return backend::SampleRows(logits, params, positions, vocabulary, tokens, stream);
}

}  // namespace dflash
