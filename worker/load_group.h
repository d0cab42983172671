// Builds everything a rank runs from two model folders: nothing is half-loaded, and the first thing wrong
// is the error.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "base/model_identity.h"
#include "kernels/device/stream.h"
#include "text/tokenizer.h"
#include "worker/cache/sequence_table.h"
#include "worker/draft/dflash_drafter.h"
#include "worker/engine/engine.h"
#include "worker/memory_plan.h"
#include "worker/model/feature_contract.h"
#include "worker/model/generation_config.h"
#include "worker/model/target.h"
#include "worker/rank/follower.h"

namespace dflash {

// EngineOptions::least_survival of groups that choose the lengths of blocks. A row's share of a round of
// whole blocks times the tokens of such a round: 0.4 to 0.6 on every CPU measured, and what is lost beside it
// is little.
inline constexpr double kLeastSurvival = 0.5;

struct GroupOptions {
  std::string model;        // folder of the target
  std::string draft_model;  // folder of the drafter; empty: none
  int threads = 0;          // CPU backend: 0 = one per core
  int device = 0;           // CUDA backend: device ordinal
  int64_t max_sequences = 8;
  int64_t max_context_tokens = 0;  // 0: what the target allows
  // Tokens in the paged pools. 0: with memory_fraction as many as fit, else max_sequences whole contexts, on
  // a GPU as far as they fit into nine tenths of its memory.
  int64_t cache_tokens = 0;
  double memory_fraction = 0;        // of the device's memory that the group may use in all; 0: not said
  int64_t max_prefill_tokens = 0;    // prefill rows of a step; 0: what suits the backend (PrefillRows)
  bool adaptive_blocks = true;       // EngineOptions::adaptive_blocks
  int64_t max_verify_rows = 0;       // EngineOptions::max_verify_rows
  int64_t checkpoints = 0;           // of recurrent states, for the prefix cache; 0: there is none
  bool drafter_digests = false;      // reads all of the drafter once more, for Group::fingerprints
  bool allow_unlisted_keys = false;  // of configuration files
  // Weights are made from this seed (docs/spec/random-weights.md): the folders hold configurations and no
  // weights, and may lack a tokenizer.
  std::optional<uint64_t> random_weights;
  std::string defect;                    // to be planted; empty: none. Builds of the preset `defects` only
  Communicator* communicator = nullptr;  // of this rank, not owned; null: a group of one
  DraftPlacement draft_placement = DraftPlacement::kRankZero;
  int64_t shard_residual_rows = 0;  // Target::Options
};

// Prompt rows of a step: `wanted`, or what suits the backend where that is 0. On a GPU every step reads all
// weights, so there a step has many rows; on a CPU rows cost what they cost, so few of them let short prompts
// pass long ones.
int64_t PrefillRows(int64_t wanted);

struct Group {
  std::unique_ptr<Stream> stream;
  std::unique_ptr<SequenceTable> table;
  std::unique_ptr<Tokenizer> tokenizer;  // null: none (random weights only)
  std::unique_ptr<Target> target;
  std::unique_ptr<Drafter> drafter;  // null: none. A DraftFollower where rank 0 drafts alone
  DFlashDrafter* dflash = nullptr;   // in `drafter`, below whatever wraps it; null: none on this rank
  GenerationConfig generation;
  FeatureContract contract;  // meaningful with a drafter
  ModelIdentity model;
  // Of all stored tensors (Checkpoint::fingerprints), by "target NAME" and "drafter NAME"; where they are
  // wanted, digests of the drafter's (Checkpoint::ReadDigests) by "whole drafter NAME".
  std::map<std::string, std::string> fingerprints;
  int64_t max_context_tokens = 0;
  bool adaptive_blocks = true;
  int64_t max_verify_rows = 0;
  int64_t vocabulary = 0;  // real token ids: the tokenizer's, or all rows of the head
  int64_t bytes_read = 0;  // of weights, this rank's share
  MemoryPlan memory;

  // The leader's engine over all this, warmed up. `observer` and `ranks` (the group's other ranks) are not
  // owned and may be null.
  absl::StatusOr<std::unique_ptr<Engine>> MakeEngine(int64_t max_prefill_tokens, StepObserver* observer,
                                                     RankLeader* ranks = nullptr) const;
  // What carries out the leader's plans on another rank; to be warmed up together with the leader's engine.
  absl::StatusOr<std::unique_ptr<RankFollower>> MakeFollower() const;
  // Beyond so many sequences, capturing all shapes takes longer than the odd request waits for one.
  static constexpr int64_t kWarmSequences = 8;
};

// `log` gets one line per finding (checkpoints, warnings, the feature contract) and of progress.
// Errors: those of configurations, checkpoints, tokenizer and backend; InvalidArgument naming the option that
// is out of range; ResourceExhausted when the pools do not fit.
absl::StatusOr<Group> LoadGroup(const GroupOptions& options,
                                const std::function<void(const std::string&)>& log);

}  // namespace dflash
