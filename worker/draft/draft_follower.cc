#include "worker/draft/draft_follower.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/linear/linear.h"
#include "kernels/round/round.h"

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
  return follower;
}

absl::Status DraftFollower::Ingest(ConstMatrixView, const std::vector<CommittedRows>& rows) {
  for (const CommittedRows& sequence : rows)
    DFLASH_RETURN_IF_ERROR(table_->AdvanceDraftContext(sequence.slot, sequence.row_count));
  return absl::OkStatus();
}

absl::Status DraftFollower::IngestVerified(ConstMatrixView, SegmentList segments, const int32_t* row_counts) {
  return AdvanceDraftLengths(segments, row_counts, table_->device_lengths(), *stream_);
}

absl::Status DraftFollower::Open(int32_t slot, int64_t start) {
  return table_->OpenDraftContext(slot, start);
}

absl::Status DraftFollower::Propose(DecodeStates, const int32_t*, int64_t count, const Proposals& proposals) {
  if (count > options_.max_sequences || proposals.depth < 1 || proposals.depth > max_drafts()) {
    return absl::InvalidArgumentError(absl::StrCat(count, " anchors, at most ", options_.max_sequences, ", ",
                                                   proposals.depth, " tokens each, at most ", max_drafts()));
  }
  if (count == 0) return absl::OkStatus();
  const int64_t proposed = count * proposals.depth;
  DFLASH_RETURN_IF_ERROR(target_->Embed(nullptr, rows_.Rows(count * options_.block_size)));
  DFLASH_RETURN_IF_ERROR(
      target_->Head(rows_.Rows(proposed), FasterLinearPhase(proposed), logits_.Rows(proposed)));
  return target_->ChooseDrafts(logits_.Rows(proposed), options_.vocabulary, proposals.tokens,
                               proposals.confidences);
}

}  // namespace dflash
