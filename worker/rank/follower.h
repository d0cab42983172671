// What every rank but the leader does: carries out plans, step by step, without deciding anything.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/buffer.h"
#include "kernels/device/graph.h"
#include "kernels/device/stream.h"
#include "kernels/sampling/sampling.h"
#include "worker/cache/sequence_table.h"
#include "worker/decode/decode_rounds.h"
#include "worker/draft/drafter.h"
#include "worker/model/target.h"
#include "worker/rank/plan.h"

namespace dflash {

class RankFollower {
 public:
  // As the leader's engine (EngineOptions).
  struct Options {
    int64_t vocabulary = 0;
    bool captured_rounds = Graph::IsCaptureCostly();
    int64_t rounds_ahead = Graph::IsCaptureCostly() ? 1 : 0;
  };
  // Target, drafter (this rank's part in drafting, null: the group has none), table and stream are not owned.
  static absl::StatusOr<std::unique_ptr<RankFollower>> Create(const Options& options, Target* target,
                                                              Drafter* drafter, SequenceTable* table,
                                                              const Stream& stream);

  // The leader's Engine::WarmUp: before the first plan, with the same number.
  absl::Status WarmUp(int64_t sequences) { return rounds_->WarmUp(sequences); }

  // Takes part in one step. Its round may still run on the device when this returns: as many as the leader
  // keeps in flight. Errors: those of the communicator; DataLoss: a plan is missing or is not the one that
  // the leader sent; Internal: a slot is not the leader's; those of the target. After any of them the rank
  // cannot go on.
  absl::Status Run(const RankPlan& plan);

  // Waits for the rounds in flight.
  absl::Status Finish();
  bool has_rounds_in_flight() const { return rounds_->in_flight() > 0; }

  uint64_t last_plan() const { return finished_; }  // carried out

 private:
  RankFollower(const Options& options, Target* target, Drafter* drafter, SequenceTable* table,
               const Stream* stream)
      : options_(options), target_(target), drafter_(drafter), table_(table), stream_(stream) {}
  absl::Status ChangeSlots(const RankPlan& plan);
  // The step's known rows: forward, sampling of new prompts that are through, commit, context of the drafter.
  absl::Status RunKnownRows(const RankPlan& plan);
  absl::Status RunRound(const RankPlan& plan);
  // Waits for the oldest round in flight.
  absl::Status CollectRound();

  Options options_;
  Target* const target_;
  Drafter* const drafter_;
  SequenceTable* const table_;
  const Stream* const stream_;
  std::unique_ptr<DecodeRounds> rounds_;
  std::deque<uint64_t> plans_in_flight_;          // of the rounds in flight, oldest first
  Buffer sampling_params_, positions_, sampled_;  // of prompts' last rows
  std::vector<SamplingParams> sampling_;          // per slot
  uint64_t number_ = 0, finished_ = 0;
  uint64_t hash_ = 0;
};

}  // namespace dflash
