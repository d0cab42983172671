// A DFlash drafter's architecture, from its config.json, with the attention mask of every layer resolved.
// Every key and its rule: docs/config-keys.md. Source: docs/spec/dflash.md "Checkpoint layout", "Attention
// masks and the sliding window".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/json_object.h"
#include "base/layer_index.h"
#include "worker/model/config_options.h"
#include "worker/model/target_config.h"

namespace dflash {

enum class DraftLayerKind : uint8_t { kSliding, kFull };

// What a drafter layer sees; q and k are absolute positions of a query in the block and of a key in context
// or block:
//   (k <= q if causal) and (q - k < window if window > 0) and (k - q < window if window > 0 and not causal)
struct DraftLayerMask {
  DraftLayerKind kind = DraftLayerKind::kFull;
  int64_t window = 0;  // in tokens, the query included; 0 for full layers: unlimited
  bool causal = false;

  bool operator==(const DraftLayerMask&) const = default;
};

// Plain data; checked by the factories below, which are the only way to fill it from a file.
struct DraftConfig {
  int64_t hidden_size = 0;  // the target's
  int64_t intermediate_size = 0;
  int64_t num_attention_heads = 0;  // a multiple of num_key_value_heads
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;  // even; heads times head size need not be hidden_size. All of a head rotates
  double rope_theta = 0;
  double rms_norm_eps = 0;
  int64_t vocab_size = 0;  // the target's
  int64_t max_position_embeddings = 0;

  std::vector<DraftLayerMask> layers;
  int64_t block_size = 0;     // the anchor and block_size - 1 masks
  int32_t mask_token_id = 0;  // an ordinary row of the target's embedding
  // Layers of the target whose outputs are the context features, in the order of concatenation: strictly
  // ascending. Their number is independent of the number of layers.
  std::vector<LayerIndex> target_layer_ids;
  int64_t num_target_layers = 0;

  std::string origin;                 // path of the file, for messages
  std::string digest;                 // SHA-256 of the file, hexadecimal
  std::vector<std::string> warnings;  // for the log

  int64_t num_layers() const { return static_cast<int64_t>(layers.size()); }
  int64_t num_taps() const { return static_cast<int64_t>(target_layer_ids.size()); }

  // Reads `folder`/config.json. Errors as TargetConfig::Load. Unimplemented, naming the key: DFlash2, reduced
  // draft vocabularies, quantized drafters, separate mask embeddings, rotary kinds other than default.
  static absl::StatusOr<DraftConfig> Load(const std::string& folder, const ConfigOptions& options = {});
  static absl::StatusOr<DraftConfig> Parse(std::string_view text, std::string_view origin,
                                           const ConfigOptions& options = {});
  // As Parse, from a file that was already parsed; fills everything but `digest`.
  static absl::StatusOr<DraftConfig> FromJson(const JsonObject& json, const ConfigOptions& options = {});

  // InvalidArgument, naming both files and the keys, when this drafter does not belong to the target: hidden
  // size, vocabulary or number of layers differ. (That the last tap lies below the target's final layer,
  // whose output is ambiguous, is checked when the file is read.)
  absl::Status CheckFits(const TargetConfig& target) const;
};

}  // namespace dflash
