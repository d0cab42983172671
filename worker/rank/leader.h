// Rank 0's side of a step in a group of several ranks: tells the others what the engine has decided.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/sampling/sampling.h"
#include "worker/cache/state_checkpoint.h"
#include "worker/model/target.h"
#include "worker/rank/plan.h"

namespace dflash {

// Takes plans to the other ranks; the rank channel, or a queue in tests.
class PlanSender {
 public:
  virtual ~PlanSender() = default;
  // Does not wait for the plan to be carried out. Unavailable: a rank is lost.
  virtual absl::Status Send(const RankPlan& plan) = 0;
};

// The engine calls it in this order: OnOpen, OnGrow and OnClose whenever a slot changes hands or gets pages,
// then for every step Begin, before anything of the step runs. Engine thread only.
class RankLeader {
 public:
  explicit RankLeader(PlanSender* sender) : sender_(sender) {}  // not owned

  void OnOpen(int32_t slot, const SamplingParams& sampling, const StateCheckpoint& begin);
  void OnGrow(int32_t slot, std::vector<int32_t> pages);
  void OnClose(int32_t slot);

  // The rows that one verification may have.
  struct VerifyRows {
    int32_t slot = 0;
    int64_t max_rows = 0;  // anchor and drafts
  };
  // Sends the step's plan: `known` are the rows whose tokens the host knows (RankPlan::Rows), `verify` those
  // of the round, `block_rows` as in DecodeRounds::Enqueue; how logits of prompts' last rows and of the round
  // are processed.
  absl::Status Begin(const std::vector<SequenceRows>& known, const RowProcessing& of_prompts,
                     const std::vector<VerifyRows>& verify, const RowProcessing& of_round,
                     int64_t draft_sequences, int64_t block_rows);

 private:
  PlanSender* const sender_;
  uint64_t number_ = 0;
  uint64_t hash_ = 0;
  std::vector<RankPlan::SlotChange> slots_;  // since the last plan
};

}  // namespace dflash
