// A model folder's weights, checked as a whole before any of them is read: every tensor that the
// configuration calls for is there with its shape and a built dtype, and nothing unknown remains. So a model
// is loaded completely or not at all. Sources: docs/spec/qwen3_5.md "Checkpoint tensors", docs/spec/dflash.md
// "Checkpoint layout".
//
// Names here are canonical: without the exporter's prefix ("model.language_model.", "model." or none), for
// example "embed_tokens.weight", "layers.3.self_attn.q_proj.weight", "lm_head.weight", "fc.weight".
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/dtype.h"
#include "kernels/random_weights/random_element.h"
#include "worker/model/draft_config.h"
#include "worker/model/host_tensor.h"
#include "worker/model/random_weights.h"
#include "worker/model/safetensors.h"
#include "worker/model/target_config.h"

namespace dflash {

// One dimension of an expected tensor and the configuration keys that it follows from, for messages.
struct ExpectedSize {
  int64_t size = 0;
  std::string keys;  // e.g. "2 * num_attention_heads * head_dim"
};

struct ExpectedTensor {
  std::string name;  // canonical
  std::vector<ExpectedSize> shape;
};

// Everything a checkpoint has to hold, in the order of the forward pass.
std::vector<ExpectedTensor> ExpectedTensors(const TargetConfig& config);
std::vector<ExpectedTensor> ExpectedTensors(const DraftConfig& config);

// A tensor of an open checkpoint.
struct TensorInfo {
  std::string name;  // canonical
  DType dtype = DType::kBf16;
  const StoredTensor* stored = nullptr;   // owned by the checkpoint
  const SafetensorsFile* file = nullptr;  // owned by the checkpoint; null: random
  std::optional<RandomTensor> random;     // exactly when file is null

  const std::vector<int64_t>& shape() const { return stored->shape; }
  // As a matrix: the first dimension times the product of the others.
  int64_t rows() const { return stored->rows(); }
  int64_t cols() const { return stored->cols(); }
  // Blocks of that matrix, for Read.
  TensorBlock All() const { return {0, rows(), 0, cols()}; }
  TensorBlock Rows(int64_t first, int64_t count) const { return {first, count, 0, cols()}; }
  TensorBlock Cols(int64_t first, int64_t count) const { return {0, rows(), first, count}; }
};

// Tensors that are there on purpose but belong to parts that are not built.
struct SkippedTensors {
  std::string prefix;
  int64_t count = 0;
  int64_t bytes = 0;
};

// Movable, not copyable; const members may be called from any thread.
class Checkpoint {
 public:
  // The tensor, or null when this checkpoint has none of that name (lm_head.weight of tied embeddings).
  const TensorInfo* Find(std::string_view name) const;
  // A tensor that ExpectedTensors lists; anything else is a bug of the caller and ends the process.
  const TensorInfo& Get(std::string_view name) const;
  const std::map<std::string, TensorInfo, std::less<>>& tensors() const { return tensors_; }

  // Reads a block of a tensor, and nothing else, into memory of its own; a rank reads only its slices so.
  // ResourceExhausted when there is no memory; otherwise as SafetensorsFile::Read.
  absl::StatusOr<HostTensor> Read(const TensorInfo& tensor, const TensorBlock& block,
                                  const ReadProgress& progress = {}) const;
  absl::StatusOr<HostTensor> Read(const TensorInfo& tensor, const ReadProgress& progress = {}) const {
    return Read(tensor, tensor.All(), progress);
  }

  // The same into memory of the caller, `to_bytes` being exactly the block's size. Any thread.
  absl::Status ReadInto(const TensorInfo& tensor, const TensorBlock& block, void* to, int64_t to_bytes,
                        const ReadProgress& progress = {}) const;

  bool is_random() const { return is_random_; }         // made from a seed, not read from files
  int64_t total_bytes() const { return total_bytes_; }  // of tensors()
  const std::vector<SkippedTensors>& skipped() const { return skipped_; }
  // SHA-256, hexadecimal, of the configuration, the headers of all weight files, and samples of every tensor:
  // all of one of up to kSampledBytes, of a larger one kSamples runs of kSampleBytes, the first at its
  // beginning, the last at its end, the others evenly between (aligned down to kSampleBytes). It costs some
  // thousand small reads, whatever the size of the model. Other weights of the same layout (trained on,
  // merged, converted differently, of another model) differ from the first bytes of a tensor on, so they are
  // seen. Not seen is a change between the samples alone: a few damaged or edited elements of a large tensor,
  // and nothing of the tensors that are skipped.
  const std::string& revision() const { return revision_; }
  static constexpr int64_t kSampleBytes = 4096;
  static constexpr int64_t kSamples = 4;
  static constexpr int64_t kSampledBytes = kSamples * kSampleBytes;
  // Of every tensor, by canonical name: SHA-256, hexadecimal, of its samples, the number of their bytes (8
  // bytes, little-endian) before them. Weights made from a seed have none.
  const std::map<std::string, std::string>& fingerprints() const { return fingerprints_; }
  // Reads every byte of every tensor once: `visit` gets each tensor in blocks of whole rows, in order.
  // Several tensors at a time, each by one thread of its own. Errors: those of ReadInto.
  absl::Status VisitAll(const std::function<void(const TensorInfo& tensor, int64_t first_row,
                                                 std::string_view bytes)>& visit) const;
  // Of every tensor, by canonical name: SHA-256, hexadecimal, of all its bytes. What fingerprints leave out
  // shows here, for as long as it takes to read the weights. Weights made from a seed have none. Errors:
  // those of VisitAll.
  absl::StatusOr<std::map<std::string, std::string>> ReadDigests() const;
  // One line for the log: number of tensors, bytes, dtypes, what was skipped.
  std::string Summary() const;

 protected:
  struct Inventory;
  static Inventory InventoryOf(const TargetConfig& config);
  static Inventory InventoryOf(const DraftConfig& config);
  Checkpoint() = default;
  absl::Status OpenFolder(const std::string& folder, const Inventory& inventory);
  void MakeRandom(const Inventory& inventory, ModelRole role, uint64_t seed);

 private:
  absl::Status Match(const Inventory& inventory, const std::string& prefix);
  absl::Status CheckRest(const Inventory& inventory, const std::string& prefix);
  absl::StatusOr<std::string> Sample(const TensorInfo& tensor) const;
  // Sets revision and fingerprints.
  absl::Status ReadSamples(const Inventory& inventory);

  SafetensorsFolder weights_;
  std::vector<StoredTensor> random_tensors_;
  bool is_random_ = false;
  std::map<std::string, TensorInfo, std::less<>> tensors_;  // point into weights_ or random_tensors_
  std::vector<SkippedTensors> skipped_;
  int64_t total_bytes_ = 0;
  std::string source_;  // for messages
  std::map<std::string, std::string> fingerprints_;
  std::string revision_;
};

// The target's weights. Vision ("model.visual.") and multi-token-prediction ("mtp.") tensors are skipped and
// counted.
class TargetCheckpoint : public Checkpoint {
 public:
  // Errors, besides those of SafetensorsFolder::Open: InvalidArgument for a tensor that is missing, unknown,
  // or has another shape than the configuration says (naming file, tensor and keys); Unimplemented for a
  // dtype other than BF16 and F32 and for FP8 scales.
  static absl::StatusOr<TargetCheckpoint> Open(const std::string& folder, const TargetConfig& config);
  // BF16 tensors of that configuration that are made from a seed (docs/spec/random-weights.md).
  // InvalidArgument, so that nobody takes one for the other, when the folder of the configuration holds
  // weights too.
  static absl::StatusOr<TargetCheckpoint> Random(const std::string& folder, const TargetConfig& config,
                                                 uint64_t seed);
};

// The drafter's weights. It has no embedding and no output matrix: those are the target's.
class DraftCheckpoint : public Checkpoint {
 public:
  // Errors as TargetCheckpoint::Open; Unimplemented also for reduced draft vocabularies (tensors d2t, t2d)
  // and for a file mask_embedding.pt.
  static absl::StatusOr<DraftCheckpoint> Open(const std::string& folder, const DraftConfig& config);
  static absl::StatusOr<DraftCheckpoint> Random(const std::string& folder, const DraftConfig& config,
                                                uint64_t seed);
};

}  // namespace dflash
