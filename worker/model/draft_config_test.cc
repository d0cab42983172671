#include "worker/model/draft_config.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/model/checkpoint.h"

namespace dflash {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr DraftLayerMask Sliding(int64_t window, bool causal = true) {
  return {DraftLayerKind::kSliding, window, causal};
}
constexpr DraftLayerMask kFull = {DraftLayerKind::kFull, 0, false};

std::vector<int> Numbers(const std::vector<LayerIndex>& layers) {
  std::vector<int> numbers;
  for (const LayerIndex layer : layers) numbers.push_back(Number(layer));
  return numbers;
}

// The published configuration of Qwen3.6-27B-DFlash.
constexpr char kConfig27B[] = R"({
  "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
  "hidden_size": 5120, "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
  "intermediate_size": 17408, "hidden_act": "silu", "vocab_size": 248320, "rms_norm_eps": 1e-06,
  "rope_theta": 10000000, "rope_scaling": null, "max_position_embeddings": 262144,
  "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
  "use_sliding_window": true, "sliding_window": 2048, "max_window_layers": 5, "block_size": 16,
  "num_target_layers": 64, "tie_word_embeddings": false, "attention_bias": false, "attention_dropout": 0.0,
  "eos_token_id": 248044, "pad_token_id": 248044, "dtype": "bfloat16",
  "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]}
})";

absl::StatusOr<DraftConfig> Changed(const std::string& from, const std::string& to) {
  std::string text = kConfig27B;
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return DraftConfig::Parse(text.replace(at, from.size(), to), "d/config.json");
}

std::string Error(const absl::StatusOr<DraftConfig>& config,
                  absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
  EXPECT_EQ(config.status().code(), code) << config.status();
  return std::string(config.status().message());
}

TEST(DraftConfigTest, Reads27B) {
  const auto config = DraftConfig::Parse(kConfig27B, "d/config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->hidden_size, 5120);
  EXPECT_EQ(config->intermediate_size, 17408);
  EXPECT_EQ(config->num_attention_heads, 32);
  EXPECT_EQ(config->num_key_value_heads, 8);
  EXPECT_EQ(config->head_dim, 128);
  EXPECT_EQ(config->rope_theta, 1e7);
  EXPECT_EQ(config->rms_norm_eps, 1e-6);
  EXPECT_EQ(config->vocab_size, 248320);
  EXPECT_EQ(config->max_position_embeddings, 262144);
  EXPECT_THAT(config->layers, ElementsAre(Sliding(2048), Sliding(2048), Sliding(2048), Sliding(2048), kFull));
  EXPECT_EQ(config->block_size, 16);
  EXPECT_EQ(config->mask_token_id, 248070);
  EXPECT_THAT(Numbers(config->target_layer_ids), ElementsAre(1, 16, 31, 46, 61));
  EXPECT_EQ(config->num_target_layers, 64);
  EXPECT_THAT(config->warnings, IsEmpty());
}

// The published checkpoint: 58 tensors, 1,730,213,120 parameters.
TEST(DraftConfigTest, TheInventoryOf27BHasThePublishedSize) {
  const auto config = DraftConfig::Parse(kConfig27B, "d/config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  int64_t parameters = 0;
  for (const ExpectedTensor& tensor : ExpectedTensors(*config)) {
    int64_t count = 1;
    for (const ExpectedSize& size : tensor.shape) count *= size.size;
    parameters += count;
  }
  EXPECT_THAT(ExpectedTensors(*config), SizeIs(58));
  EXPECT_EQ(parameters, 1'730'213'120);
}

// The other releases, each in the layout of its file.
struct Release {
  const char* name;
  int64_t hidden, ffn, layers, kv_heads, target_layers, vocabulary, window,
      mask;  // window 0: full layers only
  const char* taps;
  double theta;
  bool nested;         // block size in dflash_config, theta in rope_parameters
  int64_t parameters;  // published, or 0
};
constexpr Release kReleases[] = {
    {"Qwen3-4B-DFlash-b16", 2560, 9728, 5, 8, 36, 151936, 0, 151669, "1, 9, 17, 25, 33", 1e6, false, 0},
    {"Qwen3-8B-DFlash-b16", 4096, 12288, 5, 8, 36, 151936, 0, 151669, "1, 9, 17, 25, 33", 1e6, false, 0},
    {"Qwen3.5-4B-DFlash", 2560, 9216, 5, 8, 32, 248320, 0, 248070, "1, 8, 15, 22, 29", 1e7, false, 0},
    {"Qwen3.5-9B-DFlash", 4096, 12288, 5, 8, 32, 248320, 0, 248070, "1, 8, 15, 22, 29", 1e7, false, 0},
    {"Qwen3.5-27B-DFlash", 5120, 17408, 5, 8, 64, 248320, 0, 248070, "1, 16, 31, 46, 61", 1e7, false,
     1730213120},
    {"Qwen3.5-27B-DFlash later", 5120, 17408, 6, 8, 64, 248320, 4096, 248077, "1, 16, 31, 46, 61", 1e7, true,
     0},
    {"Qwen3.5-35B-A3B-DFlash", 2048, 6144, 8, 4, 40, 248320, 0, 248070, "1, 10, 19, 28, 37", 1e7, false, 0},
    {"Qwen3.6-35B-A3B-DFlash", 2048, 6144, 6, 8, 40, 248320, 4096, 248077, "1, 6, 11, 16, 22, 27, 32, 37",
     1e7, true, 385906176},
};

TEST(DraftConfigTest, ReadsTheOtherReleases) {
  for (const Release& r : kReleases) {
    SCOPED_TRACE(r.name);
    const bool sliding = r.window > 0;
    std::vector<std::string> types(r.layers, sliding ? "\"sliding_attention\"" : "\"full_attention\"");
    types.back() = "\"full_attention\"";
    const std::string theta = absl::StrCat("\"rope_theta\": ", static_cast<int64_t>(r.theta));
    const std::string text = absl::StrCat(
        R"({"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_attention_heads": 32, "head_dim": 128,
            "hidden_act": "silu", "attention_bias": false, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
            "tie_word_embeddings": true, "bos_token_id": 151643, "transformers_version": "4.57.3", "hidden_size": )",
        r.hidden, ", \"intermediate_size\": ", r.ffn, ", \"num_hidden_layers\": ", r.layers,
        ", \"num_key_value_heads\": ", r.kv_heads, ", \"num_target_layers\": ", r.target_layers,
        ", \"vocab_size\": ", r.vocabulary, ", \"layer_types\": [", absl::StrJoin(types, ", "), "]",
        sliding ? absl::StrCat(", \"use_sliding_window\": true, \"sliding_window\": ", r.window)
                : ", \"use_sliding_window\": false, \"sliding_window\": null",
        r.nested ? absl::StrCat(", \"rope_parameters\": {\"rope_type\": \"default\", ", theta, "}")
                 : absl::StrCat(", \"rope_scaling\": null, \"block_size\": 16, ", theta),
        ", \"dflash_config\": {", r.nested ? "\"block_size\": 16, " : "", "\"mask_token_id\": ", r.mask,
        ", \"target_layer_ids\": [", r.taps, "]}}");
    const auto config = DraftConfig::Parse(text, "d/config.json");
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->block_size, 16);
    EXPECT_EQ(config->mask_token_id, r.mask);
    EXPECT_EQ(config->rope_theta, r.theta);
    EXPECT_EQ(absl::StrJoin(Numbers(config->target_layer_ids), ", "), r.taps);
    std::vector<DraftLayerMask> layers(r.layers, sliding ? Sliding(r.window) : kFull);
    layers.back() = kFull;
    EXPECT_EQ(config->layers, layers);
    const std::vector<ExpectedTensor> tensors = ExpectedTensors(*config);
    EXPECT_EQ(static_cast<int64_t>(tensors.size()), 3 + 11 * r.layers);
    // The width of fc follows the taps, not the layers.
    EXPECT_EQ(tensors[0].shape[1].size, config->num_taps() * r.hidden);
    if (r.parameters == 0) continue;
    int64_t parameters = 0;
    for (const ExpectedTensor& tensor : tensors) {
      int64_t count = 1;
      for (const ExpectedSize& size : tensor.shape) count *= size.size;
      parameters += count;
    }
    EXPECT_EQ(parameters, r.parameters);
  }
}

TEST(DraftConfigTest, CausalityHasThreeStates) {
  const std::string at = "\"block_size\": 16";
  EXPECT_THAT(Changed(at, at + ", \"is_causal\": null")->layers,
              ElementsAre(Sliding(2048), Sliding(2048), Sliding(2048), Sliding(2048), kFull));
  const DraftLayerMask causal_full = {DraftLayerKind::kFull, 0, true};
  EXPECT_THAT(Changed(at, at + ", \"is_causal\": true")->layers,
              ElementsAre(Sliding(2048), Sliding(2048), Sliding(2048), Sliding(2048), causal_full));
  const DraftLayerMask open = Sliding(2048, /*causal=*/false);
  EXPECT_THAT(Changed(at, at + ", \"is_causal\": false")->layers, ElementsAre(open, open, open, open, kFull));
  EXPECT_THAT(Changed("\"dflash_config\": {", "\"dflash_config\": {\"causal\": false, ")->layers,
              ElementsAre(open, open, open, open, kFull));
  EXPECT_THAT(
      Error(DraftConfig::Parse(
          "{\"is_causal\": true, \"dflash_config\": {\"causal\": false}, " +
              std::string(kConfig27B + 1).substr(0, std::string(kConfig27B).find("\"dflash_config\"") - 1) +
              "\"mask_token_id\": 1, \"target_layer_ids\": [1]}",
          "d/config.json")),
      HasSubstr("dflash_config.causal: false contradicts is_causal, which is true"));
}

TEST(DraftConfigTest, WindowsCannotGetLost) {
  const std::string types =
      R"(["sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"])";
  const std::string full =
      R"(["full_attention", "full_attention", "full_attention", "full_attention", "full_attention"])";
  const std::string window = R"("use_sliding_window": true, "sliding_window": 2048, )";
  EXPECT_THAT(Error(Changed(types, full)),
              HasSubstr("use_sliding_window: set, but layer_types has no sliding layer"));
  EXPECT_THAT(Error(Changed("\"layer_types\": " + types + ",", "")), HasSubstr("missing key layer_types"));
  EXPECT_THAT(Error(Changed(window, "")), HasSubstr("missing key use_sliding_window"));
  EXPECT_THAT(Error(Changed(window, "\"use_sliding_window\": true, ")),
              HasSubstr("missing key sliding_window"));
  EXPECT_THAT(Error(Changed(window, "\"sliding_window\": 2048, ")),
              HasSubstr("missing key use_sliding_window"));
  EXPECT_THAT(Error(Changed(window, R"("use_sliding_window": true, "sliding_window": null, )")),
              HasSubstr("sliding_window: is null"));
  EXPECT_THAT(Error(Changed(window, R"("use_sliding_window": false, "sliding_window": 2048, )")),
              HasSubstr("use_sliding_window: false contradicts"));
}

TEST(DraftConfigTest, FullLayersNeedNoWindow) {
  const std::string start =
      R"("layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
  "use_sliding_window": true, "sliding_window": 2048)";
  const std::string full =
      R"("layer_types": ["full_attention", "full_attention", "full_attention", "full_attention", "full_attention"])";
  for (const char* rest :
       {"", R"(, "use_sliding_window": false)", R"(, "use_sliding_window": false, "sliding_window": 2048)",
        R"(, "sliding_window": null)"}) {
    SCOPED_TRACE(rest);
    const auto config = Changed(start, full + rest);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_THAT(config->layers, Each(kFull));
  }
  EXPECT_THAT(Error(Changed(start, full + R"(, "sliding_window": 2048)")),
              HasSubstr("sliding_window: set, but layer_types has no sliding layer"));
}

TEST(DraftConfigTest, ATargetsRotaryFactorIsNotApplied) {
  const auto config = Changed("\"rope_scaling\": null", "\"partial_rotary_factor\": 0.25");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->warnings,
              ElementsAre(HasSubstr("d/config.json: partial_rotary_factor = 0.25 is not applied")));
}

TEST(DraftConfigTest, NamesWhatIsNotBuilt) {
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  EXPECT_THAT(
      Error(Changed("\"rope_scaling\": null", R"("rope_scaling": {"rope_type": "yarn", "factor": 4.0})"),
            kUnimplemented),
      HasSubstr("rope_scaling.rope_type: rotary kind \"yarn\""));
  EXPECT_THAT(Error(Changed("\"rope_scaling\": null", R"("rope_scaling": {"type": "linear", "factor": 4.0})"),
                    kUnimplemented),
              HasSubstr("rope_scaling.type: rotary kind \"linear\""));
  EXPECT_THAT(Error(Changed("DFlashDraftModel\"]", "DFlash2DraftModel\"]"), kUnimplemented),
              HasSubstr("DFlash2DraftModel"));
  // A DFlash2 file that claims the old architecture.
  EXPECT_THAT(
      Error(Changed("\"dflash_config\": {", "\"dflash_config\": {\"selector_rank\": 256, "), kUnimplemented),
      HasSubstr("dflash_config.selector_rank: DFlash2 drafters are not built"));
}

TEST(DraftConfigTest, HasToFitItsTarget) {
  const std::string models = std::string(DFLASHD_SOURCE_DIR) + "/models/";
  const auto target = TargetConfig::Load(models + "tiny-qwen3.6");
  auto drafter = DraftConfig::Load(models + "tiny-qwen3.6-dflash");
  ASSERT_TRUE(target.ok() && drafter.ok());
  EXPECT_TRUE(drafter->CheckFits(*target).ok());
  EXPECT_THAT(Numbers(drafter->target_layer_ids), ElementsAre(1, 3, 5));
  EXPECT_THAT(drafter->layers, ElementsAre(Sliding(64), Sliding(64), Sliding(64), kFull));
  const auto large = DraftConfig::Parse(kConfig27B, "d/config.json");
  const absl::Status status = large->CheckFits(*target);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(status.message()),
            absl::StrCat("d/config.json: hidden_size: 5120 contradicts ", models,
                         "tiny-qwen3.6/config.json, where hidden_size is 256"));
}

}  // namespace
}  // namespace dflash
