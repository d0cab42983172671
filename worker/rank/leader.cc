#include "worker/rank/leader.h"

#include <utility>

#include "base/status.h"

namespace dflash {

void RankLeader::OnOpen(int32_t slot, const SamplingParams& sampling, const StateCheckpoint& begin) {
  slots_.push_back({.kind = RankPlan::SlotChange::Kind::kOpen,
                    .slot = slot,
                    .pages = {},
                    .sampling = sampling,
                    .begin = begin});
}

void RankLeader::OnGrow(int32_t slot, std::vector<int32_t> pages) {
  slots_.push_back(
      {.kind = RankPlan::SlotChange::Kind::kGrow, .slot = slot, .pages = std::move(pages), .sampling = {}});
}

void RankLeader::OnClose(int32_t slot) {
  slots_.push_back({.kind = RankPlan::SlotChange::Kind::kClose, .slot = slot, .pages = {}, .sampling = {}});
}

absl::Status RankLeader::Begin(const std::vector<SequenceRows>& known, const RowProcessing& of_prompts,
                               const std::vector<VerifyRows>& verify, const RowProcessing& of_round,
                               int64_t draft_sequences, int64_t block_rows) {
  RankPlan plan;
  plan.number = ++number_;
  plan.slots = std::exchange(slots_, {});
  plan.draft_sequences = draft_sequences;
  plan.block_rows = block_rows;
  for (const SequenceRows& rows : known) {
    plan.rows.push_back({.slot = rows.slot,
                         .phase = rows.phase,
                         .start_position = rows.start_position,
                         .count = static_cast<int64_t>(rows.tokens.size()),
                         .tokens = rows.tokens,
                         .last_logits = rows.last_logits,
                         .checkpoints = rows.checkpoints,
                         .has_rules = rows.last_logits && of_prompts.has_rules,
                         .log_probs = rows.last_logits ? of_prompts.log_probs : 0,
                         .prompt_log_probs = rows.log_probs,
                         .next_token = rows.next_token});
  }
  for (const VerifyRows& rows : verify) {
    plan.rows.push_back({.slot = rows.slot,
                         .phase = Phase::kVerify,
                         .start_position = 0,
                         .count = rows.max_rows,
                         .tokens = {},
                         .last_logits = false,
                         .checkpoints = {},
                         .has_rules = of_round.has_rules,
                         .log_probs = of_round.log_probs});
  }
  hash_ = ChainHash(hash_, plan);
  plan.hash = hash_;
  return sender_->Send(plan);
}

}  // namespace dflash
