#include "worker/model/target_config.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/model/checkpoint.h"
#include "worker/model/generation_config.h"
#include "worker/model/testing/temporary_folder.h"

namespace dflash {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

std::string LayerTypes(int64_t layers) {
  std::vector<std::string> types;
  for (int64_t i = 0; i < layers; ++i) {
    types.push_back((i + 1) % 4 == 0 ? "\"full_attention\"" : "\"linear_attention\"");
  }
  return absl::StrCat("[", absl::StrJoin(types, ", "), "]");
}

// The configuration of Qwen3.6-27B, with the vision part.
std::string Config27B() {
  return absl::StrCat(R"({
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "language_model_only": false,
    "tie_word_embeddings": false, "image_token_id": 248056, "video_token_id": 248057,
    "vision_start_token_id": 248053, "vision_end_token_id": 248054, "transformers_version": "4.57.0.dev0",
    "text_config": {
      "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408,
      "num_hidden_layers": 64, "layer_types": )",
                      LayerTypes(64), R"(, "full_attention_interval": 4,
      "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
      "attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true,
      "linear_num_key_heads": 16, "linear_num_value_heads": 48,
      "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
      "output_gate_type": "swish", "mamba_ssm_dtype": "float32", "hidden_act": "silu", "rms_norm_eps": 1e-06,
      "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                          "mrope_interleaved": true, "mrope_section": [11, 11, 10]},
      "partial_rotary_factor": 0.25, "max_position_embeddings": 262144,
      "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false, "tie_word_embeddings": false,
      "bos_token_id": 248044, "eos_token_id": 248044, "pad_token_id": null,
      "initializer_range": 0.02, "use_cache": true, "dtype": "bfloat16"},
    "vision_config": {
      "deepstack_visual_indexes": [], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
      "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304, "model_type": "qwen3_5",
      "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 5120, "patch_size": 16,
      "spatial_merge_size": 2, "temporal_patch_size": 2}
  })");
}

int64_t Parameters(const std::vector<ExpectedTensor>& tensors) {
  int64_t sum = 0;
  for (const ExpectedTensor& tensor : tensors) {
    int64_t count = 1;
    for (const ExpectedSize& size : tensor.shape) count *= size.size;
    sum += count;
  }
  return sum;
}

TEST(TargetConfigTest, Reads27B) {
  const auto config = TargetConfig::Parse(Config27B(), "27b/config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->vocab_size, 248320);
  EXPECT_EQ(config->hidden_size, 5120);
  EXPECT_EQ(config->intermediate_size, 17408);
  ASSERT_EQ(config->num_layers(), 64);
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(config->layers[i] == TargetLayerKind::kFullAttention, i % 4 == 3) << i;
  }
  EXPECT_EQ(config->num_attention_heads, 24);
  EXPECT_EQ(config->num_key_value_heads, 4);
  EXPECT_EQ(config->head_dim, 256);
  EXPECT_EQ(config->rotary_dim, 64);
  EXPECT_EQ(config->rope_theta, 1e7);
  EXPECT_EQ(config->linear_key_heads, 16);
  EXPECT_EQ(config->linear_value_heads, 48);
  EXPECT_EQ(config->linear_key_head_dim, 128);
  EXPECT_EQ(config->linear_value_head_dim, 128);
  EXPECT_EQ(config->linear_qkv_size(), 10240);
  EXPECT_EQ(config->linear_value_size(), 6144);
  EXPECT_EQ(config->conv_kernel, 4);
  EXPECT_EQ(config->gate_activation, GateActivation::kSilu);
  EXPECT_EQ(config->rms_norm_eps, 1e-6);
  EXPECT_EQ(config->max_position_embeddings, 262144);
  EXPECT_FALSE(config->tie_word_embeddings);
  EXPECT_THAT(config->warnings, IsEmpty());
  EXPECT_THAT(config->digest, SizeIs(64));
}

// The published checkpoint has 1199 tensors: 333 of vision, 15 of multi-token prediction, and these; its text
// part has 26,895,998,464 parameters.
TEST(TargetConfigTest, TheInventoryOf27BHasThePublishedSize) {
  const auto config = TargetConfig::Parse(Config27B(), "27b/config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  const std::vector<ExpectedTensor> tensors = ExpectedTensors(*config);
  EXPECT_THAT(tensors, SizeIs(1199 - 333 - 15));
  EXPECT_EQ(Parameters(tensors), 26'895'998'464);
}

// Sizes of the siblings: hidden, layers, ffn, query and key-value heads, value heads of Gated DeltaNet, tied.
TEST(TargetConfigTest, ReadsTheSiblingsAsTextOnlyExports) {
  struct Sibling {
    int64_t hidden, layers, ffn, heads, kv_heads, value_heads;
    bool tied;
  };
  for (const Sibling& s :
       {Sibling{1024, 24, 3584, 8, 2, 16, true}, Sibling{2048, 24, 6144, 8, 2, 16, true},
        Sibling{2560, 32, 9216, 16, 4, 32, true}, Sibling{4096, 32, 12288, 16, 4, 32, false},
        Sibling{5120, 64, 17408, 24, 4, 48, false}}) {
    SCOPED_TRACE(s.hidden);
    // Flat, rope keys flat too, no output_gate_type, interval only.
    const std::string text = absl::StrCat(
        R"({"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 248320,
            "hidden_act": "silu", "attention_bias": false, "attn_output_gate": true, "mamba_ssm_dtype": "float32",
            "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
            "mlp_only_layers": [], "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
            "mrope_interleaved": true, "mrope_section": [11, 11, 10], "full_attention_interval": 4,
            "hidden_size": )",
        s.hidden, ", \"num_hidden_layers\": ", s.layers, ", \"intermediate_size\": ", s.ffn,
        ", \"num_attention_heads\": ", s.heads, ", \"num_key_value_heads\": ", s.kv_heads,
        ", \"linear_num_value_heads\": ", s.value_heads,
        ", \"tie_word_embeddings\": ", s.tied ? "true" : "false", "}");
    const auto config = TargetConfig::Parse(text, "config.json");
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->num_layers(), s.layers);
    EXPECT_EQ(config->layers[3], TargetLayerKind::kFullAttention);
    EXPECT_EQ(config->layers[4], TargetLayerKind::kLinearAttention);
    EXPECT_EQ(config->rotary_dim, 64);
    EXPECT_EQ(config->tie_word_embeddings, s.tied);
    const std::vector<ExpectedTensor> tensors = ExpectedTensors(*config);
    EXPECT_EQ(tensors.back().name, s.tied ? "norm.weight" : "lm_head.weight");
  }
}

TEST(TargetConfigTest, NamesWhatIsNotBuilt) {
  const auto status = [](const std::string& from, const std::string& to) {
    std::string text = Config27B();
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return TargetConfig::Parse(text.replace(at, from.size(), to), "m/config.json").status();
  };
  const struct {
    const char *from, *to, *message;
  } cases[] = {
      {"\"rope_type\": \"default\"",
       "\"rope_type\": \"yarn\", \"factor\": 4.0, \"original_max_position_embeddings\": 262144",
       "text_config.rope_parameters.rope_type: rotary kind \"yarn\""},
      {"\"language_model_only\": false", "\"quantization_config\": {\"quant_method\": \"fp8\"}",
       "quantization_config: quantized checkpoints"},
      {"\"model_type\": \"qwen3_5\"", "\"model_type\": \"qwen3_5_moe\"", "model_type: \"qwen3_5_moe\""},
      {"Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
       "architectures: \"Qwen3_5Moe"},
      {"\"mamba_ssm_dtype\": \"float32\"", "\"mamba_ssm_dtype\": \"bfloat16\"",
       "text_config.mamba_ssm_dtype: \"bfloat16\""},
      {"\"attn_output_gate\": true", "\"attn_output_gate\": false", "text_config.attn_output_gate: false"},
  };
  for (const auto& c : cases) {
    const absl::Status refused = status(c.from, c.to);
    EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr(absl::StrCat("m/config.json: ", c.message)));
  }
  EXPECT_TRUE(status("\"output_gate_type\": \"swish\"", "\"output_gate_type\": \"sigmoid\"").ok());
}

TEST(TargetConfigTest, UnlistedKeysBecomeWarningsOnRequest) {
  std::string text = Config27B();
  text.insert(text.rfind('}'), ", \"num_experts\": 256");
  EXPECT_THAT(std::string(TargetConfig::Parse(text, "m/config.json").status().message()),
              HasSubstr("m/config.json: unlisted key num_experts"));
  const auto config = TargetConfig::Parse(text, "m/config.json", {.allow_unlisted_keys = true});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->warnings, ElementsAre("m/config.json: unlisted key num_experts"));
}

TEST(TargetConfigTest, LoadNamesTheFile) {
  TemporaryFolder folder;
  const absl::Status missing = TargetConfig::Load(folder.path()).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), HasSubstr(folder.File("config.json")));
  folder.Write("config.json", std::string(5 << 20, ' '));
  EXPECT_THAT(std::string(TargetConfig::Load(folder.path()).status().message()),
              HasSubstr("at most 4194304"));
  folder.Write("config.json", Config27B());
  EXPECT_TRUE(TargetConfig::Load(folder.path()).ok());
}

// --- Generation
// -----------------------------------------------------------------------------------------------------

TEST(GenerationConfigTest, Reads27BAndTheTinyPair) {
  const auto config = GenerationConfig::Parse(
      R"({"bos_token_id": 248044, "do_sample": true, "eos_token_id": [248046, 248044], "pad_token_id": 248044,
          "temperature": 1.0, "top_k": 20, "top_p": 0.95, "transformers_version": "4.57.0.dev0"})",
      "generation_config.json", 248320);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->eos_token_ids, ElementsAre(248046, 248044));
  EXPECT_TRUE(config->do_sample);
  EXPECT_EQ(config->temperature, 1.0);
  EXPECT_EQ(config->top_k, 20);
  EXPECT_EQ(config->top_p, 0.95);
  EXPECT_EQ(config->min_p, 0);
  const auto tiny = GenerationConfig::Load(std::string(DFLASHD_SOURCE_DIR) + "/models/tiny-qwen3.6", 4096);
  ASSERT_TRUE(tiny.ok()) << tiny.status();
  EXPECT_THAT(tiny->eos_token_ids, ElementsAre(4090, 4088));
  EXPECT_EQ(tiny->temperature, 0.6);
}

TEST(GenerationConfigTest, OneStopTokenOrSeveral) {
  const auto ids = [](const std::string& value) {
    return GenerationConfig::Parse("{\"do_sample\": false, \"eos_token_id\": " + value + "}", "g.json", 100);
  };
  EXPECT_THAT(ids("7")->eos_token_ids, ElementsAre(7));
  EXPECT_THAT(ids("[7, 5, 7]")->eos_token_ids, ElementsAre(7, 5));
  EXPECT_FALSE(ids("7")->do_sample);
  EXPECT_EQ(ids("7")->top_p, 1);
  EXPECT_EQ(std::string(ids("[99, 100]").status().message()),
            "g.json: eos_token_id: 100 is outside [0, 100)");
  EXPECT_EQ(std::string(ids("null").status().message()),
            "g.json: eos_token_id: is null, but has to be given");
}

}  // namespace
}  // namespace dflash
