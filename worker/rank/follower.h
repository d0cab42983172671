// What every rank but the leader does: carries out plans, step by step, without deciding anything.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/buffer.h"
#include "kernels/device/pinned_buffer.h"
#include "kernels/device/stream.h"
#include "kernels/round/round.h"
#include "worker/cache/sequence_table.h"
#include "worker/comm/communicator.h"
#include "worker/draft/drafter.h"
#include "worker/model/target.h"
#include "worker/rank/plan.h"

namespace dflash {

class RankFollower {
 public:
  struct Options {
    int64_t max_block_rows = 1;  // of one verification, as the leader's
    int64_t vocabulary = 0;      // real token ids, as the leader's engine
  };
  // Target, drafter (this rank's part in drafting, null: the group has none), table, communicator and stream
  // are not owned.
  static absl::StatusOr<std::unique_ptr<RankFollower>> Create(const Options& options, Target* target,
                                                              Drafter* drafter, SequenceTable* table,
                                                              Communicator* communicator,
                                                              const Stream& stream);

  // Takes part in one step. Errors: those of the communicator; DataLoss: a plan is missing or is not the one
  // that the leader sent; Internal: a slot is not the leader's; those of the target. After any of them the
  // rank cannot go on.
  absl::Status Run(const RankPlan& plan);

  uint64_t last_plan() const { return number_; }  // carried out

 private:
  RankFollower(const Options& options, Target* target, Drafter* drafter, SequenceTable* table,
               Communicator* communicator, const Stream* stream)
      : options_(options),
        target_(target),
        drafter_(drafter),
        table_(table),
        communicator_(communicator),
        stream_(stream) {}
  absl::Status ChangeSlots(const RankPlan& plan);
  // The step's known rows: forward, sampling of new prompts that are through, commit, context of the drafter.
  absl::Status RunKnownRows(const RankPlan& plan);
  // The step's round: the leader's states, then the same operations on every rank
  // (worker/engine/decode_rounds.cc), with the leader's rows and accepted counts.
  absl::Status RunRound(const RankPlan& plan);

  const Options options_;
  Target* const target_;
  Drafter* const drafter_;
  SequenceTable* const table_;
  Communicator* const communicator_;
  const Stream* const stream_;
  // Device memory of a round.
  Buffer states_, entries_, draft_slots_, proposals_;
  Buffer tokens_, positions_, sampling_params_, segments_, row_counts_, sampled_;
  PinnedBuffer lengths_;
  std::vector<SamplingParams> sampling_;  // per slot
  uint64_t number_ = 0;
  uint64_t hash_ = 0;
};

}  // namespace dflash
