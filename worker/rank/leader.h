// Rank 0's side of a step in a group of several ranks: tells the others what the engine has decided.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/buffer.h"
#include "kernels/device/stream.h"
#include "worker/comm/communicator.h"
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

// The engine calls it in this order: OnOpen and OnClose whenever a slot changes hands, then for every step
// Begin, ShareTokens when the step verifies, the target's forward, ShareAccepted when it verifies, the
// target's commit. Engine thread only.
class RankLeader {
 public:
  // Room for the broadcasts: verify rows of all sequences. Sender, communicator and stream are not owned.
  static absl::StatusOr<std::unique_ptr<RankLeader>> Create(int64_t max_sequences, int64_t max_block_rows,
                                                            PlanSender* sender, Communicator* communicator,
                                                            const Stream& stream);

  void OnOpen(int32_t slot, int64_t reserved_tokens, const SamplingParams& sampling);
  void OnClose(int32_t slot);

  // The rows that one verification may have.
  struct VerifyRows {
    int32_t slot = 0;
    int64_t start_position = 0;
    int64_t max_rows = 0;  // anchor and drafts
  };
  // Sends the step's plan: `prefill` are the prompt rows at the front of the batch, `verify` what follows.
  absl::Status Begin(const std::vector<SequenceRows>& prefill, const std::vector<VerifyRows>& verify,
                     int64_t draft_sequences);
  // Broadcasts the tokens of the verifications, one list for each in Begin's order, of 1 to max_rows tokens.
  absl::Status ShareTokens(const std::vector<const std::vector<int32_t>*>& tokens);
  // Broadcasts how many rows of each verification are committed.
  absl::Status ShareAccepted(const std::vector<Target::Accepted>& accepted);

 private:
  RankLeader(PlanSender* sender, Communicator* communicator, const Stream* stream)
      : sender_(sender), communicator_(communicator), stream_(stream) {}
  absl::Status Broadcast(const std::vector<int32_t>& values);

  PlanSender* const sender_;
  Communicator* const communicator_;
  const Stream* const stream_;
  Buffer values_;
  uint64_t number_ = 0;
  uint64_t hash_ = 0;
  std::vector<RankPlan::SlotChange> slots_;  // since the last plan
  std::vector<VerifyRows> verify_;           // of the plan that has been sent
};

}  // namespace dflash
