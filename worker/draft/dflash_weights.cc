#include "worker/draft/dflash_weights.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/model/weight_loader.h"

namespace dflash {

absl::StatusOr<DFlashWeights> LoadDFlashWeights(const DraftConfig& config, const DraftCheckpoint& checkpoint,
                                                GroupRank rank, const Stream& stream,
                                                const ReadProgress& progress) {
  WeightLoader loader(checkpoint, SliceTensors(config, rank), stream);
  DFlashWeights weights;
  weights.layers.resize(static_cast<size_t>(config.num_layers()));  // the loader keeps addresses
  loader.Linear({loader.Whole("fc.weight")}, &weights.fc);
  loader.Plain("hidden_norm.weight", &weights.hidden_norm);
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    const std::string prefix = absl::StrCat("layers.", i, ".");
    const std::string attention = prefix + "self_attn.";
    DFlashLayerWeights& layer = weights.layers[i];
    loader.Plain(prefix + "input_layernorm.weight", &layer.input_norm);
    loader.Plain(prefix + "post_attention_layernorm.weight", &layer.post_attention_norm);
    loader.Linear({loader.Whole(attention + "q_proj.weight")}, &layer.q);
    loader.Linear({loader.Whole(attention + "k_proj.weight"), loader.Whole(attention + "v_proj.weight")},
                  &layer.kv);
    loader.Plain(attention + "q_norm.weight", &layer.q_norm);
    loader.Plain(attention + "k_norm.weight", &layer.k_norm);
    loader.Linear({loader.Whole(attention + "o_proj.weight")}, &layer.out);
    loader.Linear(
        {loader.Whole(prefix + "mlp.gate_proj.weight"), loader.Whole(prefix + "mlp.up_proj.weight")},
        &layer.gate_up, LinearUse::kGateUp);
    loader.Linear({loader.Whole(prefix + "mlp.down_proj.weight")}, &layer.down);
  }
  loader.Plain("norm.weight", &weights.norm);
  DFLASH_RETURN_IF_ERROR(loader.Run(progress));
  return weights;
}

}  // namespace dflash
