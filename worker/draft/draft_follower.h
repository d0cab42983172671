// The drafter of a rank that has none: it takes part in what rank 0's drafter shares with the target. The
// embedding and the head are cut over all ranks, so every proposal needs all of them.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device/buffer.h"
#include "kernels/device/stream.h"
#include "worker/cache/sequence_table.h"
#include "worker/draft/drafter.h"
#include "worker/model/target.h"

namespace dflash {

class DraftFollower final : public Drafter {
 public:
  struct Options {
    int64_t block_size = 0;     // of rank 0's drafter
    int64_t max_sequences = 8;  // as there
    int64_t vocabulary = 0;     // as there
  };
  // Target, table and stream are not owned. InvalidArgument: the target is no follower's, or an option is out
  // of range. ResourceExhausted.
  static absl::StatusOr<std::unique_ptr<DraftFollower>> Create(const Options& options, Target* target,
                                                               SequenceTable* table, const Stream& stream);

  int64_t max_drafts() const override { return options_.block_size - 1; }
  // Context is kept on rank 0; here only its length, so that both ranks' sequences look alike.
  absl::Status Ingest(ConstMatrixView taps, const std::vector<CommittedRows>& rows) override;
  absl::Status IngestVerified(ConstMatrixView taps, SegmentList segments, const int32_t* row_counts) override;
  // Only the number of slots and the depth count. Writes rank 0's proposals.
  absl::Status Propose(DecodeStates states, const int32_t* slots, int64_t count,
                       const Proposals& proposals) override;
  absl::Status Open(int32_t slot, int64_t start) override;

 private:
  DraftFollower(const Options& options, Target* target, SequenceTable* table, const Stream* stream)
      : options_(options), target_(target), table_(table), stream_(stream) {}

  Options options_;
  Target* target_;
  SequenceTable* table_;
  const Stream* stream_;
  Matrix rows_, logits_;
};

}  // namespace dflash
