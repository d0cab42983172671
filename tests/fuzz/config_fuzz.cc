// The configurations of a model: edits of the small pair's files, or whole files. Whatever they say is
// refused, or gives a configuration whose sizes are bounded and can be computed with. Input: 't', 'd' or 'g'
// (target, drafter, generation), then edits (json_edits.h); capital letters: a whole file.
#include <cstdint>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/check.h"
#include "tests/fuzz/json_edits.h"
#include "worker/model/checkpoint.h"
#include "worker/model/draft_config.h"
#include "worker/model/generation_config.h"
#include "worker/model/target_config.h"

namespace dflash {
namespace {

using Json = nlohmann::ordered_json;

Json Read(const std::string& path) {
  std::ifstream file(std::string(DFLASHD_SOURCE_DIR "/models/") + path);
  DFLASH_CHECK(file.good(), path.c_str());
  return Json::parse(file);
}

void CheckError(const absl::Status& status) {
  const bool expected = status.ok() || status.code() == absl::StatusCode::kInvalidArgument ||
                        status.code() == absl::StatusCode::kUnimplemented;
  DFLASH_CHECK(expected, status.ToString().c_str());
  DFLASH_CHECK(status.ok() || status.message().find("config.json") != absl::string_view::npos,
               status.ToString().c_str());
}

// Every tensor that a configuration calls for has a size that fits.
template <typename Config>
void CheckTensors(const Config& config) {
  for (const ExpectedTensor& tensor : ExpectedTensors(config)) {
    int64_t elements = 1;
    for (const ExpectedSize& size : tensor.shape) {
      DFLASH_CHECK(size.size > 0, tensor.name.c_str());
      DFLASH_CHECK(!__builtin_mul_overflow(elements, size.size, &elements), tensor.name.c_str());
    }
    DFLASH_CHECK(elements <= INT64_MAX / 4, tensor.name.c_str());
  }
}

void Run(char kind, std::string_view input) {
  static const Json target_json = Read("tiny-qwen3.6/config.json");
  static const Json draft_json = Read("tiny-qwen3.6-dflash/config.json");
  static const Json generation_json = Read("tiny-qwen3.6/generation_config.json");
  static const TargetConfig target = *TargetConfig::Parse(target_json.dump(), "config.json");
  const bool whole = kind < 'a';
  for (const bool allow : {false, true}) {
    const ConfigOptions options = {.allow_unlisted_keys = allow};
    if (kind == 't' || kind == 'T') {
      const std::string text = whole ? std::string(input) : fuzz::EditedJson(target_json, input);
      const auto config = TargetConfig::Parse(text, "config.json", options);
      CheckError(config.status());
      if (config.ok()) CheckTensors(*config);
    } else if (kind == 'd' || kind == 'D') {
      const std::string text = whole ? std::string(input) : fuzz::EditedJson(draft_json, input);
      const auto config = DraftConfig::Parse(text, "config.json", options);
      CheckError(config.status());
      if (!config.ok()) continue;
      CheckTensors(*config);
      CheckError(config->CheckFits(target));
      DFLASH_CHECK(config->num_layers() >= 1 && config->block_size >= 2 && config->num_taps() >= 1);
    } else {
      const std::string text = whole ? std::string(input) : fuzz::EditedJson(generation_json, input);
      const auto config = GenerationConfig::Parse(text, "generation_config.json", target.vocab_size, options);
      CheckError(config.status());
      if (!config.ok()) continue;
      DFLASH_CHECK(!config->eos_token_ids.empty());
      for (const int32_t id : config->eos_token_ids) DFLASH_CHECK(id >= 0 && id < target.vocab_size);
      DFLASH_CHECK(config->temperature >= 0 && config->top_p > 0 && config->top_p <= 1);
    }
  }
}

}  // namespace
}  // namespace dflash

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  dflash::Run(static_cast<char>(data[0]),
              std::string_view(reinterpret_cast<const char*>(data) + 1, size - 1));
  return 0;
}
