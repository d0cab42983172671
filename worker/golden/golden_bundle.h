// Golden bundles: what another implementation computed for a pair of checkpoints, in a folder that any engine
// can write. The format is docs/golden-bundle.md; tools/reference/record_golden.py writes it from PyTorch,
// `dflashctl golden record` from this program.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "worker/golden/rows.h"
#include "worker/model/draft_config.h"
#include "worker/model/feature_contract.h"
#include "worker/model/safetensors.h"
#include "worker/model/target_config.h"

namespace dflash::golden {

// How the drafter has to be read, as literals.
struct ExpectedContract {
  std::vector<int32_t> taps;  // target_layer_ids
  int32_t mask_token_id = 0;
  int64_t block_size = 0;
  double rope_theta = 0;
  double rotary_fraction = 1;
  double rms_norm_eps = 0;
  NormWeight norm_weight =
      NormWeight::kPlain;  // of all norms: all known drafters have it, so no bundle says it
  std::vector<DraftLayerMask> layers;

  bool operator==(const ExpectedContract&) const = default;
};
// What our reader of config.json says, and what a loaded drafter computes with.
ExpectedContract ContractOf(const DraftConfig& config);
ExpectedContract ContractOf(const FeatureContract& contract);
// "taps 1,3,5 and not 0,2,4; ..."; empty when they are equal.
std::string Differences(const ExpectedContract& actual, const ExpectedContract& expected);

struct GoldenChat {
  nlohmann::ordered_json messages;
  std::optional<bool> enable_thinking;
};

struct GoldenPrompt {
  std::string kind;  // "chat", "code", ...: means are taken per kind
  std::string text;  // rendered; may be empty
  std::vector<int32_t> prompt_ids;
  std::vector<int32_t> output_ids;          // greedy
  std::vector<int64_t> acceptance_lengths;  // accepted + 1 per round; may be empty
  std::optional<GoldenChat> chat;           // what `text` was rendered from
};

// What the tensors and ids of a bundle have to fit; 0: not known, not compared.
struct PairSizes {
  int64_t vocabulary = 0;   // token ids are below it
  int64_t head_rows = 0;    // of the target's head: columns of logits
  int64_t hidden_size = 0;  // of the target
  int64_t layers = 0;       // of the target
};
PairSizes SizesOf(const TargetConfig& target);

class GoldenBundle {
 public:
  // Checks everything, tensors included, as far as the bundle alone can say. Errors, naming file, and key or
  // tensor: NotFound; InvalidArgument for a file that is not a bundle, a key that is missing, unknown or out
  // of range, a tensor of another dtype or shape than the format's, of no prompt, or with a value that is no
  // finite number; those of SafetensorsFile::Open and Read.
  static absl::StatusOr<GoldenBundle> Open(const std::string& folder);
  // Whether it can be of this pair. InvalidArgument naming the file and the prompt whose token id does not
  // fit, or the tensor with both shapes.
  absl::Status CheckFits(const PairSizes& sizes) const;

  const std::string& folder() const { return folder_; }
  const std::string& producer() const { return producer_; }
  const ExpectedContract& contract() const { return contract_; }
  const std::vector<GoldenPrompt>& prompts() const { return prompts_; }
  // Fingerprints of tensors by canonical name (Checkpoint::fingerprints); empty: not recorded, or in the way
  // of the format's first version, of whole tensors and of few.
  const std::map<std::string, std::string>& target_weights() const { return target_weights_; }
  const std::map<std::string, std::string>& drafter_weights() const { return drafter_weights_; }
  // Digests of whole tensors by canonical name (Checkpoint::ReadDigests); empty: not recorded.
  const std::map<std::string, std::string>& target_digests() const { return target_digests_; }
  const std::map<std::string, std::string>& drafter_digests() const { return drafter_digests_; }

  bool HasTensor(size_t prompt, const std::string& name) const;
  bool HasTensors(size_t prompt) const;  // any
  // A tensor as a matrix, its last dimension being the columns. NotFound; those of SafetensorsFile::Read.
  absl::StatusOr<Rows> Tensor(size_t prompt, const std::string& name) const;

 private:
  explicit GoldenBundle(SafetensorsFile tensors) : tensors_(std::move(tensors)) {}
  absl::Status CheckTensors() const;
  absl::Status CheckTensor(const StoredTensor& tensor, size_t prompt, const std::string& name) const;

  std::string prompts_path_;
  std::string folder_, producer_;
  ExpectedContract contract_;
  std::vector<GoldenPrompt> prompts_;
  std::map<std::string, std::string> target_weights_, drafter_weights_, target_digests_, drafter_digests_;
  SafetensorsFile tensors_;
};

// What a recorder hands over.
struct RecordedBundle {
  std::string producer;
  ExpectedContract contract;
  std::vector<GoldenPrompt> prompts;
  std::map<std::string, std::string> target_weights, drafter_weights, target_digests, drafter_digests;
  struct Tensor {
    std::string name;  // "p0.taps_last16"
    std::vector<int64_t> shape;
    std::vector<double> values;
  };
  std::vector<Tensor> tensors;
};
// Writes a new folder. AlreadyExists; Unavailable when it cannot be written.
absl::Status WriteBundle(const RecordedBundle& bundle, const std::string& folder);

// Compares two bundles in the order of the interfaces. A line per thing that either of them has; the first
// that differs, or that one of them lacks, is named.
struct BundleComparison {
  struct Line {
    std::string what;       // "taps of prompt 3"
    std::string interface;  // id of Interfaces()
    double error = 0;       // max |a - b| / rms(b); of lists: share of entries that differ; infinite: one
                            // side lacks it
    double limit = 0;
    bool differs() const { return !(error <= limit); }
  };
  std::vector<Line> lines;
  // Null: none.
  const Line* first_difference() const {
    const auto found =
        std::find_if(lines.begin(), lines.end(), [](const Line& line) { return line.differs(); });
    return found == lines.end() ? nullptr : &*found;
  }
};
// limit: of the errors of tensors. Errors: those of Tensor.
absl::StatusOr<BundleComparison> CompareBundles(const GoldenBundle& actual, const GoldenBundle& expected,
                                                double limit);

}  // namespace dflash::golden
