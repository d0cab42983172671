#include "worker/model/generation_config.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/regular_file.h"
#include "base/status.h"

namespace dflash {
namespace {

constexpr char kGenerationConfigFile[] = "generation_config.json";
constexpr size_t kMaxStopTokens = 256;

const char* const kInformational[] = {"bos_token_id", "pad_token_id", "transformers_version",
                                      "_from_model_config"};

// Reads a number that may be absent: lowest <= value <= highest, and above lowest when `open`.
absl::Status ReadNumber(const JsonObject& json, const std::string& key, double lowest, bool open,
                        double highest, double* value) {
  DFLASH_ASSIGN_OR_RETURN(const auto found, json.Find<double>(key));
  if (!found.has_value()) return absl::OkStatus();
  if (!(*found <= highest && (open ? *found > lowest : *found >= lowest))) {
    return json.Error(key,
                      absl::StrCat(*found, " is outside ", open ? "(" : "[", lowest, ", ", highest, "]"));
  }
  *value = *found;
  return absl::OkStatus();
}

absl::Status ReadStopTokens(const JsonObject& json, int64_t vocab_size, std::vector<int32_t>* ids) {
  std::vector<int64_t> found;
  if (json.KindOf("eos_token_id") == JsonValue::Kind::kInt) {
    DFLASH_ASSIGN_OR_RETURN(const int64_t id, json.Require<int64_t>("eos_token_id"));
    found.push_back(id);
  } else {
    DFLASH_ASSIGN_OR_RETURN(found, json.Require<std::vector<int64_t>>("eos_token_id"));
  }
  if (found.empty() || found.size() > kMaxStopTokens) {
    return json.Error("eos_token_id",
                      absl::StrCat("expected 1 to ", kMaxStopTokens, " ids, found ", found.size()));
  }
  for (const int64_t id : found) {
    if (id < 0 || id >= vocab_size) {
      return json.Error("eos_token_id", absl::StrCat(id, " is outside [0, ", vocab_size, ")"));
    }
    const auto token = static_cast<int32_t>(id);
    if (std::find(ids->begin(), ids->end(), token) == ids->end()) ids->push_back(token);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GenerationConfig> GenerationConfig::FromJson(const JsonObject& json, int64_t vocab_size,
                                                            const ConfigOptions& options) {
  GenerationConfig config;
  config.origin = json.origin();
  DFLASH_RETURN_IF_ERROR(ReadStopTokens(json, vocab_size, &config.eos_token_ids));
  DFLASH_ASSIGN_OR_RETURN(config.do_sample, json.Require<bool>("do_sample"));
  DFLASH_RETURN_IF_ERROR(ReadNumber(json, "temperature", 0, /*open=*/true, 100, &config.temperature));
  DFLASH_RETURN_IF_ERROR(ReadNumber(json, "top_p", 0, /*open=*/true, 1, &config.top_p));
  DFLASH_RETURN_IF_ERROR(ReadNumber(json, "min_p", 0, /*open=*/false, 1, &config.min_p));
  DFLASH_ASSIGN_OR_RETURN(const auto top_k, json.FindInt("top_k", 0, kMaxVocabulary));
  config.top_k = top_k.value_or(0);
  const std::pair<const char*, double> neutral[] = {
      {"repetition_penalty", 1}, {"presence_penalty", 0}, {"frequency_penalty", 0}};
  for (const auto& [key, value] : neutral) {
    DFLASH_ASSIGN_OR_RETURN(const auto penalty, json.Find<double>(key));
    if (penalty.has_value() && *penalty != value) {
      return json.Unimplemented(key, absl::StrCat(*penalty, "; only ", value, " (no penalty) is built"));
    }
  }
  const std::vector<std::string> informational(std::begin(kInformational), std::end(kInformational));
  if (!options.allow_unlisted_keys) DFLASH_RETURN_IF_ERROR(json.CheckAllKeysRead(informational));
  config.warnings = json.UnreadKeys(informational);
  return config;
}

absl::StatusOr<GenerationConfig> GenerationConfig::Parse(std::string_view text, std::string_view origin,
                                                         int64_t vocab_size, const ConfigOptions& options) {
  DFLASH_ASSIGN_OR_RETURN(const JsonObject json, JsonObject::Parse(text, origin));
  return FromJson(json, vocab_size, options);
}

absl::StatusOr<GenerationConfig> GenerationConfig::Load(const std::string& folder, int64_t vocab_size,
                                                        const ConfigOptions& options) {
  const std::string path = absl::StrCat(folder, "/", kGenerationConfigFile);
  DFLASH_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, JsonLimits().max_bytes));
  return Parse(text, path, vocab_size, options);
}

}  // namespace dflash
