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
  DFLASH_ASSIGN_OR_RETURN(
      follower->values_,
      Buffer::Allocate(table->slots() * max_block_rows * static_cast<int64_t>(sizeof(int32_t)), stream));
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

  StepBatch batch;
  int64_t verify_rows = 0, verifications = 0;
  for (const RankPlan::Rows& rows : plan.rows) {
    if (rows.phase != Phase::kVerify) continue;
    verify_rows += rows.count;
    ++verifications;
  }
  DFLASH_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens, Receive(verify_rows));
  auto next = tokens.begin();
  for (const RankPlan::Rows& rows : plan.rows) {
    SequenceRows& sequence = batch.sequences.emplace_back();
    sequence.slot = rows.slot;
    sequence.phase = rows.phase;
    sequence.start_position = rows.start_position;
    sequence.last_logits = rows.last_logits;
    if (rows.phase == Phase::kPrefill) {
      sequence.tokens = rows.tokens;
      continue;
    }
    for (int64_t row = 0; row < rows.count; ++row, ++next) {
      if (*next >= 0) sequence.tokens.push_back(*next);  // -1: the drafter proposed fewer
    }
  }
  if (!batch.sequences.empty()) DFLASH_RETURN_IF_ERROR(target_->Forward(batch).status());
  if (verifications > 0) {
    DFLASH_ASSIGN_OR_RETURN(const std::vector<int32_t> counts, Receive(verifications));
    std::vector<Target::Accepted> accepted;
    for (const RankPlan::Rows& rows : plan.rows) {
      if (rows.phase == Phase::kVerify)
        accepted.push_back({.slot = rows.slot, .rows = counts[accepted.size()]});
    }
    DFLASH_RETURN_IF_ERROR(target_->Commit(accepted));
  }
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

absl::StatusOr<std::vector<int32_t>> RankFollower::Receive(int64_t count) {
  std::vector<int32_t> values(static_cast<size_t>(count));
  if (count == 0) return values;
  const int64_t bytes = count * static_cast<int64_t>(sizeof(int32_t));
  if (bytes > values_.bytes()) return absl::InternalError(absl::StrCat("a broadcast of ", bytes, " bytes"));
  DFLASH_RETURN_IF_ERROR(communicator_->Broadcast(values_.data(), bytes, 0, *stream_));
  DFLASH_RETURN_IF_ERROR(CopyToHost(values.data(), values_.data(), bytes, *stream_));
  return values;
}

}  // namespace dflash
