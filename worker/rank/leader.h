// Rank 0's side of a step in a group of several ranks: tells the others what the engine has decided.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/batch/segments.h"
#include "kernels/device/stream.h"
#include "kernels/round/round.h"
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

// The engine calls it in this order: OnOpen, OnGrow and OnClose whenever a slot changes hands or gets pages,
// then for every step Begin, the target's forward of known rows, and when the step verifies ShareStates, the
// drafter's proposals, ShareRows, the target's verification and sampling, ShareRowCounts, the target's
// commit. Engine thread only.
class RankLeader {
 public:
  // Sender, communicator and stream are not owned.
  RankLeader(PlanSender* sender, Communicator* communicator, const Stream& stream)
      : sender_(sender), communicator_(communicator), stream_(&stream) {}

  void OnOpen(int32_t slot, const SamplingParams& sampling, const StateCheckpoint& begin);
  void OnGrow(int32_t slot, std::vector<int32_t> pages);
  void OnClose(int32_t slot);

  // The rows that one verification may have.
  struct VerifyRows {
    int32_t slot = 0;
    int64_t max_rows = 0;  // anchor and drafts
  };
  // Sends the step's plan: `known` are the rows whose tokens the host knows (RankPlan::Rows), `verify` those
  // of the round.
  absl::Status Begin(const std::vector<SequenceRows>& known, const std::vector<VerifyRows>& verify,
                     int64_t draft_sequences);
  // Broadcasts the states of all slots before a round drafts; device memory.
  absl::Status ShareStates(DecodeStates states);
  // Broadcasts the rows of the verification, as they lie in device memory; `rows` is the sum of max_rows, the
  // segments are in Begin's order.
  absl::Status ShareRows(int32_t* tokens, int64_t rows, Segment* segments, int64_t count);
  // Broadcasts how many rows of each segment are committed; device memory.
  absl::Status ShareRowCounts(int32_t* row_counts, int64_t count);

 private:
  PlanSender* const sender_;
  Communicator* const communicator_;
  const Stream* const stream_;
  uint64_t number_ = 0;
  uint64_t hash_ = 0;
  std::vector<RankPlan::SlotChange> slots_;  // since the last plan
};

}  // namespace dflash
