#include "worker/model/target_config.h"

#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/str_join.h"
#include "base/regular_file.h"
#include "base/sha256.h"
#include "base/status.h"
#include "worker/model/rope_keys.h"

namespace dflash {
namespace {

// Accepted with any value: they do not change what is computed for text, or belong to parts that are skipped.
const char* const kTopLevelInformational[] = {
    "image_token_id",      "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_config",
    "language_model_only", "auto_map",       "transformers_version",  "_name_or_path",
};
const char* const kTextInformational[] = {
    "attention_dropout",
    "initializer_range",
    "use_cache",
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "architectures",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
};
// Also repeated by exporters at the top level of the nested form.
const char* const kTextInformationalAtTop[] = {"dtype", "torch_dtype", "bos_token_id", "eos_token_id",
                                               "pad_token_id"};

std::vector<std::string> InformationalKeys(bool nested) {
  std::vector<std::string> keys(std::begin(kTopLevelInformational), std::end(kTopLevelInformational));
  for (const char* key : kTextInformational) keys.push_back(nested ? absl::StrCat("text_config.", key) : key);
  if (nested) keys.insert(keys.end(), std::begin(kTextInformationalAtTop), std::end(kTextInformationalAtTop));
  return keys;
}

absl::Status CheckArchitecture(const JsonObject& root) {
  DFLASH_ASSIGN_OR_RETURN(const auto architectures, root.Require<std::vector<std::string>>("architectures"));
  for (const std::string& name : architectures) {
    if (name == "Qwen3_5ForConditionalGeneration" || name == "Qwen3_5ForCausalLM") continue;
    return root.Unimplemented("architectures",
                              absl::StrCat("\"", Printable(name), "\"; only Qwen3_5 dense is built"));
  }
  if (architectures.empty()) return root.Error("architectures", "is empty");
  return absl::OkStatus();
}

absl::Status CheckModelType(const JsonObject& object) {
  DFLASH_ASSIGN_OR_RETURN(const std::string type, object.Require<std::string>("model_type"));
  if (type == "qwen3_5" || type == "qwen3_5_text") return absl::OkStatus();
  return object.Unimplemented(
      "model_type", absl::StrCat("\"", Printable(type), "\"; only qwen3_5 and qwen3_5_text are built"));
}

absl::Status CheckBool(const JsonObject& object, const std::string& key, bool built) {
  DFLASH_ASSIGN_OR_RETURN(const bool value, object.Require<bool>(key));
  if (value == built) return absl::OkStatus();
  return object.Unimplemented(key, built ? "false; only true is built" : "true; only false is built");
}

absl::Status CheckString(const JsonObject& object, const std::string& key, const std::string& built) {
  DFLASH_ASSIGN_OR_RETURN(const std::string value, object.Require<std::string>(key));
  if (value == built) return absl::OkStatus();
  return object.Unimplemented(key, absl::StrCat("\"", Printable(value), "\"; only \"", built, "\" is built"));
}

// `layer_types`, or `full_attention_interval` in its place; when both are there they agree.
absl::Status ReadLayers(const JsonObject& text, TargetConfig* config) {
  DFLASH_ASSIGN_OR_RETURN(const int64_t count, text.RequireInt("num_hidden_layers", 1, kMaxLayers));
  DFLASH_ASSIGN_OR_RETURN(const auto interval, text.FindInt("full_attention_interval", 1, kMaxLayers));
  DFLASH_ASSIGN_OR_RETURN(const auto types, text.Find<std::vector<std::string>>("layer_types"));
  if (!types.has_value() && !interval.has_value()) {
    return text.Missing({text.PathOf("layer_types"), text.PathOf("full_attention_interval")});
  }
  if (types.has_value() && static_cast<int64_t>(types->size()) != count) {
    return text.Error("layer_types", absl::StrCat(types->size(), " entries, but ",
                                                  text.PathOf("num_hidden_layers"), " is ", count));
  }
  for (int64_t i = 0; i < count; ++i) {
    const bool full_by_interval = interval.has_value() && (i + 1) % *interval == 0;
    bool full = full_by_interval;
    if (types.has_value()) {
      const std::string& type = (*types)[i];
      full = type == "full_attention";
      if (!full && type != "linear_attention") {
        return text.Unimplemented("layer_types",
                                  absl::StrCat("entry ", i, " is \"", Printable(type),
                                               "\"; only linear_attention and full_attention are built"));
      }
      if (interval.has_value() && full != full_by_interval) {
        return text.Error("layer_types",
                          absl::StrCat("entry ", i, " is ", type, ", which contradicts ",
                                       text.PathOf("full_attention_interval"), ", which is ", *interval));
      }
    }
    config->layers.push_back(full ? TargetLayerKind::kFullAttention : TargetLayerKind::kLinearAttention);
  }
  return absl::OkStatus();
}

absl::Status ReadRope(const JsonObject& text, TargetConfig* config) {
  DFLASH_ASSIGN_OR_RETURN(const RopeKeys rope, RopeKeys::Open(text));
  DFLASH_RETURN_IF_ERROR(rope.CheckType(/*required=*/true));
  DFLASH_ASSIGN_OR_RETURN(config->rope_theta, rope.RequireTheta());

  DFLASH_ASSIGN_OR_RETURN(const auto factor, RequireAgreeing<double>(rope.Places("partial_rotary_factor")));
  const double rotary_dim = factor.value * static_cast<double>(config->head_dim);
  if (!(rotary_dim >= 2 && rotary_dim <= static_cast<double>(config->head_dim)) ||
      std::fmod(rotary_dim, 2.0) != 0) {
    return factor.place.Error(absl::StrCat(factor.value, " of ", text.PathOf("head_dim"), " = ",
                                           config->head_dim,
                                           " is no even number of elements in [2, head_dim]"));
  }
  config->rotary_dim = static_cast<int64_t>(rotary_dim);

  // Text has equal positions on all three axes, so the sections do not change an angle; but they say how many
  // frequencies there are.
  DFLASH_ASSIGN_OR_RETURN(const auto interleaved, RequireAgreeing<bool>(rope.Places("mrope_interleaved")));
  if (!interleaved.value) {
    return interleaved.place.object.Unimplemented(interleaved.place.key, "false; only true is built");
  }
  DFLASH_ASSIGN_OR_RETURN(const auto sections,
                          RequireAgreeing<std::vector<int64_t>>(rope.Places("mrope_section")));
  int64_t sum = 0;
  for (const int64_t size : sections.value) {
    if (size < 0 || size > kMaxWidth)
      return sections.place.Error(absl::StrCat(size, " is no size of a section"));
    sum += size;
    if (sum > kMaxWidth) break;
  }
  if (sections.value.size() != 3 || sum != config->rotary_dim / 2) {
    return sections.place.Error(absl::StrCat("expected three sizes with the sum ", config->rotary_dim / 2,
                                             " (half of partial_rotary_factor * head_dim), found ",
                                             sections.value.size(), " with the sum ", sum));
  }
  return absl::OkStatus();
}

absl::Status ReadGate(const JsonObject& text, TargetConfig* config) {
  DFLASH_ASSIGN_OR_RETURN(const auto found, text.Find<std::string>("output_gate_type"));
  // Absent in checkpoints from before the key existed, which all use SiLU.
  const std::string gate = found.value_or("swish");
  if (gate == "swish" || gate == "silu") {
    config->gate_activation = GateActivation::kSilu;
  } else if (gate == "sigmoid") {
    config->gate_activation = GateActivation::kSigmoid;
  } else {
    return text.Unimplemented("output_gate_type", absl::StrCat("\"", Printable(gate),
                                                               "\"; only swish, silu and sigmoid are built"));
  }
  return absl::OkStatus();
}

absl::Status ReadSizes(const JsonObject& text, TargetConfig* config) {
  const std::pair<const char*, int64_t*> widths[] = {
      {"hidden_size", &config->hidden_size},
      {"intermediate_size", &config->intermediate_size},
      {"num_attention_heads", &config->num_attention_heads},
      {"num_key_value_heads", &config->num_key_value_heads},
      {"head_dim", &config->head_dim},
      {"linear_num_key_heads", &config->linear_key_heads},
      {"linear_num_value_heads", &config->linear_value_heads},
      {"linear_key_head_dim", &config->linear_key_head_dim},
      {"linear_value_head_dim", &config->linear_value_head_dim},
  };
  for (const auto& [key, value] : widths) {
    DFLASH_ASSIGN_OR_RETURN(*value, text.RequireInt(key, 1, kMaxWidth));
  }
  DFLASH_ASSIGN_OR_RETURN(config->conv_kernel, text.RequireInt("linear_conv_kernel_dim", 2, 64));
  DFLASH_ASSIGN_OR_RETURN(config->vocab_size, text.RequireInt("vocab_size", 1, kMaxVocabulary));
  DFLASH_ASSIGN_OR_RETURN(config->max_position_embeddings,
                          text.RequireInt("max_position_embeddings", 1, kMaxPositions));
  if (config->num_attention_heads % config->num_key_value_heads != 0) {
    return text.Error("num_attention_heads",
                      absl::StrCat(config->num_attention_heads, " is no multiple of ",
                                   text.PathOf("num_key_value_heads"), " = ", config->num_key_value_heads));
  }
  if (config->linear_value_heads % config->linear_key_heads != 0) {
    return text.Error("linear_num_value_heads",
                      absl::StrCat(config->linear_value_heads, " is no multiple of ",
                                   text.PathOf("linear_num_key_heads"), " = ", config->linear_key_heads));
  }
  const std::pair<const char*, int64_t> products[] = {
      {"num_attention_heads", config->num_attention_heads * config->head_dim},
      {"linear_num_key_heads", config->linear_key_heads * config->linear_key_head_dim},
      {"linear_num_value_heads", config->linear_value_heads * config->linear_value_head_dim},
  };
  for (const auto& [key, width] : products) {
    if (width > kMaxWidth)
      return text.Error(key, absl::StrCat("heads times head size is ", width, ", over ", kMaxWidth));
  }
  DFLASH_ASSIGN_OR_RETURN(config->rms_norm_eps, text.Require<double>("rms_norm_eps"));
  if (!(config->rms_norm_eps > 0 && config->rms_norm_eps <= kMaxNormEps)) {
    return text.Error("rms_norm_eps",
                      absl::StrCat(config->rms_norm_eps, " is outside (0, ", kMaxNormEps, "]"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TargetConfig> TargetConfig::FromJson(const JsonObject& json, const ConfigOptions& options) {
  TargetConfig config;
  config.origin = json.origin();
  DFLASH_RETURN_IF_ERROR(CheckModelType(json));
  DFLASH_RETURN_IF_ERROR(CheckArchitecture(json));
  DFLASH_ASSIGN_OR_RETURN(const auto nested, json.Find<JsonObject>("text_config"));
  const JsonObject& text = nested.has_value() ? *nested : json;
  if (nested.has_value()) DFLASH_RETURN_IF_ERROR(CheckModelType(text));

  for (const JsonObject& place : {json, text}) {
    if (place.Has("quantization_config")) {
      return place.Unimplemented("quantization_config",
                                 "quantized checkpoints; only BF16 and F32 weights are built");
    }
  }
  DFLASH_RETURN_IF_ERROR(CheckString(text, "hidden_act", "silu"));
  DFLASH_RETURN_IF_ERROR(CheckString(text, "mamba_ssm_dtype", "float32"));
  DFLASH_RETURN_IF_ERROR(CheckBool(text, "attention_bias", false));
  DFLASH_RETURN_IF_ERROR(CheckBool(text, "attn_output_gate", true));
  DFLASH_ASSIGN_OR_RETURN(const auto mlp_only, text.Find<std::vector<int64_t>>("mlp_only_layers"));
  if (mlp_only.has_value() && !mlp_only->empty()) {
    return text.Unimplemented("mlp_only_layers", "not empty: mixture-of-experts models");
  }
  DFLASH_RETURN_IF_ERROR(ReadSizes(text, &config));
  DFLASH_RETURN_IF_ERROR(ReadLayers(text, &config));
  DFLASH_RETURN_IF_ERROR(ReadRope(text, &config));
  DFLASH_RETURN_IF_ERROR(ReadGate(text, &config));

  std::vector<KeyPlace> tie_places = {{text, "tie_word_embeddings"}};
  if (nested.has_value()) tie_places.push_back({json, "tie_word_embeddings"});
  DFLASH_ASSIGN_OR_RETURN(const auto tied, RequireAgreeing<bool>(tie_places));
  config.tie_word_embeddings = tied.value;

  const std::vector<std::string> informational = InformationalKeys(nested.has_value());
  if (!options.allow_unlisted_keys) DFLASH_RETURN_IF_ERROR(json.CheckAllKeysRead(informational));
  config.warnings = json.UnreadKeys(informational);
  return config;
}

absl::StatusOr<TargetConfig> TargetConfig::Parse(std::string_view text, std::string_view origin,
                                                 const ConfigOptions& options) {
  DFLASH_ASSIGN_OR_RETURN(const JsonObject json, JsonObject::Parse(text, origin));
  DFLASH_ASSIGN_OR_RETURN(TargetConfig config, FromJson(json, options));
  config.digest = Sha256().Add(text).HexDigest();
  return config;
}

absl::StatusOr<TargetConfig> TargetConfig::Load(const std::string& folder, const ConfigOptions& options) {
  const std::string path = absl::StrCat(folder, "/", kConfigFile);
  DFLASH_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, JsonLimits().max_bytes));
  return Parse(text, path, options);
}

}  // namespace dflash
