#include "worker/draft/draft_follower.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace dflash {

absl::StatusOr<std::unique_ptr<DraftFollower>> DraftFollower::Create(const Options& options, Target* target,
                                                                     SequenceTable* table,
                                                                     const Stream& stream) {
  if (target->communicator().rank() == 0 || target->draft_placement() != DraftPlacement::kRankZero)
    return absl::InvalidArgumentError("this rank runs the drafter itself");
  if (options.block_size < 2 || options.max_sequences < 1 || options.vocabulary < 1 ||
      options.vocabulary > target->config().vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat("a follower of blocks of ", options.block_size, " for ",
                                                   options.max_sequences, " sequences, vocabulary ",
                                                   options.vocabulary));
  }
  std::unique_ptr<DraftFollower> follower(new DraftFollower(options, target, table, &stream));
  const int64_t rows = options.max_sequences * options.block_size;
  DFLASH_ASSIGN_OR_RETURN(follower->rows_,
                          Matrix::Allocate(rows, target->config().hidden_size, ActivationDType(), stream));
  DFLASH_ASSIGN_OR_RETURN(follower->logits_,
                          Matrix::Allocate(rows, target->logits_cols(), DType::kF32, stream));
  DFLASH_ASSIGN_OR_RETURN(follower->choices_, Buffer::Allocate(rows * int64_t{sizeof(int32_t)}, stream));
  return follower;
}

absl::Status DraftFollower::Ingest(ConstMatrixView, const std::vector<CommittedRows>& rows) {
  for (const CommittedRows& sequence : rows)
    table_->lengths(sequence.slot).draft_context_end += sequence.row_count;
  return absl::OkStatus();
}

absl::Status DraftFollower::Open(int32_t slot, int64_t start) {
  table_->lengths(slot).draft_context_end = start;
  return table_->SetDraftContextStart(slot, start);
}

absl::StatusOr<std::vector<std::vector<int32_t>>> DraftFollower::Propose(const std::vector<Anchor>& anchors) {
  const auto count = static_cast<int64_t>(anchors.size());
  if (count > options_.max_sequences)
    return absl::InvalidArgumentError(absl::StrCat(count, " anchors, at most ", options_.max_sequences));
  std::vector<std::vector<int32_t>> proposals(anchors.size());
  if (anchors.empty()) return proposals;
  const int64_t drafts = max_drafts();
  const int64_t proposed = count * drafts;
  DFLASH_RETURN_IF_ERROR(target_->Embed(nullptr, rows_.Rows(count * options_.block_size)));
  DFLASH_RETURN_IF_ERROR(target_->Head(rows_.Rows(proposed), Phase::kVerify, logits_.Rows(proposed)));
  DFLASH_RETURN_IF_ERROR(
      target_->Argmax(logits_.Rows(proposed), options_.vocabulary, choices_.As<int32_t>()));
  std::vector<int32_t> choices(static_cast<size_t>(proposed));
  DFLASH_RETURN_IF_ERROR(
      CopyToHost(choices.data(), choices_.data(), proposed * int64_t{sizeof(int32_t)}, *stream_));
  for (size_t i = 0; i < anchors.size(); ++i) {
    const auto begin = choices.begin() + static_cast<int64_t>(i) * drafts;
    proposals[i].assign(begin, std::find(begin, begin + drafts, -1));
  }
  return proposals;
}

}  // namespace dflash
