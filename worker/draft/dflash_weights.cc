#include "worker/draft/dflash_weights.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/model/weight_upload.h"

namespace dflash {

absl::StatusOr<DFlashWeights> LoadDFlashWeights(const DraftConfig& config, const DraftCheckpoint& checkpoint,
                                                GroupRank rank, const Stream& stream,
                                                const ReadProgress& progress) {
  const WeightUploader upload(checkpoint, SliceTensors(config, rank), stream, progress);
  DFlashWeights weights;
  DFLASH_ASSIGN_OR_RETURN(weights.fc, upload.Stack({"fc.weight"}));
  DFLASH_ASSIGN_OR_RETURN(weights.hidden_norm, upload.Plain("hidden_norm.weight"));
  for (int64_t i = 0; i < config.num_layers(); ++i) {
    const std::string prefix = absl::StrCat("layers.", i, ".");
    const std::string attention = prefix + "self_attn.";
    DFlashLayerWeights layer;
    DFLASH_ASSIGN_OR_RETURN(layer.input_norm, upload.Plain(prefix + "input_layernorm.weight"));
    DFLASH_ASSIGN_OR_RETURN(layer.post_attention_norm,
                            upload.Plain(prefix + "post_attention_layernorm.weight"));
    DFLASH_ASSIGN_OR_RETURN(layer.q, upload.Stack({attention + "q_proj.weight"}));
    DFLASH_ASSIGN_OR_RETURN(layer.kv,
                            upload.Stack({attention + "k_proj.weight", attention + "v_proj.weight"}));
    DFLASH_ASSIGN_OR_RETURN(layer.q_norm, upload.Plain(attention + "q_norm.weight"));
    DFLASH_ASSIGN_OR_RETURN(layer.k_norm, upload.Plain(attention + "k_norm.weight"));
    DFLASH_ASSIGN_OR_RETURN(layer.out, upload.Stack({attention + "o_proj.weight"}));
    DFLASH_ASSIGN_OR_RETURN(layer.gate_up,
                            upload.Stack({prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"}));
    DFLASH_ASSIGN_OR_RETURN(layer.down, upload.Stack({prefix + "mlp.down_proj.weight"}));
    weights.layers.push_back(std::move(layer));
  }
  DFLASH_ASSIGN_OR_RETURN(weights.norm, upload.Plain("norm.weight"));
  return weights;
}

}  // namespace dflash
