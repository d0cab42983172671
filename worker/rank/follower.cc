#include "worker/rank/follower.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace dflash {

absl::StatusOr<std::unique_ptr<RankFollower>> RankFollower::Create(int64_t max_block_rows, Target* target,
                                                                   SequenceTable* table,
                                                                   Communicator* communicator,
                                                                   const Stream& stream) {
  std::unique_ptr<RankFollower> follower(new RankFollower(target, table, communicator, &stream));
  const auto word = static_cast<int64_t>(sizeof(int32_t));
  DFLASH_ASSIGN_OR_RETURN(follower->tokens_,
                          Buffer::Allocate(table->slots() * max_block_rows * word, stream));
  DFLASH_ASSIGN_OR_RETURN(follower->segments_,
                          Buffer::Allocate(table->slots() * static_cast<int64_t>(sizeof(Segment)), stream));
  DFLASH_ASSIGN_OR_RETURN(follower->row_counts_, Buffer::Allocate(table->slots() * word, stream));
  DFLASH_ASSIGN_OR_RETURN(follower->lengths_, PinnedBuffer::Allocate(table->LengthsBytes(), stream));
  follower->sampling_.resize(static_cast<size_t>(table->slots()));
  return follower;
}

absl::Status RankFollower::Run(const RankPlan& plan) {
  if (plan.number != number_ + 1) {
    return absl::DataLossError(absl::StrCat("plan ", plan.number, " after plan ", number_));
  }
  if (plan.hash != ChainHash(hash_, plan)) {
    return absl::DataLossError(absl::StrCat("plan ", plan.number, " is not what the leader sent"));
  }
  hash_ = plan.hash;
  DFLASH_RETURN_IF_ERROR(ChangeSlots(plan));

  StepBatch prompts;
  int64_t verify_rows = 0, verifications = 0;
  for (const RankPlan::Rows& rows : plan.rows) {
    if (rows.phase == Phase::kVerify) {
      verify_rows += rows.count;
      ++verifications;
      continue;
    }
    prompts.sequences.push_back({.slot = rows.slot,
                                 .phase = Phase::kPrefill,
                                 .start_position = rows.start_position,
                                 .tokens = rows.tokens,
                                 .parents = {},
                                 .last_logits = rows.last_logits});
  }
  if (!prompts.sequences.empty()) DFLASH_RETURN_IF_ERROR(target_->Forward(prompts).status());
  if (verifications > 0) DFLASH_RETURN_IF_ERROR(Verify(plan, verify_rows, verifications));
  number_ = plan.number;
  return absl::OkStatus();
}

absl::Status RankFollower::ChangeSlots(const RankPlan& plan) {
  for (const RankPlan::SlotChange& change : plan.slots) {
    if (change.slot < 0 || change.slot >= table_->slots()) {
      return absl::InternalError(absl::StrCat("the leader's slot ", change.slot, " does not exist here"));
    }
    if (!change.open) {
      DFLASH_RETURN_IF_ERROR(table_->Close(change.slot));
      continue;
    }
    DFLASH_ASSIGN_OR_RETURN(const int32_t slot, table_->Open());
    if (slot != change.slot) {
      return absl::InternalError(absl::StrCat("the leader opened slot ", change.slot, ", this rank ", slot));
    }
    DFLASH_RETURN_IF_ERROR(table_->Reserve(slot, change.reserved_tokens));
    DFLASH_RETURN_IF_ERROR(target_->Open(slot));
    sampling_[static_cast<size_t>(slot)] = change.sampling;
  }
  return absl::OkStatus();
}

absl::Status RankFollower::Verify(const RankPlan& plan, int64_t rows, int64_t count) {
  const auto word = static_cast<int64_t>(sizeof(int32_t));
  if (rows * word > tokens_.bytes() || count > table_->slots()) {
    return absl::InternalError(absl::StrCat("a verification of ", rows, " rows and ", count, " sequences"));
  }
  DFLASH_RETURN_IF_ERROR(communicator_->Broadcast(tokens_.data(), rows * word, 0, *stream_));
  DFLASH_RETURN_IF_ERROR(
      communicator_->Broadcast(segments_.data(), count * static_cast<int64_t>(sizeof(Segment)), 0, *stream_));
  const VerifyRows verified = {.tokens = tokens_.As<int32_t>(),
                               .segments = {.data = segments_.As<Segment>(), .count = count},
                               .rows = rows};
  DFLASH_RETURN_IF_ERROR(target_->Verify(verified).status());
  DFLASH_RETURN_IF_ERROR(communicator_->Broadcast(row_counts_.data(), count * word, 0, *stream_));
  DFLASH_RETURN_IF_ERROR(target_->CommitVerified(verified, row_counts_.As<int32_t>()));
  DFLASH_RETURN_IF_ERROR(table_->CopyLengths(lengths_));
  DFLASH_RETURN_IF_ERROR(stream_->Synchronize());
  for (const RankPlan::Rows& planned : plan.rows) {
    if (planned.phase == Phase::kVerify) table_->TakeLengths(lengths_, planned.slot);
  }
  return absl::OkStatus();
}

}  // namespace dflash
