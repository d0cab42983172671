#include "worker/model/target_weights.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/model/weight_loader.h"

namespace dflash {
namespace {

// config: the rank's.
void ListFullAttention(const TargetConfig& config, const std::string& prefix, WeightLoader& loader,
                       FullAttentionWeights& weights) {
  // The checkpoint interleaves queries and output gates per head; stacked, all queries come before all gates.
  const std::string q_proj = prefix + "q_proj.weight";
  const int64_t dim = config.head_dim;
  std::vector<WeightLoader::Part> parts;
  for (int64_t head = 0; head < config.num_attention_heads; ++head)
    parts.push_back(loader.Rows(q_proj, 2 * head * dim, dim));
  for (int64_t head = 0; head < config.num_attention_heads; ++head)
    parts.push_back(loader.Rows(q_proj, (2 * head + 1) * dim, dim));
  parts.push_back(loader.Whole(prefix + "k_proj.weight"));
  parts.push_back(loader.Whole(prefix + "v_proj.weight"));
  loader.Linear(std::move(parts), &weights.in);
  loader.Plain(prefix + "q_norm.weight", &weights.q_norm);
  loader.Plain(prefix + "k_norm.weight", &weights.k_norm);
  loader.Linear({loader.Whole(prefix + "o_proj.weight")}, &weights.out);
}

void ListLinearAttention(const std::string& prefix, WeightLoader& loader, LinearAttentionWeights& weights) {
  loader.Linear({loader.Whole(prefix + "in_proj_qkv.weight"), loader.Whole(prefix + "in_proj_z.weight"),
                 loader.Whole(prefix + "in_proj_b.weight"), loader.Whole(prefix + "in_proj_a.weight")},
                &weights.in);
  loader.Plain(prefix + "conv1d.weight", &weights.conv);
  loader.Float32(prefix + "A_log", &weights.a_log);
  loader.Float32(prefix + "dt_bias", &weights.dt_bias);
  loader.Plain(prefix + "norm.weight", &weights.norm);
  loader.Linear({loader.Whole(prefix + "out_proj.weight")}, &weights.out);
}

}  // namespace

absl::StatusOr<TargetWeights> LoadTargetWeights(const TargetConfig& config,
                                                const TargetCheckpoint& checkpoint, GroupRank rank,
                                                const Stream& stream, const ReadProgress& progress) {
  DFLASH_ASSIGN_OR_RETURN(const TargetConfig local, RankConfig(config, rank));
  WeightLoader loader(checkpoint, SliceTensors(config, rank), stream);
  TargetWeights weights;
  weights.layers.resize(config.layers.size());  // the loader keeps addresses
  loader.Plain("embed_tokens.weight", &weights.embedding);
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const std::string prefix = absl::StrCat("layers.", i, ".");
    LayerWeights& layer = weights.layers[i];
    loader.Plain(prefix + "input_layernorm.weight", &layer.input_norm);
    loader.Plain(prefix + "post_attention_layernorm.weight", &layer.post_attention_norm);
    if (config.layers[i] == TargetLayerKind::kFullAttention) {
      ListFullAttention(local, prefix + "self_attn.", loader, layer.full.emplace());
    } else {
      ListLinearAttention(prefix + "linear_attn.", loader, layer.linear.emplace());
    }
    loader.Linear(
        {loader.Whole(prefix + "mlp.gate_proj.weight"), loader.Whole(prefix + "mlp.up_proj.weight")},
        &layer.gate_up, LinearUse::kGateUp);
    loader.Linear({loader.Whole(prefix + "mlp.down_proj.weight")}, &layer.down);
  }
  loader.Plain("norm.weight", &weights.final_norm);
  loader.Linear({loader.Whole(config.tie_word_embeddings ? "embed_tokens.weight" : "lm_head.weight")},
                &weights.head);
  DFLASH_RETURN_IF_ERROR(loader.Run(progress));
  return weights;
}

}  // namespace dflash
