#include "worker/model/sharded_sampler.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace dflash {

absl::StatusOr<ShardedSampler> ShardedSampler::Create(Communicator* communicator, int64_t first_id,
                                                      int64_t max_rows, const Stream& stream) {
  ShardedSampler sampler;
  sampler.communicator_ = communicator;
  sampler.stream_ = &stream;
  sampler.first_id_ = first_id;
  sampler.max_rows_ = max_rows;
  if (communicator->size() == 1) return sampler;
  const int64_t rows = communicator->size() * max_rows;
  DFLASH_ASSIGN_OR_RETURN(sampler.lists_,
                          Buffer::Allocate(rows * kMaxListed * int64_t{sizeof(CandidateKey)}, stream));
  DFLASH_ASSIGN_OR_RETURN(sampler.sums_,
                          Buffer::Allocate(rows * kDigits * int64_t{sizeof(uint64_t)}, stream));
  DFLASH_ASSIGN_OR_RETURN(sampler.selections_,
                          Buffer::Allocate(max_rows * int64_t{sizeof(RowSelection)}, stream));
  return sampler;
}

absl::Status ShardedSampler::CheckRows(int64_t rows) const {
  if (rows <= max_rows_) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("sampling of ", rows, " rows, at most ", max_rows_));
}

absl::Status ShardedSampler::Gather(const Buffer& gathered, int64_t elements) const {
  return communicator_->AllGather(Own(gathered, elements), gathered.data(),
                                  elements * int64_t{sizeof(uint64_t)}, *stream_);
}

absl::Status ShardedSampler::GatherLists(ConstMatrixView logits, int64_t vocabulary, int64_t count) {
  const int64_t elements = logits.rows * count;
  DFLASH_RETURN_IF_ERROR(ListBest(logits, first_id_, vocabulary, count, Own(lists_, elements), *stream_));
  return Gather(lists_, elements);
}

absl::Status ShardedSampler::Argmax(ConstMatrixView logits, int64_t vocabulary, int32_t* tokens) {
  if (communicator_->size() == 1) return ArgmaxRows(logits, vocabulary, tokens, *stream_);
  DFLASH_RETURN_IF_ERROR(CheckRows(logits.rows));
  DFLASH_RETURN_IF_ERROR(GatherLists(logits, vocabulary, 1));
  return SampleFromLists(lists_.As<CandidateKey>(), communicator_->size(), logits.rows, 1, nullptr, nullptr,
                         tokens, *stream_);
}

absl::Status ShardedSampler::Sample(ConstMatrixView logits, const SamplingParams* params,
                                    const int64_t* positions, int64_t vocabulary, SamplingReach reach,
                                    int32_t* tokens) {
  if (communicator_->size() == 1) return SampleRows(logits, params, positions, vocabulary, tokens, *stream_);
  DFLASH_RETURN_IF_ERROR(CheckRows(logits.rows));
  if (reach == SamplingReach::kAll) return SampleBySelection(logits, params, positions, vocabulary, tokens);
  const int64_t count = reach == SamplingReach::kBest ? 1 : kMaxListed;
  DFLASH_RETURN_IF_ERROR(GatherLists(logits, vocabulary, count));
  return SampleFromLists(lists_.As<CandidateKey>(), communicator_->size(), logits.rows, count, params,
                         positions, tokens, *stream_);
}

absl::Status ShardedSampler::SampleBySelection(ConstMatrixView logits, const SamplingParams* params,
                                               const int64_t* positions, int64_t vocabulary,
                                               int32_t* tokens) {
  const int64_t parts = communicator_->size();
  const int64_t rows = logits.rows;
  auto* selections = selections_.As<RowSelection>();
  DFLASH_RETURN_IF_ERROR(GatherLists(logits, vocabulary, 1));
  DFLASH_RETURN_IF_ERROR(BeginSelection(lists_.As<CandidateKey>(), parts, rows, selections, *stream_));
  for (SamplingFilter filter : {SamplingFilter::kTopK, SamplingFilter::kTopP}) {
    for (int shift = 56; shift >= 0; shift -= 8) {
      DFLASH_RETURN_IF_ERROR(CountDigits(logits, first_id_, vocabulary, params, filter, shift, selections,
                                         Own(sums_, rows * kDigits), *stream_));
      DFLASH_RETURN_IF_ERROR(Gather(sums_, rows * kDigits));
      DFLASH_RETURN_IF_ERROR(
          ChooseDigit(sums_.As<uint64_t>(), parts, rows, params, filter, shift, selections, *stream_));
    }
  }
  DFLASH_RETURN_IF_ERROR(DrawBelowLimit(logits, first_id_, vocabulary, params, positions, selections,
                                        Own(lists_, rows), *stream_));
  DFLASH_RETURN_IF_ERROR(Gather(lists_, rows));
  return ChooseTokens(lists_.As<CandidateKey>(), parts, rows, params, selections, tokens, *stream_);
}

}  // namespace dflash
