// Sampling defaults and stop tokens of a target, from its generation_config.json.
// Every key and its rule: docs/config-keys.md. Source: docs/spec/qwen3_5.md "Stop set and sampling defaults".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/json_object.h"
#include "worker/model/config_options.h"

namespace dflash {

// Plain data. The sampling values are the neutral ones where the file says nothing: they switch a filter off.
struct GenerationConfig {
  std::vector<int32_t> eos_token_ids;  // at least one, distinct; any of them ends an answer
  bool do_sample = true;               // false: greedy, whatever the values below say
  double temperature = 1;              // (0, 100]
  int64_t top_k = 0;                   // 0: off
  double top_p = 1;                    // (0, 1]
  double min_p = 0;                    // [0, 1]

  std::string origin;
  std::vector<std::string> warnings;

  // Reads `folder`/generation_config.json; ids must lie in [0, vocab_size). Errors as TargetConfig::Load;
  // Unimplemented for penalties other than the neutral ones.
  static absl::StatusOr<GenerationConfig> Load(const std::string& folder, int64_t vocab_size,
                                               const ConfigOptions& options = {});
  static absl::StatusOr<GenerationConfig> Parse(std::string_view text, std::string_view origin,
                                                int64_t vocab_size, const ConfigOptions& options = {});
  static absl::StatusOr<GenerationConfig> FromJson(const JsonObject& json, int64_t vocab_size,
                                                   const ConfigOptions& options = {});
};

}  // namespace dflash
