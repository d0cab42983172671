#include "kernels/sampling/sharded_sampling.h"

#include <algorithm>
#include <bit>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/describe.h"
#include "kernels/sampling/sharded_sampling_backend.h"

namespace dflash {
namespace {

absl::Status CheckPart(const char* operation, ConstMatrixView logits, int64_t first_id, int64_t vocabulary) {
  if (!IsWellFormed(logits) || logits.dtype != DType::kF32 || vocabulary < 1 || vocabulary > kMaxVocabulary ||
      first_id < 0 || first_id > kMaxVocabulary || logits.cols > kMaxVocabulary) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": logits ", Describe(logits),
                                                   " of tokens from ", first_id, " on, vocabulary ",
                                                   vocabulary));
  }
  return absl::OkStatus();
}

absl::Status CheckParts(const char* operation, int64_t parts, int64_t rows, int64_t count) {
  if (parts < 1 || rows < 0 || count < 1 || count > kMaxListed) {
    return absl::InvalidArgumentError(
        absl::StrCat(operation, ": ", parts, " parts of ", rows, " rows, lists of ", count));
  }
  return absl::OkStatus();
}

absl::Status CheckShift(const char* operation, int shift) {
  if (shift < 0 || shift > 56 || shift % 8 != 0)
    return absl::InvalidArgumentError(absl::StrCat(operation, ": no digit at ", shift));
  return absl::OkStatus();
}

ConstMatrixView RealTokens(ConstMatrixView logits, int64_t first_id, int64_t vocabulary) {
  return logits.Cols(0, std::clamp<int64_t>(vocabulary - first_id, 0, logits.cols));
}

}  // namespace

int32_t TokenOf(CandidateKey key) { return static_cast<int32_t>(key & 0xffffffffu); }

float LogitOf(CandidateKey key) {
  const uint32_t ascending = ~static_cast<uint32_t>(key >> 32);
  return std::bit_cast<float>((ascending & 0x80000000u) != 0 ? ascending & 0x7fffffffu : ~ascending);
}

SamplingReach ReachOf(const SamplingParams& params) {
  if (params.temperature <= 0) return SamplingReach::kBest;
  return params.top_k >= 1 && params.top_k <= kMaxListed ? SamplingReach::kList : SamplingReach::kAll;
}

absl::Status ListBest(ConstMatrixView logits, int64_t first_id, int64_t vocabulary, int64_t count,
                      CandidateKey* keys, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckPart("ListBest", logits, first_id, vocabulary));
  DFLASH_RETURN_IF_ERROR(CheckParts("ListBest", 1, logits.rows, count));
  if (logits.rows == 0) return absl::OkStatus();
  return backend::ListBest(RealTokens(logits, first_id, vocabulary), first_id, count, keys, stream);
}

absl::Status SampleFromLists(const CandidateKey* lists, int64_t parts, int64_t rows, int64_t count,
                             const SamplingParams* params, const int64_t* positions, int32_t* tokens,
                             const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckParts("SampleFromLists", parts, rows, count));
  if (rows == 0) return absl::OkStatus();
  return backend::SampleFromLists(lists, parts, rows, count, params, positions, tokens, stream);
}

absl::Status BeginSelection(const CandidateKey* best, int64_t parts, int64_t rows, RowSelection* selections,
                            const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckParts("BeginSelection", parts, rows, 1));
  if (rows == 0) return absl::OkStatus();
  return backend::BeginSelection(best, parts, rows, selections, stream);
}

absl::Status CountDigits(ConstMatrixView logits, int64_t first_id, int64_t vocabulary,
                         const SamplingParams* params, SamplingFilter filter, int shift,
                         const RowSelection* selections, uint64_t* sums, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckPart("CountDigits", logits, first_id, vocabulary));
  DFLASH_RETURN_IF_ERROR(CheckShift("CountDigits", shift));
  if (logits.rows == 0) return absl::OkStatus();
  return backend::CountDigits(RealTokens(logits, first_id, vocabulary), first_id, params, filter, shift,
                              selections, sums, stream);
}

absl::Status ChooseDigit(const uint64_t* sums, int64_t parts, int64_t rows, const SamplingParams* params,
                         SamplingFilter filter, int shift, RowSelection* selections, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckParts("ChooseDigit", parts, rows, 1));
  DFLASH_RETURN_IF_ERROR(CheckShift("ChooseDigit", shift));
  if (rows == 0) return absl::OkStatus();
  return backend::ChooseDigit(sums, parts, rows, params, filter, shift, selections, stream);
}

absl::Status DrawBelowLimit(ConstMatrixView logits, int64_t first_id, int64_t vocabulary,
                            const SamplingParams* params, const int64_t* positions,
                            const RowSelection* selections, CandidateKey* keys, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckPart("DrawBelowLimit", logits, first_id, vocabulary));
  if (logits.rows == 0) return absl::OkStatus();
  return backend::DrawBelowLimit(RealTokens(logits, first_id, vocabulary), first_id, params, positions,
                                 selections, keys, stream);
}

absl::Status ChooseTokens(const CandidateKey* draws, int64_t parts, int64_t rows,
                          const SamplingParams* params, const RowSelection* selections, int32_t* tokens,
                          const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckParts("ChooseTokens", parts, rows, 1));
  if (rows == 0) return absl::OkStatus();
  return backend::ChooseTokens(draws, parts, rows, params, selections, tokens, stream);
}

}  // namespace dflash
