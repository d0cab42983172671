// The DFlash block-diffusion drafter: one parallel pass proposes a whole block.
// Sources: Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036);
// docs/spec/dflash.md.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/stream.h"
#include "worker/cache/sequence_table.h"
#include "worker/draft/drafter.h"
#include "worker/model/checkpoint.h"
#include "worker/model/feature_contract.h"
#include "worker/model/target.h"

namespace dflash {

// What a block pass has just computed, in the order of computation. Rows are those of all blocks, in the
// activation dtype; columns this rank's. Behind the last layer's attention they are the first 1 + depth of
// each block.
enum class DraftStage : uint8_t {
  kLayerInput,  // residual before layer `layer`; layer 0: the embeddings, the number of layers: the last one
  kQuery,       // normed and rotated
  kKey,         // normed and rotated, of the block's own rows
  kValue,
  kAttended,  // output of the attention, before o_proj
  kOutput,    // final norm: what goes through the target's head
};
// Sees the stages of a block pass and may change them (doctor): what it enqueues on the drafter's stream
// comes before the next stage. `layer` counts for all but kOutput.
using DraftObserver = std::function<absl::Status(DraftStage stage, size_t layer, MatrixView rows)>;

class DFlashDrafter final : public Drafter {
 public:
  struct Options {
    int64_t max_sequences = 8;      // in one Propose
    int64_t max_ingest_rows = 512;  // in one Ingest call of the kernels; longer ones are cut
    int64_t vocabulary = 0;         // real token ids: the choice is restricted to [0, vocabulary)
  };

  // Everything that defines the drafter's arithmetic (taps, masks, windows, rotation, form of the norms,
  // block size, mask id) is taken from `contract`. Shares embedding and head with `target`; keeps its context
  // keys and values in pages of `table`. In a group it runs where the target's draft placement says: whole on
  // rank 0 (the others run a DraftFollower), or a share of its heads and channels on every rank. Target,
  // table and stream are not owned. Errors: those of the checkpoint and of RankConfig; InvalidArgument when
  // contract, checkpoint and target disagree; ResourceExhausted.
  static absl::StatusOr<std::unique_ptr<DFlashDrafter>> Load(const DraftConfig& config,
                                                             const DraftCheckpoint& checkpoint,
                                                             const FeatureContract& contract,
                                                             const Options& options, Target* target,
                                                             SequenceTable* table, const Stream& stream,
                                                             const ReadProgress& progress = {});
  ~DFlashDrafter() override;

  int64_t max_drafts() const override;
  absl::Status Ingest(ConstMatrixView taps, const std::vector<CommittedRows>& rows) override;
  absl::Status IngestVerified(ConstMatrixView taps, SegmentList segments, const int32_t* row_counts) override;
  absl::Status Propose(DecodeStates states, const int32_t* slots, int64_t count,
                       const Proposals& proposals) override;
  absl::Status Open(int32_t slot, int64_t start) override;

  // Proposes for one anchor that the host knows and leaves last_draft_logits() (golden tests, doctor).
  absl::Status ProposeAt(int32_t slot, int32_t anchor, int64_t position);
  // Views of intermediate results of the last call, valid until the next one (golden tests, doctor).
  ConstMatrixView last_context_features() const;  // activation dtype [rows ingested, D]: c = norm(fc taps)
  ConstMatrixView last_draft_logits() const;      // f32 [slots * depth, target's logits_cols()]

  // Not while rounds are captured.
  void set_observer(DraftObserver observer);

  // One sequence's context keys and values per layer, as ExportState of the target.
  absl::StatusOr<std::vector<std::vector<float>>> ExportContext(int32_t slot);
  // Overwrites the context in whole pages (tests: what nobody may read, or what was lost).
  absl::Status FillPages(const std::vector<int32_t>& pages, float value);

 private:
  class Impl;
  explicit DFlashDrafter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dflash
