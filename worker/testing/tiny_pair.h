// The tiny pair of models/, loaded for tests, with places to plant defects; and the golden data it is held
// against. The tests of the engine are written once for all backends: what each owes the golden data is here.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device/stream.h"
#include "text/tokenizer.h"
#include "worker/cache/sequence_table.h"
#include "worker/draft/dflash_drafter.h"
#include "worker/draft/draft_follower.h"
#include "worker/engine/engine.h"
#include "worker/model/feature_contract.h"
#include "worker/model/target.h"

namespace dflash::testing {

struct TinyPairOptions {
  int threads = 2;
  int64_t slots = 4;
  int64_t max_tokens = 1024;  // per sequence
  int64_t checkpoints = 0;    // of the prefix cache; 0: there is none
  int64_t pages = 0;          // of all sequences; 0: as many as the slots can need
  std::string target_dir;     // empty: models/tiny-qwen3.6
  std::string draft_dir;      // empty: models/tiny-qwen3.6-dflash
  // Folders with configurations only: weights made from this seed, no tokenizer, all rows of the head are
  // tokens.
  std::optional<uint64_t> random_weights;
  // One rank of a group; see Target::Options.
  Communicator* communicator = nullptr;
  DraftPlacement draft_placement = DraftPlacement::kRankZero;
  int64_t shard_residual_rows = 0;
  // Changes what was loaded, before target and drafter are built from it.
  std::function<void(FeatureContract&)> mutate_contract;
  std::function<void(TargetConfig&)> mutate_target_config;
};

// Copies models/tiny-qwen3.6 to `folder` and makes element `element` (in row-major order) of a tensor NaN.
absl::Status CopyTargetWithNan(const std::string& folder, const std::string& tensor, int64_t element);

struct TinyPair {
  std::unique_ptr<Stream> stream;
  std::unique_ptr<SequenceTable> table;
  std::unique_ptr<Target> target;
  std::unique_ptr<DFlashDrafter> drafter;         // null on ranks that only follow
  std::unique_ptr<DraftFollower> draft_follower;  // there
  std::unique_ptr<Tokenizer> tokenizer;
  FeatureContract contract;
  int64_t vocabulary = 0;
  int64_t target_bytes_read = 0, draft_bytes_read = 0;  // of weights

  // Whichever of the two this rank has.
  Drafter* rank_drafter() const {
    return drafter != nullptr ? static_cast<Drafter*>(drafter.get()) : draft_follower.get();
  }
};

absl::StatusOr<TinyPair> LoadTinyPair(const TinyPairOptions& options = {});

// A file or folder of the source tree: where it was built, or below $DFLASHD_SOURCE_DIR on another machine.
std::string SourcePath(const std::string& path);

// One prompt of tests/golden/golden.json.
struct GoldenPrompt {
  std::string kind;
  std::string text;
  std::vector<int32_t> prompt_ids;
  std::vector<int32_t> output_ids;
  std::string output_text;
  std::vector<int64_t> acceptance_lengths;
  double min_top2_gap = 0;
};
absl::StatusOr<std::vector<GoldenPrompt>> LoadGoldenPrompts();

// What the backend of this program owes the golden data, which were computed in float32.
struct Demands {
  bool same_tokens;        // every token and acceptance length is the golden one
  double chat_mean;        // relative error of the mean tokens per round
  double defect_mean;      // the same with a planted defect
  double safe_gap;         // logits further apart than this keep their order
  double flips;            // share of all positions that may choose another token
  double tensors;          // max |error| / rms of the golden tensors
  double prefilled_state;  // max |error| / rms between decoded and prefilled state
};
const Demands& BackendDemands();

// Replaces output_ids by what this backend decodes greedily, one token a step. Changes nothing where
// BackendDemands().same_tokens.
absl::Status UseOwnOutputs(std::vector<GoldenPrompt>& prompts);

// Mean of accepted + 1 over all rounds of the kind "chat", from golden/README.md.
inline constexpr double kGoldenChatMean = 10.147;

// A float32 tensor of tests/golden/golden_tensors.safetensors.
struct GoldenTensor {
  std::vector<int64_t> shape;
  std::vector<float> values;
};
absl::StatusOr<GoldenTensor> LoadGoldenTensor(const std::string& name);

// What a request gave.
struct GenerationOutcome {
  absl::Status status;  // of OnFailed
  StartedReport started;
  std::vector<int32_t> tokens;
  std::string text;
  std::vector<RoundReport> rounds;
  std::vector<TokenLogProbs> log_probs, prompt_log_probs;
  FinishedReport finished;
  bool done = false;
};

// Greedy, stops at the model's end tokens, at most 128 tokens: as the golden outputs were made.
GenerationRequest GoldenRequest(const GoldenPrompt& prompt);

// A sink that writes down what happens.
std::unique_ptr<RequestSink> Record(GenerationOutcome* outcome);

// Runs requests to their ends on the calling thread, all submitted at once. Outcomes are in the order of the
// requests.
absl::StatusOr<std::vector<GenerationOutcome>> RunAll(Engine& engine,
                                                      std::vector<GenerationRequest> requests);

// An engine over the pair with another drafter (null: plain decoding).
absl::StatusOr<std::unique_ptr<Engine>> MakeEngine(TinyPair& pair, Drafter* drafter,
                                                   StepObserver* observer = nullptr);

// max |a - b| / rms(b): how the golden tensors are compared.
double RelativeError(const std::vector<float>& actual, const std::vector<float>& expected);

}  // namespace dflash::testing
