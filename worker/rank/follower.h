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
#include "worker/cache/sequence_table.h"
#include "worker/comm/communicator.h"
#include "worker/model/target.h"
#include "worker/rank/plan.h"

namespace dflash {

class RankFollower {
 public:
  // `max_block_rows` as the leader's. Target, table, communicator and stream are not owned.
  static absl::StatusOr<std::unique_ptr<RankFollower>> Create(int64_t max_block_rows, Target* target,
                                                              SequenceTable* table,
                                                              Communicator* communicator,
                                                              const Stream& stream);

  // Takes part in one step. Errors: those of the communicator; DataLoss: a plan is missing or is not the one
  // that the leader sent; Internal: a slot is not the leader's; those of the target. After any of them the
  // rank cannot go on.
  absl::Status Run(const RankPlan& plan);

  uint64_t last_plan() const { return number_; }  // carried out

 private:
  RankFollower(Target* target, SequenceTable* table, Communicator* communicator, const Stream* stream)
      : target_(target), table_(table), communicator_(communicator), stream_(stream) {}
  absl::Status ChangeSlots(const RankPlan& plan);
  // Verifies `rows` rows of `count` sequences as the leader describes them, and commits what it accepts.
  absl::Status Verify(const RankPlan& plan, int64_t rows, int64_t count);

  Target* const target_;
  SequenceTable* const table_;
  Communicator* const communicator_;
  const Stream* const stream_;
  Buffer tokens_, segments_, row_counts_;  // of a verification
  PinnedBuffer lengths_;
  std::vector<SamplingParams> sampling_;  // per slot
  uint64_t number_ = 0;
  uint64_t hash_ = 0;
};

}  // namespace dflash
