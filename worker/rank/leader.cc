#include "worker/rank/leader.h"

#include <utility>

#include "base/check.h"
#include "base/status.h"

namespace dflash {

absl::StatusOr<std::unique_ptr<RankLeader>> RankLeader::Create(int64_t max_sequences, int64_t max_block_rows,
                                                               PlanSender* sender, Communicator* communicator,
                                                               const Stream& stream) {
  std::unique_ptr<RankLeader> leader(new RankLeader(sender, communicator, &stream));
  DFLASH_ASSIGN_OR_RETURN(
      leader->values_,
      Buffer::Allocate(max_sequences * max_block_rows * static_cast<int64_t>(sizeof(int32_t)), stream));
  return leader;
}

void RankLeader::OnOpen(int32_t slot, int64_t reserved_tokens, const SamplingParams& sampling) {
  slots_.push_back({.open = true, .slot = slot, .reserved_tokens = reserved_tokens, .sampling = sampling});
}

void RankLeader::OnClose(int32_t slot) {
  slots_.push_back({.open = false, .slot = slot, .reserved_tokens = 0, .sampling = {}});
}

absl::Status RankLeader::Begin(const std::vector<SequenceRows>& prefill,
                               const std::vector<VerifyRows>& verify, int64_t draft_sequences) {
  RankPlan plan;
  plan.number = ++number_;
  plan.slots = std::exchange(slots_, {});
  plan.draft_sequences = draft_sequences;
  for (const SequenceRows& rows : prefill) {
    plan.rows.push_back({.slot = rows.slot,
                         .phase = Phase::kPrefill,
                         .start_position = rows.start_position,
                         .count = static_cast<int64_t>(rows.tokens.size()),
                         .tokens = rows.tokens,
                         .last_logits = rows.last_logits});
  }
  for (const VerifyRows& rows : verify) {
    plan.rows.push_back({.slot = rows.slot,
                         .phase = Phase::kVerify,
                         .start_position = rows.start_position,
                         .count = rows.max_rows,
                         .tokens = {},
                         .last_logits = false});
  }
  hash_ = ChainHash(hash_, plan);
  plan.hash = hash_;
  verify_ = verify;
  return sender_->Send(plan);
}

absl::Status RankLeader::ShareTokens(const std::vector<const std::vector<int32_t>*>& tokens) {
  DFLASH_CHECK(tokens.size() == verify_.size());
  std::vector<int32_t> values;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto rows = static_cast<int64_t>(tokens[i]->size());
    DFLASH_CHECK(rows >= 1 && rows <= verify_[i].max_rows, "more drafts than planned");
    values.insert(values.end(), tokens[i]->begin(), tokens[i]->end());
    values.insert(values.end(), static_cast<size_t>(verify_[i].max_rows - rows), -1);
  }
  return Broadcast(values);
}

absl::Status RankLeader::ShareAccepted(const std::vector<Target::Accepted>& accepted) {
  DFLASH_CHECK(accepted.size() == verify_.size());
  std::vector<int32_t> values;
  for (const Target::Accepted& sequence : accepted) values.push_back(static_cast<int32_t>(sequence.rows));
  return Broadcast(values);
}

absl::Status RankLeader::Broadcast(const std::vector<int32_t>& values) {
  if (values.empty()) return absl::OkStatus();
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(int32_t));
  DFLASH_CHECK(bytes <= values_.bytes());
  DFLASH_RETURN_IF_ERROR(CopyToDevice(values_.data(), values.data(), bytes, *stream_));
  return communicator_->Broadcast(values_.data(), bytes, 0, *stream_);
}

}  // namespace dflash
