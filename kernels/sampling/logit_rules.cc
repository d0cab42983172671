#include "kernels/sampling/logit_rules.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/describe.h"
#include "kernels/sampling/log_probs.h"
#include "kernels/sampling/logit_rules_backend.h"
#include "kernels/sampling/sampling.h"

namespace dflash {
namespace {

absl::Status CheckPart(const char* operation, ConstMatrixView logits, int64_t first_id, int64_t vocabulary) {
  if (!IsWellFormed(logits) || logits.dtype != DType::kF32 || vocabulary < 1 || vocabulary > kMaxVocabulary ||
      first_id < 0 || first_id > kMaxVocabulary) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": logits ", Describe(logits),
                                                   " of tokens from ", first_id, " on, vocabulary ",
                                                   vocabulary));
  }
  return absl::OkStatus();
}

int64_t RealColumns(int64_t columns, int64_t first_id, int64_t vocabulary) {
  return std::clamp<int64_t>(vocabulary - first_id, 0, columns);
}

}  // namespace

absl::Status ProcessLogits(const LogitRules& rules, int64_t first_id, int64_t vocabulary, MatrixView logits,
                           const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckPart("ProcessLogits", logits, first_id, vocabulary));
  if (rules.masks != nullptr && rules.mask_words * 32 < vocabulary) {
    return absl::InvalidArgumentError(absl::StrCat("ProcessLogits: masks of ", rules.mask_words,
                                                   " words for a vocabulary of ", vocabulary));
  }
  const MatrixView real = logits.Cols(0, RealColumns(logits.cols, first_id, vocabulary));
  if (real.rows == 0 || real.cols == 0) return absl::OkStatus();
  return backend::ProcessLogits(rules, first_id, real, stream);
}

absl::Status SumRows(ConstMatrixView logits, int64_t first_id, int64_t vocabulary, const int32_t* tokens,
                     LogSum* sums, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckPart("SumRows", logits, first_id, vocabulary));
  if (logits.rows == 0) return absl::OkStatus();
  return backend::SumRows(logits.Cols(0, RealColumns(logits.cols, first_id, vocabulary)), first_id, tokens,
                          sums, stream);
}

RowLogProbs MergeLogSums(const LogSum* sums, int64_t parts, int64_t stride) {
  constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
  double best = kMinusInfinity, token = kMinusInfinity, sum = 0;
  for (int64_t part = 0; part < parts; ++part) {
    best = std::max(best, static_cast<double>(sums[part * stride].best));
    token = std::max(token, static_cast<double>(sums[part * stride].token));
  }
  if (best == kMinusInfinity) return {.token = kMinusInfinity, .total = kMinusInfinity};
  for (int64_t part = 0; part < parts; ++part) {
    const LogSum& own = sums[part * stride];
    if (own.sum > 0) sum += own.sum * std::exp(static_cast<double>(own.best) - best);
  }
  const double total = best + std::log(sum);
  return {.token = token - total, .total = total};
}

}  // namespace dflash
