// The target's architecture, from the config.json of a Qwen3.5 / Qwen3.6 dense checkpoint (`qwen3_5`): either
// the multimodal form with a `text_config`, or a text-only export with all keys at the top level. Every key
// and its rule: docs/config-keys.md. Source: docs/spec/qwen3_5.md "Configuration".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/json_object.h"
#include "kernels/rms_norm/rms_norm.h"
#include "worker/model/config_options.h"

namespace dflash {

enum class TargetLayerKind : uint8_t { kLinearAttention, kFullAttention };

// Plain data; checked by the factories below, which are the only way to fill it from a file.
struct TargetConfig {
  int64_t vocab_size = 0;  // rows of the embedding; not all of them need be tokens
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  std::vector<TargetLayerKind> layers;

  // Full attention. num_attention_heads is a multiple of num_key_value_heads.
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  int64_t rotary_dim = 0;  // even, <= head_dim: the first elements of a head that rotate
  double rope_theta = 0;

  // Gated DeltaNet. linear_value_heads is a multiple of linear_key_heads.
  int64_t linear_key_heads = 0;
  int64_t linear_value_heads = 0;
  int64_t linear_key_head_dim = 0;
  int64_t linear_value_head_dim = 0;
  int64_t conv_kernel = 0;                                 // taps of the causal convolution
  GateActivation gate_activation = GateActivation::kSilu;  // inside the Gated DeltaNet output norm

  double rms_norm_eps = 0;
  int64_t max_position_embeddings = 0;  // longest context in tokens
  bool tie_word_embeddings = false;     // the output matrix is the embedding

  std::string origin;                 // path of the file, for messages
  std::string digest;                 // SHA-256 of the file, hexadecimal
  std::vector<std::string> warnings;  // for the log

  int64_t num_layers() const { return static_cast<int64_t>(layers.size()); }
  // Channels of the Gated DeltaNet convolution: q heads, k heads, v heads.
  int64_t linear_qkv_size() const {
    return 2 * linear_key_heads * linear_key_head_dim + linear_value_heads * linear_value_head_dim;
  }
  int64_t linear_value_size() const { return linear_value_heads * linear_value_head_dim; }

  // Reads `folder`/config.json. Errors, each naming the file and the key's path: NotFound and the like for
  // the file; InvalidArgument for a missing, unlisted, mistyped, contradicting or out-of-range key;
  // Unimplemented for another architecture, a quantized checkpoint, a rotary kind other than default, and
  // other values that are known but not built.
  static absl::StatusOr<TargetConfig> Load(const std::string& folder, const ConfigOptions& options = {});
  static absl::StatusOr<TargetConfig> Parse(std::string_view text, std::string_view origin,
                                            const ConfigOptions& options = {});
  // As Parse, from a file that was already parsed; fills everything but `digest`.
  static absl::StatusOr<TargetConfig> FromJson(const JsonObject& json, const ConfigOptions& options = {});
};

}  // namespace dflash
