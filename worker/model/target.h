// The target model: one forward entry for prompts, plain decoding and verification.
// Sources: docs/spec/qwen3_5.md "Forward pass", "GDN mixer", "Full-attention mixer".
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/layer_index.h"
#include "base/matrix_view.h"
#include "base/phase.h"
#include "kernels/device/stream.h"
#include "kernels/sampling/sharded_sampling.h"
#include "worker/cache/sequence_table.h"
#include "worker/comm/communicator.h"
#include "worker/model/checkpoint.h"
#include "worker/model/row_processing.h"
#include "worker/model/step_batch.h"
#include "worker/model/target_config.h"

namespace dflash {

// Half-open range of rows.
struct RowRange {
  int64_t first = 0;
  int64_t count = 0;
};

// Views into the target's memory, valid until the next Forward. `rows[i]` and `logits_rows[i]` belong to
// sequences[i].
struct ForwardResult {
  MatrixView logits;  // f32 [R, logits_cols()]: of this rank's part of the vocabulary; read by Sample
  MatrixView taps;    // activation dtype [T, taps * D]: the tapped residuals of a row, in tap order
  std::vector<RowRange> rows;         // in taps
  std::vector<RowRange> logits_rows;  // in logits
  // Of the tokens that follow the rows of sequences[i], the first row's first; empty where they are not
  // wanted.
  std::vector<std::vector<TokenLogProbs>> log_probs = {};
};

// The rows of a verification as the device describes them: nobody on the host knows their tokens and
// positions, or how many of them are used. Rows outside every segment are computed and mean nothing.
struct VerifyRows {
  const int32_t* tokens = nullptr;  // device memory, one per row, all inside the vocabulary
  SegmentList segments;             // a slot at most once
  int64_t rows = 0;
};
// Views into the target's memory, valid until the next Forward or Verify.
struct VerifyResult {
  MatrixView logits;  // f32 [rows, padded vocabulary]
  MatrixView taps;    // activation dtype [rows, taps * D]
};

// Sees hidden states on their way (golden tests, doctor): `rows` are those of one phase, in batch order.
// State 0 is the embedding, k the residual after layer k - 1, the last one is after the final norm. Where the
// residual is sharded, this rank's rows.
using HiddenStateObserver = std::function<void(HiddenStateIndex state, Phase phase, ConstMatrixView rows)>;
// May replace rows of a hidden state that is the input of a layer (comparisons that give every layer the
// reference's input): state k becomes the input of layer k, after observer and taps have seen our own.
// Returns whether it has. What it enqueues on the target's stream comes before the layer.
using HiddenStateForcing =
    std::function<absl::StatusOr<bool>(HiddenStateIndex state, Phase phase, MatrixView rows)>;

// Which ranks of a group run the drafter.
enum class DraftPlacement : uint8_t { kRankZero, kSharded };

// One rank's share of the model: whole heads, feed-forward channels, rows of the vocabulary. In a group every
// rank makes the same calls in the same order with the same arguments, unless said otherwise below; they
// exchange data inside Forward, Embed, Head, Sample and ChooseDrafts. A group of one is the whole model.
class Target {
 public:
  struct Options {
    std::vector<LayerIndex> taps;    // layers whose output residual the drafter wants, in its order
    int64_t max_prefill_rows = 512;  // rows of one step, by phase
    int64_t max_verify_rows = 128;
    int64_t max_block_rows = 16;           // rows of one sequence in a verification
    int64_t max_logits_rows = 0;           // 0: max_verify_rows + one per sequence
    int64_t checkpoints = 0;               // that can be kept at a time
    Communicator* communicator = nullptr;  // not owned; null: a group of one
    DraftPlacement draft_placement = DraftPlacement::kRankZero;
    // Rows of one phase from which the residual is sharded by rows over the ranks; 0: 64 per rank, but more
    // than the communicator sums in one step.
    int64_t shard_residual_rows = 0;
  };

  // Reads the rank's weights and makes the pools that `table` indexes. `table` and `stream` are not owned and
  // must outlive it. Errors: those of the checkpoint and of RankConfig; ResourceExhausted; InvalidArgument
  // for a tap that is no layer or is the last one.
  static absl::StatusOr<std::unique_ptr<Target>> Load(const TargetConfig& config,
                                                      const TargetCheckpoint& checkpoint,
                                                      const Options& options, SequenceTable* table,
                                                      const Stream& stream,
                                                      const ReadProgress& progress = {});
  ~Target();

  // Starts a new sequence in a slot: its recurrent and conv states are zero. (Key/value pages need no
  // clearing: only committed positions are ever read.)
  absl::Status Open(int32_t slot);
  // Starts a sequence whose first tokens are a checkpoint's: gives the slot a copy of its states. The pages
  // of those tokens and the lengths are the caller's. InvalidArgument: no such checkpoint.
  absl::Status Restore(int32_t slot, int32_t checkpoint);

  // Runs all rows of the step: PREFILL rows are committed (key/value pages, recurrent and conv states);
  // VERIFY rows change nothing until Commit. Slots need pages for start_position + rows
  // (SequenceTable::Reserve). Errors: InvalidArgument (start_position is not the slot's length, too many
  // rows, token out of range, a slot twice, a checkpoint off the grid or out of the rows, log probabilities
  // of rows that are not PREFILL), Unimplemented (a verify plan that is not a chain).
  absl::StatusOr<ForwardResult> Forward(const StepBatch& batch);

  // Commits the first accepted_rows rows of each VERIFY sequence of the last Forward; once per Forward.
  struct Accepted {
    int32_t slot = 0;
    int64_t rows = 0;  // [1, rows in the batch]
  };
  absl::Status Commit(const std::vector<Accepted>& accepted);

  // The same for rows in device memory, enqueued without a look at them, so that a decode round can be
  // captured. The host's lengths follow from SequenceTable::TakeLengths. row_counts: int32 [segments], device
  // memory; [0, rows of the segment]. Errors: InvalidArgument (too many rows).
  absl::StatusOr<VerifyResult> Verify(const VerifyRows& rows);
  absl::Status CommitVerified(const VerifyRows& rows, const int32_t* row_counts);

  // Folds pending delta records of a slot into its recurrent state (before a checkpoint, preemption or
  // comparison).
  absl::Status FoldPending(int32_t slot);

  // The target's own tokens for rows of the last logits: SampleRows over all ranks' parts, the same tokens on
  // every rank. `reach` covers every row. Errors: as SampleRows; those of the communicator.
  absl::Status Sample(ConstMatrixView logits, const SamplingParams* params, const int64_t* positions,
                      int64_t vocabulary, SamplingReach reach, int32_t* tokens);

  // The same for rows with rules or log probabilities; ShardedSampler::SampleProcessed.
  absl::Status SampleProcessed(MatrixView logits, const SamplingParams* params, const int64_t* positions,
                               int64_t vocabulary, SamplingReach reach, const RowProcessing& processing,
                               int32_t* tokens, std::vector<TokenLogProbs>* log_probs);

  // What the drafter shares. With the drafter on rank 0 its ids and x count: other ranks may pass null ids,
  // and their x becomes rank 0's. ids: int32 [T], device memory; y: activation dtype [T, D], dense. T is at
  // most the most rows of a step.
  absl::Status Embed(const int32_t* ids, MatrixView y);
  // logits = x lm_headᵀ without the target's final norm; x: activation dtype [R, D], dense; logits: f32 [R,
  // logits_cols()]. phase: of the arithmetic.
  absl::Status Head(MatrixView x, Phase phase, MatrixView logits);
  // The drafter's choice over all ranks' parts (kernels/sampling/draft_choice.h), the same tokens and
  // confidences on every rank. confidences may be null.
  absl::Status ChooseDrafts(ConstMatrixView logits, int64_t vocabulary, int32_t* tokens, float* confidences);
  // Columns of the logits: rows of the head that this rank has, padding included.
  int64_t logits_cols() const;

  // One sequence's committed state as plain numbers, in a fixed order (tests, doctor): per attention layer
  // keys then values [length, kv_heads * head_dim], per linear layer S and the conv state: this rank's heads.
  // Folds pending records first.
  absl::StatusOr<std::vector<std::vector<float>>> ExportState(int32_t slot);
  // Overwrites keys and values of whole pages (tests: what nobody may read).
  absl::Status FillPages(const std::vector<int32_t>& pages, float value);

  void set_observer(HiddenStateObserver observer);
  // Only in a group of one, whose rows are all here.
  void set_forcing(HiddenStateForcing forcing);
  const TargetConfig& config() const;  // of the whole model
  const std::vector<LayerIndex>& taps() const;
  Communicator& communicator() const;
  DraftPlacement draft_placement() const;
  int64_t checkpoints() const;

 private:
  class Impl;
  explicit Target(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dflash
