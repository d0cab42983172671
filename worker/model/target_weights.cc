#include "worker/model/target_weights.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/model/weight_upload.h"

namespace dflash {
namespace {

// config: the rank's.
absl::StatusOr<FullAttentionWeights> LoadFullAttention(const TargetConfig& config,
                                                       const WeightUploader& upload,
                                                       const std::string& prefix) {
  FullAttentionWeights weights;
  // The checkpoint interleaves queries and output gates per head; stacked, all queries come before all gates.
  const std::string q_proj = prefix + "q_proj.weight";
  const int64_t dim = config.head_dim;
  std::vector<WeightUploader::Rows> parts;
  for (int64_t head = 0; head < config.num_attention_heads; ++head)
    parts.push_back({q_proj, 2 * head * dim, dim});
  for (int64_t head = 0; head < config.num_attention_heads; ++head)
    parts.push_back({q_proj, (2 * head + 1) * dim, dim});
  parts.push_back({prefix + "k_proj.weight", 0, config.num_key_value_heads * dim});
  parts.push_back({prefix + "v_proj.weight", 0, config.num_key_value_heads * dim});
  DFLASH_ASSIGN_OR_RETURN(weights.in, upload.StackRows(parts));
  DFLASH_ASSIGN_OR_RETURN(weights.q_norm, upload.Plain(prefix + "q_norm.weight"));
  DFLASH_ASSIGN_OR_RETURN(weights.k_norm, upload.Plain(prefix + "k_norm.weight"));
  DFLASH_ASSIGN_OR_RETURN(weights.out, upload.Stack({prefix + "o_proj.weight"}));
  return weights;
}

absl::StatusOr<LinearAttentionWeights> LoadLinearAttention(const WeightUploader& upload,
                                                           const std::string& prefix) {
  LinearAttentionWeights weights;
  DFLASH_ASSIGN_OR_RETURN(weights.in,
                          upload.Stack({prefix + "in_proj_qkv.weight", prefix + "in_proj_z.weight",
                                        prefix + "in_proj_b.weight", prefix + "in_proj_a.weight"}));
  DFLASH_ASSIGN_OR_RETURN(weights.conv, upload.Plain(prefix + "conv1d.weight"));
  DFLASH_ASSIGN_OR_RETURN(weights.a_log, upload.Float32(prefix + "A_log"));
  DFLASH_ASSIGN_OR_RETURN(weights.dt_bias, upload.Float32(prefix + "dt_bias"));
  DFLASH_ASSIGN_OR_RETURN(weights.norm, upload.Plain(prefix + "norm.weight"));
  DFLASH_ASSIGN_OR_RETURN(weights.out, upload.Stack({prefix + "out_proj.weight"}));
  return weights;
}

}  // namespace

absl::StatusOr<TargetWeights> LoadTargetWeights(const TargetConfig& config,
                                                const TargetCheckpoint& checkpoint, GroupRank rank,
                                                const Stream& stream, const ReadProgress& progress) {
  DFLASH_ASSIGN_OR_RETURN(const TargetConfig local, RankConfig(config, rank));
  const WeightUploader upload(checkpoint, SliceTensors(config, rank), stream, progress);
  TargetWeights weights;
  DFLASH_ASSIGN_OR_RETURN(weights.embedding, upload.Plain("embed_tokens.weight"));
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const std::string prefix = absl::StrCat("layers.", i, ".");
    LayerWeights layer;
    DFLASH_ASSIGN_OR_RETURN(layer.input_norm, upload.Plain(prefix + "input_layernorm.weight"));
    DFLASH_ASSIGN_OR_RETURN(layer.post_attention_norm,
                            upload.Plain(prefix + "post_attention_layernorm.weight"));
    if (config.layers[i] == TargetLayerKind::kFullAttention) {
      DFLASH_ASSIGN_OR_RETURN(layer.full, LoadFullAttention(local, upload, prefix + "self_attn."));
    } else {
      DFLASH_ASSIGN_OR_RETURN(layer.linear, LoadLinearAttention(upload, prefix + "linear_attn."));
    }
    DFLASH_ASSIGN_OR_RETURN(layer.gate_up,
                            upload.Stack({prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"}));
    DFLASH_ASSIGN_OR_RETURN(layer.down, upload.Stack({prefix + "mlp.down_proj.weight"}));
    weights.layers.push_back(std::move(layer));
  }
  DFLASH_ASSIGN_OR_RETURN(weights.final_norm, upload.Plain("norm.weight"));
  DFLASH_ASSIGN_OR_RETURN(
      weights.head, upload.Stack({config.tie_word_embeddings ? "embed_tokens.weight" : "lm_head.weight"}));
  return weights;
}

}  // namespace dflash
