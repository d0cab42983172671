#include "worker/model/draft_config.h"

#include <optional>
#include <utility>

#include "base/regular_file.h"
#include "base/sha256.h"
#include "base/status.h"
#include "worker/model/rope_keys.h"

namespace dflash {
namespace {

constexpr int64_t kMaxBlock = 256;

// Accepted with any value. The drafter has neither an embedding nor an output matrix of its own, so tying
// them means nothing; max_window_layers only matters without layer_types, which is required.
const char* const kInformational[] = {
    "attention_dropout",
    "auto_map",
    "initializer_range",
    "use_cache",
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "_name_or_path",
    "transformers_version",
    "tie_word_embeddings",
    "max_window_layers",
};

struct RefusedKey {
  const char* key;
  const char* what;
};
constexpr RefusedKey kRefused[] = {
    {"conv_kernel", "DFlash2 drafters"},
    {"conv_group", "DFlash2 drafters"},
    {"conv_kernel_size", "DFlash2 drafters"},
    {"conv_group_size", "DFlash2 drafters"},
    {"selector_rank", "DFlash2 drafters"},
    {"selector_top_k", "DFlash2 drafters"},
    {"top_k", "DFlash2 drafters"},
    {"draft_vocab_size", "drafters with a reduced vocabulary"},
    {"mask_embedding", "drafters with their own mask embedding"},
    {"use_swa", "the use_swa scheme of sliding windows"},
    {"swa_window_size", "the use_swa scheme of sliding windows"},
    {"quantization_config", "quantized drafters"},
};

// The keys of this method stand in `dflash_config` or, in other releases, beside the others.
class DFlashKeys {
 public:
  static absl::StatusOr<DFlashKeys> Open(const JsonObject& root) {
    DFlashKeys keys(root);
    DFLASH_ASSIGN_OR_RETURN(keys.nested_, root.Find<JsonObject>("dflash_config"));
    return keys;
  }
  std::vector<KeyPlace> Places(const std::string& key) const {
    std::vector<KeyPlace> places;
    if (nested_.has_value()) places.push_back({*nested_, key});
    places.push_back({root_, key});
    return places;
  }
  const std::optional<JsonObject>& nested() const { return nested_; }
  absl::StatusOr<int64_t> RequireInt(const std::string& key, int64_t lowest, int64_t highest) const {
    DFLASH_ASSIGN_OR_RETURN(const auto found, RequireAgreeing<int64_t>(Places(key)));
    DFLASH_RETURN_IF_ERROR(found.place.object.RequireInt(key, lowest, highest).status());
    return found.value;
  }
  absl::Status CheckNoRefusedKeys() const {
    for (const RefusedKey& refused : kRefused) {
      for (const KeyPlace& place : Places(refused.key)) {
        if (place.object.Has(place.key)) {
          return place.object.Unimplemented(place.key, absl::StrCat(refused.what, " are not built"));
        }
      }
    }
    return absl::OkStatus();
  }

 private:
  explicit DFlashKeys(JsonObject root) : root_(std::move(root)) {}
  JsonObject root_;
  std::optional<JsonObject> nested_;
};

absl::Status CheckArchitecture(const JsonObject& root) {
  DFLASH_ASSIGN_OR_RETURN(const auto architectures, root.Require<std::vector<std::string>>("architectures"));
  for (const std::string& name : architectures) {
    if (name == "DFlashDraftModel") continue;
    return root.Unimplemented("architectures",
                              absl::StrCat("\"", Printable(name), "\"; only DFlashDraftModel is built"));
  }
  if (architectures.empty()) return root.Error("architectures", "is empty");
  const std::pair<const char*, const char*> fixed[] = {{"model_type", "qwen3"}, {"hidden_act", "silu"}};
  for (const auto& [key, built] : fixed) {
    DFLASH_ASSIGN_OR_RETURN(const std::string value, root.Require<std::string>(key));
    if (value != built) {
      return root.Unimplemented(key,
                                absl::StrCat("\"", Printable(value), "\"; only \"", built, "\" is built"));
    }
  }
  DFLASH_ASSIGN_OR_RETURN(const bool bias, root.Require<bool>("attention_bias"));
  if (bias) return root.Unimplemented("attention_bias", "true; only false is built");
  return absl::OkStatus();
}

absl::Status ReadSizes(const JsonObject& root, DraftConfig* config) {
  const std::pair<const char*, int64_t*> widths[] = {
      {"hidden_size", &config->hidden_size},
      {"intermediate_size", &config->intermediate_size},
      {"num_attention_heads", &config->num_attention_heads},
      {"num_key_value_heads", &config->num_key_value_heads},
      {"head_dim", &config->head_dim},
  };
  for (const auto& [key, value] : widths) {
    DFLASH_ASSIGN_OR_RETURN(*value, root.RequireInt(key, 1, kMaxWidth));
  }
  DFLASH_ASSIGN_OR_RETURN(config->vocab_size, root.RequireInt("vocab_size", 1, kMaxVocabulary));
  DFLASH_ASSIGN_OR_RETURN(config->max_position_embeddings,
                          root.RequireInt("max_position_embeddings", 1, kMaxPositions));
  if (config->num_attention_heads % config->num_key_value_heads != 0) {
    return root.Error("num_attention_heads",
                      absl::StrCat(config->num_attention_heads, " is no multiple of ",
                                   root.PathOf("num_key_value_heads"), " = ", config->num_key_value_heads));
  }
  if (config->head_dim % 2 != 0) return root.Error("head_dim", absl::StrCat(config->head_dim, " is odd"));
  if (config->num_attention_heads * config->head_dim > kMaxWidth) {
    return root.Error("num_attention_heads", absl::StrCat("heads times head size is over ", kMaxWidth));
  }
  DFLASH_ASSIGN_OR_RETURN(config->rms_norm_eps, root.Require<double>("rms_norm_eps"));
  if (!(config->rms_norm_eps > 0 && config->rms_norm_eps <= kMaxNormEps)) {
    return root.Error("rms_norm_eps",
                      absl::StrCat(config->rms_norm_eps, " is outside (0, ", kMaxNormEps, "]"));
  }
  return absl::OkStatus();
}

absl::Status ReadRope(const JsonObject& root, DraftConfig* config) {
  DFLASH_ASSIGN_OR_RETURN(const RopeKeys rope, RopeKeys::Open(root));
  DFLASH_RETURN_IF_ERROR(rope.CheckType(/*required=*/false));
  DFLASH_ASSIGN_OR_RETURN(config->rope_theta, rope.RequireTheta());
  DFLASH_ASSIGN_OR_RETURN(const auto factor, FindAgreeing<double>(rope.Places("partial_rotary_factor")));
  if (factor.has_value()) {
    if (!(factor->value > 0 && factor->value <= 1)) {
      return factor->place.Error(absl::StrCat(factor->value, " is outside (0, 1]"));
    }
    if (factor->value != 1) {
      // Copied from the target's configuration by some exporters; the trained drafters rotate whole heads.
      config->warnings.push_back(absl::StrCat(root.origin(), ": ", factor->place.Path(), " = ", factor->value,
                                              " is not applied: a DFlash drafter rotates all of a head"));
    }
  }
  return absl::OkStatus();
}

// Resolves the mask of every layer.
absl::Status ReadLayers(const JsonObject& root, const DFlashKeys& keys, DraftConfig* config) {
  DFLASH_ASSIGN_OR_RETURN(const int64_t count, root.RequireInt("num_hidden_layers", 1, kMaxLayers));
  DFLASH_ASSIGN_OR_RETURN(const auto types, root.Require<std::vector<std::string>>("layer_types"));
  if (static_cast<int64_t>(types.size()) != count) {
    return root.Error("layer_types", absl::StrCat(types.size(), " entries, but ",
                                                  root.PathOf("num_hidden_layers"), " is ", count));
  }
  // Tri-state: without the key sliding layers are causal and full layers are not.
  std::vector<KeyPlace> causal_places = {{root, "is_causal"}};
  if (keys.nested().has_value()) causal_places.push_back({*keys.nested(), "causal"});
  DFLASH_ASSIGN_OR_RETURN(const auto is_causal, FindAgreeing<bool>(causal_places));

  bool any_sliding = false;
  for (int64_t i = 0; i < count; ++i) {
    const bool sliding = types[i] == "sliding_attention";
    if (!sliding && types[i] != "full_attention") {
      return root.Unimplemented("layer_types",
                                absl::StrCat("entry ", i, " is \"", Printable(types[i]),
                                             "\"; only sliding_attention and full_attention are built"));
    }
    any_sliding = any_sliding || sliding;
    config->layers.push_back({sliding ? DraftLayerKind::kSliding : DraftLayerKind::kFull, 0,
                              is_causal.has_value() ? is_causal->value : sliding});
  }

  if (any_sliding) {
    DFLASH_ASSIGN_OR_RETURN(const bool use_window, root.Require<bool>("use_sliding_window"));
    if (!use_window)
      return root.Error("use_sliding_window", "false contradicts the sliding layers of layer_types");
    DFLASH_ASSIGN_OR_RETURN(const int64_t window, root.RequireInt("sliding_window", 1, kMaxPositions));
    for (DraftLayerMask& layer : config->layers) {
      if (layer.kind == DraftLayerKind::kSliding) layer.window = window;
    }
    return absl::OkStatus();
  }
  // Full layers only: a window that is switched off is a common leftover, one that is switched on has lost
  // its layers.
  DFLASH_ASSIGN_OR_RETURN(const auto use_window, root.Find<bool>("use_sliding_window"));
  DFLASH_ASSIGN_OR_RETURN(const auto window, root.FindInt("sliding_window", 1, kMaxPositions));
  if (use_window.value_or(window.has_value())) {
    return root.Error(use_window.has_value() ? "use_sliding_window" : "sliding_window",
                      "set, but layer_types has no sliding layer");
  }
  return absl::OkStatus();
}

absl::Status ReadTaps(const DFlashKeys& keys, DraftConfig* config) {
  DFLASH_ASSIGN_OR_RETURN(config->num_target_layers, keys.RequireInt("num_target_layers", 2, kMaxLayers));
  DFLASH_ASSIGN_OR_RETURN(const auto ids,
                          RequireAgreeing<std::vector<int64_t>>(keys.Places("target_layer_ids")));
  if (ids.value.empty()) return ids.place.Error("is empty");
  int64_t last = -1;
  for (const int64_t id : ids.value) {
    // The output of the final layer means different tensors to different programs (before or after the final
    // norm).
    if (id < 0 || id > config->num_target_layers - 2) {
      return ids.place.Error(absl::StrCat("layer ", id, " is outside [0, ", config->num_target_layers - 2,
                                          "]: num_target_layers is ", config->num_target_layers,
                                          " and the last one cannot be tapped"));
    }
    if (id <= last)
      return ids.place.Error(absl::StrCat("layer ", id, " follows ", last, "; ids have to ascend"));
    last = id;
    config->target_layer_ids.push_back(LayerIndex{static_cast<int32_t>(id)});
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<DraftConfig> DraftConfig::FromJson(const JsonObject& json, const ConfigOptions& options) {
  DraftConfig config;
  config.origin = json.origin();
  DFLASH_ASSIGN_OR_RETURN(const DFlashKeys keys, DFlashKeys::Open(json));
  DFLASH_RETURN_IF_ERROR(keys.CheckNoRefusedKeys());
  DFLASH_RETURN_IF_ERROR(CheckArchitecture(json));
  DFLASH_RETURN_IF_ERROR(ReadSizes(json, &config));
  DFLASH_RETURN_IF_ERROR(ReadRope(json, &config));
  DFLASH_RETURN_IF_ERROR(ReadLayers(json, keys, &config));
  DFLASH_RETURN_IF_ERROR(ReadTaps(keys, &config));
  DFLASH_ASSIGN_OR_RETURN(config.block_size, keys.RequireInt("block_size", 2, kMaxBlock));
  DFLASH_ASSIGN_OR_RETURN(const int64_t mask, keys.RequireInt("mask_token_id", 0, config.vocab_size - 1));
  config.mask_token_id = static_cast<int32_t>(mask);

  const std::vector<std::string> informational(std::begin(kInformational), std::end(kInformational));
  if (!options.allow_unlisted_keys) DFLASH_RETURN_IF_ERROR(json.CheckAllKeysRead(informational));
  for (std::string& message : json.UnreadKeys(informational)) config.warnings.push_back(std::move(message));
  return config;
}

absl::StatusOr<DraftConfig> DraftConfig::Parse(std::string_view text, std::string_view origin,
                                               const ConfigOptions& options) {
  DFLASH_ASSIGN_OR_RETURN(const JsonObject json, JsonObject::Parse(text, origin));
  DFLASH_ASSIGN_OR_RETURN(DraftConfig config, FromJson(json, options));
  config.digest = Sha256().Add(text).HexDigest();
  return config;
}

absl::StatusOr<DraftConfig> DraftConfig::Load(const std::string& folder, const ConfigOptions& options) {
  const std::string path = absl::StrCat(folder, "/", kConfigFile);
  DFLASH_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, JsonLimits().max_bytes));
  return Parse(text, path, options);
}

absl::Status DraftConfig::CheckFits(const TargetConfig& target) const {
  struct Pair {
    const char* mine;
    int64_t value;
    const char* theirs;
    int64_t target_value;
  };
  const Pair pairs[] = {
      {"hidden_size", hidden_size, "hidden_size", target.hidden_size},
      {"vocab_size", vocab_size, "vocab_size", target.vocab_size},
      {"num_target_layers", num_target_layers, "num_hidden_layers", target.num_layers()},
  };
  for (const Pair& pair : pairs) {
    if (pair.value == pair.target_value) continue;
    return absl::InvalidArgumentError(absl::StrCat(origin, ": ", pair.mine, ": ", pair.value, " contradicts ",
                                                   target.origin, ", where ", pair.theirs, " is ",
                                                   pair.target_value));
  }
  return absl::OkStatus();
}

}  // namespace dflash
