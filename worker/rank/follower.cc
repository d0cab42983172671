#include "worker/rank/follower.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/rank/open_slot.h"

namespace dflash {
namespace {

template <typename T>
int64_t BytesOf(int64_t count) {
  return count * static_cast<int64_t>(sizeof(T));
}

template <typename T>
absl::Status AllocateArray(Buffer& buffer, int64_t count, const Stream& stream) {
  DFLASH_ASSIGN_OR_RETURN(buffer, Buffer::Allocate(BytesOf<T>(count), stream));
  return absl::OkStatus();
}

template <typename T>
absl::Status Upload(const Buffer& buffer, const std::vector<T>& values, const Stream& stream) {
  return CopyToDevice(buffer.data(), values.data(), BytesOf<T>(static_cast<int64_t>(values.size())), stream);
}

}  // namespace

absl::StatusOr<std::unique_ptr<RankFollower>> RankFollower::Create(const Options& options, Target* target,
                                                                   Drafter* drafter, SequenceTable* table,
                                                                   Communicator* communicator,
                                                                   const Stream& stream) {
  std::unique_ptr<RankFollower> follower(
      new RankFollower(options, target, drafter, table, communicator, &stream));
  const int64_t slots = table->slots();
  const int64_t rows = slots * options.max_block_rows;
  DFLASH_RETURN_IF_ERROR(AllocateArray<DecodeState>(follower->states_, slots, stream));
  DFLASH_RETURN_IF_ERROR(AllocateArray<RoundEntry>(follower->entries_, slots, stream));
  DFLASH_RETURN_IF_ERROR(AllocateArray<int32_t>(follower->draft_slots_, slots, stream));
  DFLASH_RETURN_IF_ERROR(AllocateArray<int32_t>(follower->proposals_, rows, stream));
  DFLASH_RETURN_IF_ERROR(AllocateArray<int32_t>(follower->tokens_, rows, stream));
  DFLASH_RETURN_IF_ERROR(AllocateArray<int64_t>(follower->positions_, rows, stream));
  DFLASH_RETURN_IF_ERROR(AllocateArray<SamplingParams>(follower->sampling_params_, rows, stream));
  DFLASH_RETURN_IF_ERROR(AllocateArray<Segment>(follower->segments_, slots, stream));
  DFLASH_RETURN_IF_ERROR(AllocateArray<int32_t>(follower->row_counts_, slots, stream));
  DFLASH_RETURN_IF_ERROR(AllocateArray<int32_t>(follower->sampled_, rows, stream));
  DFLASH_ASSIGN_OR_RETURN(follower->lengths_, PinnedBuffer::Allocate(table->LengthsBytes(), stream));
  follower->sampling_.resize(static_cast<size_t>(slots));
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
  DFLASH_RETURN_IF_ERROR(RunKnownRows(plan));
  DFLASH_RETURN_IF_ERROR(RunRound(plan));
  number_ = plan.number;
  return absl::OkStatus();
}

absl::Status RankFollower::ChangeSlots(const RankPlan& plan) {
  for (const RankPlan::SlotChange& change : plan.slots) {
    if (change.slot < 0 || change.slot >= table_->slots()) {
      return absl::InternalError(absl::StrCat("the leader's slot ", change.slot, " does not exist here"));
    }
    if (change.kind == RankPlan::SlotChange::Kind::kClose) {
      DFLASH_RETURN_IF_ERROR(table_->Close(change.slot));
      continue;
    }
    if (change.kind == RankPlan::SlotChange::Kind::kGrow) {
      if (absl::Status status = table_->Append(change.slot, change.pages); !status.ok())
        return absl::InternalError(absl::StrCat("the leader's pages do not fit here: ", status.message()));
      continue;
    }
    DFLASH_ASSIGN_OR_RETURN(const int32_t slot, table_->Open());
    if (slot != change.slot) {
      return absl::InternalError(absl::StrCat("the leader opened slot ", change.slot, ", this rank ", slot));
    }
    DFLASH_RETURN_IF_ERROR(OpenSlot(slot, change.begin, target_, drafter_, table_));
    sampling_[static_cast<size_t>(slot)] = change.sampling;
  }
  return absl::OkStatus();
}

absl::Status RankFollower::RunKnownRows(const RankPlan& plan) {
  StepBatch batch;
  std::vector<Target::Accepted> refed;
  std::vector<SamplingParams> params;
  std::vector<int64_t> positions;
  SamplingReach reach = SamplingReach::kBest;
  for (const RankPlan::Rows& rows : plan.rows) {
    if (!rows.known()) continue;
    batch.sequences.push_back({.slot = rows.slot,
                               .phase = rows.phase,
                               .start_position = rows.start_position,
                               .tokens = rows.tokens,
                               .parents = {},
                               .last_logits = rows.last_logits,
                               .checkpoints = rows.checkpoints});
    if (rows.phase == Phase::kVerify) refed.push_back({.slot = rows.slot, .rows = rows.count});
    if (!rows.last_logits) continue;
    if (rows.slot < 0 || rows.slot >= table_->slots())
      return absl::InternalError(absl::StrCat("the leader's slot ", rows.slot, " does not exist here"));
    params.push_back(sampling_[static_cast<size_t>(rows.slot)]);
    reach = std::max(reach, ReachOf(params.back()));
    positions.push_back(rows.start_position + rows.count);
  }
  if (batch.sequences.empty()) return absl::OkStatus();
  DFLASH_ASSIGN_OR_RETURN(const ForwardResult forward, target_->Forward(batch));
  if (!params.empty()) {
    DFLASH_RETURN_IF_ERROR(Upload(sampling_params_, params, *stream_));
    DFLASH_RETURN_IF_ERROR(Upload(positions_, positions, *stream_));
    const ConstMatrixView logits = forward.logits.Rows(0, static_cast<int64_t>(params.size()));
    DFLASH_RETURN_IF_ERROR(target_->Sample(logits, sampling_params_.As<SamplingParams>(),
                                           positions_.As<int64_t>(), options_.vocabulary, reach,
                                           sampled_.As<int32_t>()));
  }
  if (!refed.empty()) DFLASH_RETURN_IF_ERROR(target_->Commit(refed));
  if (drafter_ == nullptr) return absl::OkStatus();
  std::vector<Drafter::CommittedRows> committed;
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    committed.push_back({.slot = batch.sequences[i].slot,
                         .phase = batch.sequences[i].phase,
                         .first_row = forward.rows[i].first,
                         .row_count = forward.rows[i].count,
                         .start_position = batch.sequences[i].start_position});
  }
  return drafter_->Ingest(forward.taps, committed);
}

absl::Status RankFollower::RunRound(const RankPlan& plan) {
  std::vector<RoundEntry> entries;
  std::vector<int32_t> draft_slots;
  int64_t row_count = 0;
  SamplingReach reach = SamplingReach::kBest;
  for (const RankPlan::Rows& rows : plan.rows) {
    if (rows.known()) continue;
    if (rows.slot < 0 || rows.slot >= table_->slots() || rows.count < 1 ||
        rows.count > options_.max_block_rows)
      return absl::InternalError(
          absl::StrCat("the leader verifies ", rows.count, " rows of slot ", rows.slot));
    const bool drafts = rows.count > 1;
    entries.push_back({.slot = rows.slot,
                       .first_row = static_cast<int32_t>(row_count),
                       .row_capacity = static_cast<int32_t>(rows.count),
                       .max_drafts = static_cast<int32_t>(rows.count - 1),
                       .proposal = drafts ? static_cast<int32_t>(draft_slots.size()) : -1});
    if (drafts) draft_slots.push_back(rows.slot);
    row_count += rows.count;
    reach = std::max(reach, ReachOf(sampling_[static_cast<size_t>(rows.slot)]));
  }
  if (entries.empty()) return absl::OkStatus();
  const auto count = static_cast<int64_t>(entries.size());
  const auto drafting = static_cast<int64_t>(draft_slots.size());
  if (count > table_->slots() || drafting != plan.draft_sequences || (drafting > 0 && drafter_ == nullptr)) {
    return absl::InternalError(absl::StrCat("the leader drafts for ", plan.draft_sequences, " of ", count,
                                            " sequences, this rank for ", drafting));
  }
  DFLASH_RETURN_IF_ERROR(Upload(entries_, entries, *stream_));
  const DecodeStates states = {.data = states_.As<DecodeState>(), .slots = table_->slots()};
  DFLASH_RETURN_IF_ERROR(
      communicator_->Broadcast(states_.data(), BytesOf<DecodeState>(states.slots), 0, *stream_));
  if (drafting > 0) {
    DFLASH_RETURN_IF_ERROR(Upload(draft_slots_, draft_slots, *stream_));
    DFLASH_RETURN_IF_ERROR(
        drafter_->Propose(states, draft_slots_.As<int32_t>(), drafting, proposals_.As<int32_t>()));
  }
  const VerifyArrays rows = {.tokens = tokens_.As<int32_t>(),
                             .positions = positions_.As<int64_t>(),
                             .sampling = sampling_params_.As<SamplingParams>(),
                             .segments = segments_.As<Segment>()};
  DFLASH_RETURN_IF_ERROR(MakeVerifyRows(states, {.data = entries_.As<RoundEntry>(), .count = count},
                                        proposals_.As<int32_t>(), options_.max_block_rows - 1,
                                        options_.vocabulary, rows, *stream_));
  // What counts is what the leader has made of them.
  DFLASH_RETURN_IF_ERROR(communicator_->Broadcast(rows.tokens, BytesOf<int32_t>(row_count), 0, *stream_));
  DFLASH_RETURN_IF_ERROR(communicator_->Broadcast(rows.segments, BytesOf<Segment>(count), 0, *stream_));
  const VerifyRows verified = {
      .tokens = rows.tokens, .segments = {.data = rows.segments, .count = count}, .rows = row_count};
  DFLASH_ASSIGN_OR_RETURN(const VerifyResult forward, target_->Verify(verified));
  DFLASH_RETURN_IF_ERROR(target_->Sample(forward.logits, rows.sampling, rows.positions, options_.vocabulary,
                                         reach, sampled_.As<int32_t>()));
  auto* row_counts = row_counts_.As<int32_t>();
  DFLASH_RETURN_IF_ERROR(communicator_->Broadcast(row_counts, BytesOf<int32_t>(count), 0, *stream_));
  DFLASH_RETURN_IF_ERROR(target_->CommitVerified(verified, row_counts));
  if (drafter_ != nullptr)
    DFLASH_RETURN_IF_ERROR(drafter_->IngestVerified(forward.taps, verified.segments, row_counts));
  DFLASH_RETURN_IF_ERROR(table_->CopyLengths(lengths_));
  DFLASH_RETURN_IF_ERROR(stream_->Synchronize());
  for (const RoundEntry& entry : entries) table_->TakeLengths(lengths_, entry.slot);
  return absl::OkStatus();
}

}  // namespace dflash
