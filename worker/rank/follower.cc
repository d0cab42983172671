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
                                                                   const Stream& stream) {
  std::unique_ptr<RankFollower> follower(new RankFollower(options, target, drafter, table, &stream));
  if (!target->communicator().capturable()) {  // as in the engine
    follower->options_.captured_rounds = false;
    follower->options_.rounds_ahead = 0;
  }
  const int64_t slots = table->slots();
  DFLASH_RETURN_IF_ERROR(AllocateArray<int64_t>(follower->positions_, slots, stream));
  DFLASH_RETURN_IF_ERROR(AllocateArray<SamplingParams>(follower->sampling_params_, slots, stream));
  DFLASH_RETURN_IF_ERROR(AllocateArray<int32_t>(follower->sampled_, slots, stream));
  DFLASH_ASSIGN_OR_RETURN(follower->rounds_,
                          DecodeRounds::Create({.vocabulary = options.vocabulary,
                                                .captured = follower->options_.captured_rounds,
                                                .max_in_flight = follower->options_.rounds_ahead + 1},
                                               target, drafter, table, stream));
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
  number_ = plan.number;
  DFLASH_RETURN_IF_ERROR(ChangeSlots(plan));
  DFLASH_RETURN_IF_ERROR(RunKnownRows(plan));
  DFLASH_RETURN_IF_ERROR(RunRound(plan));
  if (plans_in_flight_.empty()) finished_ = number_;
  return absl::OkStatus();
}

absl::Status RankFollower::CollectRound() {
  DFLASH_RETURN_IF_ERROR(rounds_->Collect().status());
  finished_ = plans_in_flight_.front();
  plans_in_flight_.pop_front();
  return absl::OkStatus();
}

absl::Status RankFollower::Finish() {
  while (has_rounds_in_flight()) DFLASH_RETURN_IF_ERROR(CollectRound());
  return absl::OkStatus();
}

absl::Status RankFollower::ChangeSlots(const RankPlan& plan) {
  for (const RankPlan::SlotChange& change : plan.slots) {
    if (change.slot < 0 || change.slot >= table_->slots()) {
      return absl::InternalError(absl::StrCat("the leader's slot ", change.slot, " does not exist here"));
    }
    if (change.kind == RankPlan::SlotChange::Kind::kClose) {
      // The leader has read its last round, so here it ends too.
      while (rounds_->is_in_flight(change.slot)) DFLASH_RETURN_IF_ERROR(CollectRound());
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
  StepBatch batch = {.sequences = {}, .vocabulary = options_.vocabulary};
  std::vector<Target::Accepted> refed;
  std::vector<SamplingParams> params;
  std::vector<int64_t> positions;
  SamplingReach reach = SamplingReach::kBest;
  RowProcessing processing;  // what any of the rows needs; the rules are rank 0's
  for (const RankPlan::Rows& rows : plan.rows) {
    if (!rows.known()) continue;
    batch.sequences.push_back({.slot = rows.slot,
                               .phase = rows.phase,
                               .start_position = rows.start_position,
                               .tokens = rows.tokens,
                               .parents = {},
                               .last_logits = rows.last_logits,
                               .checkpoints = rows.checkpoints,
                               .log_probs = rows.prompt_log_probs,
                               .next_token = rows.next_token});
    if (rows.phase == Phase::kVerify) refed.push_back({.slot = rows.slot, .rows = rows.count});
    if (!rows.last_logits) continue;
    if (rows.slot < 0 || rows.slot >= table_->slots())
      return absl::InternalError(absl::StrCat("the leader's slot ", rows.slot, " does not exist here"));
    params.push_back(sampling_[static_cast<size_t>(rows.slot)]);
    reach = std::max(reach, ReachOf(params.back()));
    processing.has_rules |= rows.has_rules;
    processing.log_probs = std::max(processing.log_probs, rows.log_probs);
    positions.push_back(rows.start_position + rows.count);
  }
  if (batch.sequences.empty()) return absl::OkStatus();
  DFLASH_RETURN_IF_ERROR(Finish());  // such rows run between rounds
  DFLASH_ASSIGN_OR_RETURN(const ForwardResult forward, target_->Forward(batch));
  if (!params.empty()) {
    DFLASH_RETURN_IF_ERROR(Upload(sampling_params_, params, *stream_));
    DFLASH_RETURN_IF_ERROR(Upload(positions_, positions, *stream_));
    const MatrixView logits = forward.logits.Rows(0, static_cast<int64_t>(params.size()));
    std::vector<TokenLogProbs> log_probs;  // for the leader to report
    DFLASH_RETURN_IF_ERROR(target_->SampleProcessed(logits, sampling_params_.As<SamplingParams>(),
                                                    positions_.As<int64_t>(), options_.vocabulary, reach,
                                                    processing, sampled_.As<int32_t>(), &log_probs));
  }
  if (!refed.empty()) DFLASH_RETURN_IF_ERROR(target_->Commit(refed));
  if (drafter_ == nullptr) return stream_->Synchronize();
  std::vector<Drafter::CommittedRows> committed;
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    committed.push_back({.slot = batch.sequences[i].slot,
                         .phase = batch.sequences[i].phase,
                         .first_row = forward.rows[i].first,
                         .row_count = forward.rows[i].count,
                         .start_position = batch.sequences[i].start_position});
  }
  DFLASH_RETURN_IF_ERROR(drafter_->Ingest(forward.taps, committed));
  return stream_->Synchronize();  // the plan counts as carried out: as the leader, which waits for the tokens
}

absl::Status RankFollower::RunRound(const RankPlan& plan) {
  std::vector<DecodeRounds::Member> members;
  int64_t drafting = 0;
  for (const RankPlan::Rows& rows : plan.rows) {
    if (rows.known()) continue;
    if (rows.slot < 0 || rows.slot >= table_->slots())
      return absl::InternalError(absl::StrCat("the leader's slot ", rows.slot, " does not exist here"));
    members.push_back({.slot = rows.slot,
                       .max_drafts = rows.count - 1,
                       .reach = ReachOf(sampling_[static_cast<size_t>(rows.slot)]),
                       .has_rules = rows.has_rules,
                       .log_probs = rows.log_probs});
    drafting += rows.count > 1;
  }
  if (members.empty()) return absl::OkStatus();
  if (drafting != plan.draft_sequences || (drafting > 0 && drafter_ == nullptr)) {
    return absl::InternalError(absl::StrCat("the leader drafts for ", plan.draft_sequences, " of ",
                                            members.size(), " sequences, this rank for ", drafting));
  }
  DFLASH_RETURN_IF_ERROR(rounds_->Enqueue(members, plan.block_rows));
  plans_in_flight_.push_back(plan.number);
  while (rounds_->in_flight() > options_.rounds_ahead) DFLASH_RETURN_IF_ERROR(CollectRound());
  return absl::OkStatus();
}

}  // namespace dflash
