// Runs the serving path and writes down what it computes, interface by interface. Every rank of a group makes
// the same calls in the same order; numbers are recorded on rank 0, the others' records are empty where they
// hold no numbers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tools/doctor/draft_reference.h"
#include "worker/engine/engine.h"
#include "worker/engine/request.h"
#include "worker/golden/rows.h"
#include "worker/load_group.h"

namespace dflash::doctor {

using golden::Rows;

// One draft pass of one sequence, stage by stage.
struct DraftPass {
  struct Layer {
    Rows q, k, v, attended;
  };
  std::vector<Rows> residuals;  // before layer 0 (the embeddings) ... behind the last one
  std::vector<Layer> layers;
  Rows output;  // of the final norm, row 0 included
  Rows logits;  // rows 1 .. B - 1; this rank's columns
  std::vector<int32_t> proposals;

  int64_t rows() const { return static_cast<int64_t>(proposals.size()) + 1; }  // the anchor's, one per draft
};

// A prompt, taken in from nothing, and its first draft pass.
struct SequenceRecord {
  std::vector<int32_t> tokens;
  int32_t anchor = 0;               // at position tokens.size()
  std::vector<Rows> hidden_states;  // of the first rows, at most 64; by hidden-state index
  Rows taps;                        // of all rows
  Rows features;                    // of all rows
  Rows last_logits;                 // of the last row; this rank's columns
  int64_t context_start = 0, context_end = 0;
  std::vector<LayerContext> context;  // positions [0, context_end), whatever of it is visible
  DraftPass pass;

  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
  double coverage() const {
    return static_cast<double>(context_end - context_start) / static_cast<double>(length());
  }
};

struct ScriptedRound {
  int64_t planned = 0;  // drafts that are right; the next one is wrong on purpose
  int64_t anchor_position = 0;
  int32_t rows = 0, emitted = 0, accepted = 0, position = 0;
  std::vector<int32_t> tokens;
};

// The same text, decoded token by token and in rounds with a wrong draft at every depth in turn.
struct RoundsRecord {
  int64_t start = 0;                  // position of the first anchor
  std::vector<int32_t> continuation;  // token by token
  std::vector<ScriptedRound> rounds;
  std::vector<int32_t> speculative;                                // what the rounds emitted
  std::vector<std::vector<float>> plain_state, speculative_state;  // of the target
  std::vector<LayerContext> plain_context, speculative_context;    // of the drafter
};

struct EngineRun {
  absl::Status status;
  std::vector<int32_t> tokens;
  std::vector<RoundReport> rounds;
  StartedReport started;
  FinishedReport finished;

  double tokens_per_round() const;
};

class Probe {
 public:
  // The group is not owned and has a drafter.
  explicit Probe(Group* group) : group_(group) {}

  // Prompt in chunks of `chunk` rows (a multiple of 64), then one draft pass.
  absl::StatusOr<SequenceRecord> RunSequence(const std::vector<int32_t>& tokens, int32_t anchor,
                                             int64_t chunk);

  struct Together {
    std::vector<Rows> logits;                     // per sequence
    std::vector<std::vector<int32_t>> proposals;  // per sequence
    std::vector<std::vector<int32_t>> hot;        // the same at temperature 1
    std::vector<int32_t> forced;                  // with every row's output replaced by `forced_output`
  };
  // Drafts for all sequences in one pass. forced_output: [1, D]; empty on ranks without drafter.
  absl::StatusOr<Together> RunTogether(const std::vector<const SequenceRecord*>& sequences,
                                       const Rows& forced_output);

  // As many tokens as one wrong draft at every depth of the block takes.
  absl::StatusOr<RoundsRecord> RunRounds(const std::vector<int32_t>& prompt, int32_t anchor);

  // Logits of `tokens` after the prompt, as rows of one verification and one by one.
  struct VerifyRecord {
    Rows together, alone;
  };
  absl::StatusOr<VerifyRecord> RunVerify(const std::vector<int32_t>& prompt,
                                         const std::vector<int32_t>& tokens);

  // One engine; the requests of a wave are submitted at once, a wave when the one before it has ended.
  using Wave = std::vector<GenerationRequest>;
  struct EngineRuns {
    std::vector<std::vector<EngineRun>> waves;
    int64_t preemptions = 0;
    std::vector<DecodedRound> decoded;  // all rounds of all waves
  };
  // pages: as many are left to the engine; 0: all.
  absl::StatusOr<EngineRuns> RunEngine(std::vector<Wave> waves, int64_t max_prefill_tokens,
                                       int64_t pages = 0);

  int64_t block_size() const { return group_->drafter->max_drafts() + 1; }
  Group& group() const { return *group_; }

 private:
  struct Slot;  // open while it lives
  bool leads() const { return group_->dflash != nullptr; }
  absl::StatusOr<Rows> Read(ConstMatrixView matrix) const;
  absl::Status Prefill(int32_t slot, const std::vector<int32_t>& tokens, int64_t chunk,
                       SequenceRecord* record);
  absl::StatusOr<std::vector<std::vector<int32_t>>> Propose(const std::vector<int32_t>& slots,
                                                            const std::vector<int32_t>& anchors,
                                                            const std::vector<int64_t>& positions,
                                                            float temperature);
  absl::StatusOr<std::vector<LayerContext>> ReadContext(int32_t slot);

  Group* group_;
};

}  // namespace dflash::doctor
