#include "worker/rpc/rank_messages.h"

#include <openssl/crypto.h>
#include <openssl/rand.h>

#include <array>

#include "base/check.h"
#include "base/sha256.h"

namespace dflash {

namespace {

using SlotChangeKind = RankPlan::SlotChange::Kind;

wire::SlotChange::Kind ToMessage(SlotChangeKind kind) {
  switch (kind) {
    case SlotChangeKind::kOpen:
      return wire::SlotChange::KIND_OPEN;
    case SlotChangeKind::kGrow:
      return wire::SlotChange::KIND_GROW;
    case SlotChangeKind::kClose:
      return wire::SlotChange::KIND_CLOSE;
  }
  DFLASH_CHECK(false);
  return wire::SlotChange::KIND_UNSPECIFIED;
}

// Anything unknown becomes a plan whose hash does not agree.
SlotChangeKind FromMessage(wire::SlotChange::Kind kind) {
  if (kind == wire::SlotChange::KIND_OPEN) return SlotChangeKind::kOpen;
  return kind == wire::SlotChange::KIND_GROW ? SlotChangeKind::kGrow : SlotChangeKind::kClose;
}

void Fill(const StateCheckpoint& checkpoint, wire::Checkpoint* message) {
  message->set_position(checkpoint.position);
  message->set_index(checkpoint.index);
}

StateCheckpoint FromMessage(const wire::Checkpoint& message) {
  return {.position = message.position(), .index = message.index()};
}

}  // namespace

wire::RankPlan ToMessage(const RankPlan& plan) {
  wire::RankPlan message;
  message.set_number(plan.number);
  message.set_hash(plan.hash);
  for (const RankPlan::SlotChange& change : plan.slots) {
    wire::SlotChange* slot = message.add_slots();
    slot->set_kind(ToMessage(change.kind));
    slot->set_slot(change.slot);
    slot->mutable_pages()->Assign(change.pages.begin(), change.pages.end());
    if (change.kind != RankPlan::SlotChange::Kind::kOpen) continue;
    slot->set_temperature(change.sampling.temperature);
    slot->set_top_k(change.sampling.top_k);
    slot->set_top_p(change.sampling.top_p);
    slot->set_min_p(change.sampling.min_p);
    slot->set_seed(change.sampling.seed);
    if (change.begin.position > 0) Fill(change.begin, slot->mutable_begin());
  }
  message.set_draft_sequences(plan.draft_sequences);
  message.set_block_rows(plan.block_rows);
  for (const RankPlan::Rows& planned : plan.rows) {
    wire::PlannedRows* rows = message.add_rows();
    rows->set_slot(planned.slot);
    rows->set_verify(planned.phase == Phase::kVerify);
    rows->set_start_position(planned.start_position);
    rows->set_count(planned.count);
    rows->mutable_tokens()->Assign(planned.tokens.begin(), planned.tokens.end());
    rows->set_last_logits(planned.last_logits);
    for (const StateCheckpoint& checkpoint : planned.checkpoints) Fill(checkpoint, rows->add_checkpoints());
    rows->set_rules(planned.has_rules);
    rows->set_logprobs(planned.log_probs);
    if (planned.prompt_log_probs == 0) continue;
    rows->set_prompt_logprobs(planned.prompt_log_probs);
    rows->set_next_token(planned.next_token);
  }
  return message;
}

RankPlan FromMessage(const wire::RankPlan& message) {
  RankPlan plan;
  plan.number = message.number();
  plan.hash = message.hash();
  for (const wire::SlotChange& change : message.slots()) {
    RankPlan::SlotChange& slot = plan.slots.emplace_back();
    slot.kind = FromMessage(change.kind());
    slot.slot = change.slot();
    slot.pages.assign(change.pages().begin(), change.pages().end());
    if (slot.kind != RankPlan::SlotChange::Kind::kOpen) continue;
    slot.sampling = {.temperature = change.temperature(),
                     .top_k = change.top_k(),
                     .top_p = change.top_p(),
                     .min_p = change.min_p(),
                     .seed = change.seed()};
    if (change.has_begin()) slot.begin = FromMessage(change.begin());
  }
  plan.draft_sequences = message.draft_sequences();
  plan.block_rows = message.block_rows();
  for (const wire::PlannedRows& rows : message.rows()) {
    plan.rows.push_back({.slot = rows.slot(),
                         .phase = rows.verify() ? Phase::kVerify : Phase::kPrefill,
                         .start_position = rows.start_position(),
                         .count = rows.count(),
                         .tokens = {rows.tokens().begin(), rows.tokens().end()},
                         .last_logits = rows.last_logits()});
    for (const wire::Checkpoint& checkpoint : rows.checkpoints())
      plan.rows.back().checkpoints.push_back(FromMessage(checkpoint));
    plan.rows.back().has_rules = rows.rules();
    plan.rows.back().log_probs = rows.logprobs();
    if (rows.prompt_logprobs() == 0) continue;
    plan.rows.back().prompt_log_probs = rows.prompt_logprobs();
    plan.rows.back().next_token = rows.next_token();
  }
  return plan;
}

wire::Abort ToAbort(const absl::Status& status) {
  wire::Abort message;
  message.set_code(static_cast<int32_t>(status.code()));
  message.set_message(std::string(status.message()));
  return message;
}

absl::Status FromAbort(const wire::Abort& message) {
  return absl::Status(static_cast<absl::StatusCode>(message.code()), message.message());
}

std::string RandomNonce() {
  std::string nonce(32, 0);
  DFLASH_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), static_cast<int>(nonce.size())) ==
               1);
  return nonce;
}

std::string Proof(const std::string& secret, const std::string& purpose, const std::string& nonce,
                  const std::string& group_id, uint32_t rank, uint64_t epoch) {
  if (secret.empty()) return "";
  // Each part with its length, so that no two lists of parts look alike.
  std::string text;
  const auto add = [&](const std::string& part) { text += std::to_string(part.size()) + ":" + part; };
  for (const std::string& part : {purpose, nonce, group_id, std::to_string(rank), std::to_string(epoch)})
    add(part);
  return HmacSha256(secret, text);
}

bool SameProof(const std::string& a, const std::string& b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace dflash
