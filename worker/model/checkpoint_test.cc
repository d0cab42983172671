#include "worker/model/checkpoint.h"

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/model/testing/safetensors_writer.h"
#include "worker/model/testing/temporary_folder.h"

namespace dflash {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

const std::string kModels = std::string(DFLASHD_SOURCE_DIR) + "/models/";

// Two layers, one of each kind; every size is different from the others, so that no mix-up goes unnoticed.
TargetConfig SmallTarget() {
  TargetConfig config;
  config.vocab_size = 11;
  config.hidden_size = 8;
  config.intermediate_size = 10;
  config.layers = {TargetLayerKind::kLinearAttention, TargetLayerKind::kFullAttention};
  config.num_attention_heads = 3;
  config.num_key_value_heads = 1;
  config.head_dim = 4;
  config.linear_key_heads = 2;
  config.linear_value_heads = 6;
  config.linear_key_head_dim = 3;
  config.linear_value_head_dim = 5;
  config.conv_kernel = 4;
  config.origin = "m/config.json";
  config.digest = "0123";
  return config;
}

DraftConfig SmallDrafter() {
  DraftConfig config;
  config.hidden_size = 8;
  config.intermediate_size = 10;
  config.num_attention_heads = 3;
  config.num_key_value_heads = 1;
  config.head_dim = 4;
  config.layers.resize(2);
  config.target_layer_ids = {LayerIndex{0}, LayerIndex{1}, LayerIndex{2}};
  config.origin = "d/config.json";
  config.digest = "4567";
  return config;
}

// The shapes once more, written out by hand: the oracle of the inventory.
std::vector<WrittenTensor> SmallTargetTensors(const std::string& prefix) {
  const std::vector<WrittenTensor> tensors = {
      {"embed_tokens.weight", "BF16", {11, 8}, ""},
      {"layers.0.input_layernorm.weight", "BF16", {8}, ""},
      {"layers.0.post_attention_layernorm.weight", "BF16", {8}, ""},
      {"layers.0.mlp.gate_proj.weight", "BF16", {10, 8}, ""},
      {"layers.0.mlp.up_proj.weight", "BF16", {10, 8}, ""},
      {"layers.0.mlp.down_proj.weight", "BF16", {8, 10}, ""},
      {"layers.0.linear_attn.in_proj_qkv.weight", "BF16", {42, 8}, ""},  // 2 x 2 x 3 + 6 x 5
      {"layers.0.linear_attn.in_proj_z.weight", "BF16", {30, 8}, ""},
      {"layers.0.linear_attn.in_proj_b.weight", "BF16", {6, 8}, ""},
      {"layers.0.linear_attn.in_proj_a.weight", "BF16", {6, 8}, ""},
      {"layers.0.linear_attn.conv1d.weight", "BF16", {42, 1, 4}, ""},
      {"layers.0.linear_attn.A_log", "F32", {6}, ""},
      {"layers.0.linear_attn.dt_bias", "F32", {6}, ""},
      {"layers.0.linear_attn.norm.weight", "F32", {5}, ""},
      {"layers.0.linear_attn.out_proj.weight", "BF16", {8, 30}, ""},
      {"layers.1.input_layernorm.weight", "BF16", {8}, ""},
      {"layers.1.post_attention_layernorm.weight", "BF16", {8}, ""},
      {"layers.1.mlp.gate_proj.weight", "BF16", {10, 8}, ""},
      {"layers.1.mlp.up_proj.weight", "BF16", {10, 8}, ""},
      {"layers.1.mlp.down_proj.weight", "BF16", {8, 10}, ""},
      {"layers.1.self_attn.q_proj.weight", "BF16", {24, 8}, ""},  // query and gate
      {"layers.1.self_attn.k_proj.weight", "BF16", {4, 8}, ""},
      {"layers.1.self_attn.v_proj.weight", "BF16", {4, 8}, ""},
      {"layers.1.self_attn.o_proj.weight", "BF16", {8, 12}, ""},
      {"layers.1.self_attn.q_norm.weight", "BF16", {4}, ""},
      {"layers.1.self_attn.k_norm.weight", "BF16", {4}, ""},
      {"norm.weight", "BF16", {8}, ""},
      {"lm_head.weight", "BF16", {11, 8}, ""},
  };
  std::vector<WrittenTensor> named;
  for (WrittenTensor tensor : tensors) {
    if (tensor.name != "lm_head.weight") tensor.name = prefix + tensor.name;
    named.push_back(tensor);
  }
  return named;
}

std::vector<WrittenTensor> SmallDrafterTensors(const std::string& prefix) {
  std::vector<WrittenTensor> tensors = {{"fc.weight", "BF16", {8, 24}, ""},
                                        {"hidden_norm.weight", "BF16", {8}, ""}};
  for (const std::string layer : {"layers.0.", "layers.1."}) {
    tensors.push_back({layer + "input_layernorm.weight", "BF16", {8}, ""});
    tensors.push_back({layer + "post_attention_layernorm.weight", "BF16", {8}, ""});
    tensors.push_back({layer + "self_attn.q_proj.weight", "BF16", {12, 8}, ""});
    tensors.push_back({layer + "self_attn.k_proj.weight", "BF16", {4, 8}, ""});
    tensors.push_back({layer + "self_attn.v_proj.weight", "BF16", {4, 8}, ""});
    tensors.push_back({layer + "self_attn.o_proj.weight", "BF16", {8, 12}, ""});
    tensors.push_back({layer + "self_attn.q_norm.weight", "BF16", {4}, ""});
    tensors.push_back({layer + "self_attn.k_norm.weight", "BF16", {4}, ""});
    tensors.push_back({layer + "mlp.gate_proj.weight", "BF16", {10, 8}, ""});
    tensors.push_back({layer + "mlp.up_proj.weight", "BF16", {10, 8}, ""});
    tensors.push_back({layer + "mlp.down_proj.weight", "BF16", {8, 10}, ""});
  }
  tensors.push_back({"norm.weight", "BF16", {8}, ""});
  for (WrittenTensor& tensor : tensors) tensor.name = prefix + tensor.name;
  return tensors;
}

class CheckpointTest : public ::testing::Test {
 protected:
  absl::StatusOr<TargetCheckpoint> OpenTarget(const std::vector<WrittenTensor>& tensors,
                                              const TargetConfig& config = SmallTarget()) {
    folder_.Write("model.safetensors", Safetensors(tensors));
    return TargetCheckpoint::Open(folder_.path(), config);
  }
  absl::StatusOr<DraftCheckpoint> OpenDrafter(const std::vector<WrittenTensor>& tensors) {
    folder_.Write("model.safetensors", Safetensors(tensors));
    return DraftCheckpoint::Open(folder_.path(), SmallDrafter());
  }
  // Every error names the weight file.
  template <typename Checkpoint>
  std::string Error(const absl::StatusOr<Checkpoint>& opened,
                    absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
    EXPECT_EQ(opened.status().code(), code) << opened.status();
    EXPECT_THAT(std::string(opened.status().message()), HasSubstr(folder_.path()));
    return std::string(opened.status().message());
  }
  TemporaryFolder folder_;
};

TEST_F(CheckpointTest, BothPrefixesGiveTheSameNames) {
  for (const std::string prefix : {"model.language_model.", "model."}) {
    SCOPED_TRACE(prefix);
    const auto checkpoint = OpenTarget(SmallTargetTensors(prefix));
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_THAT(checkpoint->tensors(), SizeIs(28));
    EXPECT_THAT(checkpoint->skipped(), IsEmpty());
    const TensorInfo& conv = checkpoint->Get("layers.0.linear_attn.conv1d.weight");
    EXPECT_THAT(conv.shape(), ElementsAre(42, 1, 4));
    EXPECT_EQ(conv.rows(), 42);
    EXPECT_EQ(conv.cols(), 4);
    EXPECT_EQ(conv.dtype, DType::kBf16);
    EXPECT_EQ(checkpoint->Get("layers.0.linear_attn.A_log").dtype, DType::kF32);
    EXPECT_EQ(checkpoint->Find("layers.0.self_attn.q_proj.weight"), nullptr);
    EXPECT_NE(checkpoint->Find("lm_head.weight"), nullptr);
  }
  for (const std::string prefix : {"", "model."}) {
    SCOPED_TRACE(prefix);
    const auto checkpoint = OpenDrafter(SmallDrafterTensors(prefix));
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_THAT(checkpoint->tensors(), SizeIs(3 + 2 * 11));
    EXPECT_THAT(checkpoint->Get("fc.weight").shape(), ElementsAre(8, 24));
  }
}

TEST_F(CheckpointTest, MixedPrefixesAreRefused) {
  std::vector<WrittenTensor> tensors = SmallTargetTensors("model.");
  tensors.push_back({"model.language_model.embed_tokens.weight", "BF16", {11, 8}, ""});
  EXPECT_THAT(Error(OpenTarget(tensors)), HasSubstr("expected exactly one of the tensors "
                                                    "model.language_model.embed_tokens.weight, "
                                                    "model.embed_tokens.weight; found 2"));
  EXPECT_THAT(Error(OpenTarget(SmallTargetTensors(""))), HasSubstr("found 0"));
  tensors = SmallTargetTensors("model.");
  tensors[5].name = "model.language_model.layers.0.mlp.down_proj.weight";
  EXPECT_THAT(Error(OpenTarget(tensors)), HasSubstr("1 missing tensors that m/config.json calls for: "
                                                    "model.layers.0.mlp.down_proj.weight"));
}

TEST_F(CheckpointTest, EveryMissingTensorIsNoticed) {
  const std::vector<WrittenTensor> target = SmallTargetTensors("model.");
  for (size_t i = 0; i < target.size(); ++i) {
    SCOPED_TRACE(target[i].name);
    std::vector<WrittenTensor> tensors = target;
    tensors.erase(tensors.begin() + static_cast<std::ptrdiff_t>(i));
    EXPECT_THAT(Error(OpenTarget(tensors)), HasSubstr(target[i].name));
  }
  const std::vector<WrittenTensor> drafter = SmallDrafterTensors("");
  for (size_t i = 0; i < drafter.size(); ++i) {
    SCOPED_TRACE(drafter[i].name);
    std::vector<WrittenTensor> tensors = drafter;
    tensors.erase(tensors.begin() + static_cast<std::ptrdiff_t>(i));
    EXPECT_THAT(Error(OpenDrafter(tensors)), HasSubstr(drafter[i].name));
  }
}

// Longer, shorter, transposed, with another dimension.
TEST_F(CheckpointTest, EveryWrongShapeIsNoticed) {
  const auto shapes = [](const std::vector<int64_t>& good) {
    std::vector<std::vector<int64_t>> bad;
    for (size_t i = 0; i < good.size(); ++i) {
      bad.push_back(good);
      ++bad.back()[i];
      bad.push_back(good);
      --bad.back()[i];
    }
    bad.push_back(good);
    bad.back().push_back(1);
    bad.push_back({1});
    bad.back().insert(bad.back().end(), good.begin(), good.end());
    if (good.size() == 2) bad.push_back({good[1], good[0]});
    bad.push_back({});
    return bad;
  };
  std::vector<WrittenTensor> tensors = SmallTargetTensors("model.");
  for (WrittenTensor& tensor : tensors) {
    const std::vector<int64_t> good = tensor.shape;
    for (const std::vector<int64_t>& bad : shapes(good)) {
      SCOPED_TRACE(tensor.name + ::testing::PrintToString(bad));
      tensor.shape = bad;
      EXPECT_THAT(
          Error(OpenTarget(tensors)),
          AllOf(HasSubstr(absl::StrCat("tensor ", tensor.name, ": shape [")), HasSubstr("m/config.json")));
    }
    tensor.shape = good;
  }
  tensors[20].shape = {12, 8};  // a query projection without gate
  EXPECT_THAT(Error(OpenTarget(tensors)),
              HasSubstr("model.layers.1.self_attn.q_proj.weight: shape [12, 8], but "
                        "m/config.json calls for [24 (2 * num_attention_heads * head_dim), "
                        "8 (hidden_size)]"));
  tensors = SmallDrafterTensors("");
  tensors[0].shape = {8, 16};  // sized by layers instead of taps
  EXPECT_THAT(Error(OpenDrafter(tensors)), HasSubstr("24 (entries of target_layer_ids * hidden_size)"));
}

TEST_F(CheckpointTest, UnknownTensorsAreRefused) {
  std::vector<WrittenTensor> tensors = SmallTargetTensors("model.");
  for (const std::string name :
       {"model.layers.2.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj.bias", "model.norm.bias", "model.lm_head.weight",
        "visual.patch_embed.weight", "model.visual", "mtp", "embed_tokens.weight"}) {
    SCOPED_TRACE(name);
    tensors.push_back({name, "BF16", {8}, ""});
    EXPECT_THAT(Error(OpenTarget(tensors)),
                HasSubstr("1 tensors that m/config.json does not call for: " + name));
    tensors.pop_back();
  }
  for (int i = 0; i < 8; ++i) tensors.push_back({absl::StrCat("x", i), "BF16", {8}, ""});
  EXPECT_THAT(Error(OpenTarget(tensors)),
              HasSubstr("8 tensors that m/config.json does not call for: x0, x1, x2, x3, x4 and 3 more"));
  tensors = SmallDrafterTensors("");
  for (const std::string name :
       {"embed_tokens.weight", "lm_head.weight", "mtp.fc.weight", "layers.2.mlp.up_proj.weight"}) {
    SCOPED_TRACE(name);
    tensors.push_back({name, "BF16", {8}, ""});
    EXPECT_THAT(Error(OpenDrafter(tensors)),
                HasSubstr("1 tensors that d/config.json does not call for: " + name));
    tensors.pop_back();
  }
}

TEST_F(CheckpointTest, VisionAndMtpAreSkippedAndCounted) {
  std::vector<WrittenTensor> tensors = SmallTargetTensors("model.language_model.");
  tensors.push_back({"model.visual.blocks.0.attn.qkv.weight", "F16", {3, 5}, ""});
  tensors.push_back({"model.visual.pos_embed.weight", "BF16", {7}, ""});
  tensors.push_back({"mtp.fc.weight", "U8", {9}, ""});
  const auto checkpoint = OpenTarget(tensors);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ASSERT_THAT(checkpoint->skipped(), SizeIs(2));
  EXPECT_EQ(checkpoint->skipped()[0].prefix, "model.visual.");
  EXPECT_EQ(checkpoint->skipped()[0].count, 2);
  EXPECT_EQ(checkpoint->skipped()[0].bytes, 30 + 14);
  EXPECT_EQ(checkpoint->skipped()[1].count, 1);
  EXPECT_EQ(checkpoint->skipped()[1].bytes, 9);
  EXPECT_THAT(checkpoint->Summary(), AllOf(HasSubstr("28 tensors"), HasSubstr("BF16: 25, F32: 3"),
                                           HasSubstr("skipped 2 tensors model.visual.*, 44 bytes"),
                                           HasSubstr("skipped 1 tensors mtp.*, 9 bytes")));
}

TEST_F(CheckpointTest, TiedEmbeddingsHaveNoOutputMatrix) {
  TargetConfig tied = SmallTarget();
  tied.tie_word_embeddings = true;
  std::vector<WrittenTensor> tensors = SmallTargetTensors("model.");
  EXPECT_THAT(Error(OpenTarget(tensors, tied)),
              HasSubstr("tensor lm_head.weight, but m/config.json says tie_word_embeddings"));
  tensors.pop_back();
  const auto checkpoint = OpenTarget(tensors, tied);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->Find("lm_head.weight"), nullptr);
}

TEST_F(CheckpointTest, WhatIsNotBuiltIsNamed) {
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  std::vector<WrittenTensor> tensors = SmallTargetTensors("model.");
  for (const char* dtype : {"F8_E4M3", "F16", "I8"}) {
    tensors[3].dtype = dtype;
    EXPECT_THAT(Error(OpenTarget(tensors), kUnimplemented),
                HasSubstr(absl::StrCat("model.layers.0.mlp.gate_proj.weight: dtype ", dtype)));
  }
  tensors[3].dtype = "BF16";
  tensors.push_back({"model.layers.0.mlp.gate_proj.weight_scale_inv", "BF16", {1, 1}, ""});
  EXPECT_THAT(Error(OpenTarget(tensors), kUnimplemented), HasSubstr("quantized weights are not built"));
  for (const std::string name : {"d2t", "t2d", "model.d2t"}) {
    tensors = SmallDrafterTensors(name == "model.d2t" ? "model." : "");
    tensors.push_back({name, "I64", {8}, std::string(64, 'x')});
    EXPECT_THAT(Error(OpenDrafter(tensors), kUnimplemented),
                HasSubstr("tensor " + name + ": drafters with a reduced vocabulary are not built"));
  }
  folder_.Write("mask_embedding.pt", "x");
  EXPECT_THAT(Error(OpenDrafter(SmallDrafterTensors("")), kUnimplemented), HasSubstr("mask_embedding.pt"));
}

TEST_F(CheckpointTest, ReadsOnlyWhatIsAskedFor) {
  const auto checkpoint = OpenTarget(SmallTargetTensors("model."));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const TensorInfo& o_proj =
      checkpoint->Get("layers.1.self_attn.o_proj.weight");  // [8, 12], byte i is i mod 251
  int64_t read = 0;
  const ReadProgress progress = [&](int64_t bytes) { read += bytes; };
  const auto rows = checkpoint->Read(o_proj, o_proj.Rows(2, 3), progress);
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_EQ(read, 3 * 12 * 2);
  EXPECT_EQ(rows->view().rows, 3);
  EXPECT_EQ(rows->view().cols, 12);
  EXPECT_EQ(rows->view().Row<bf16>(0)[0].bits, 48 + 256 * 49);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(rows->view().data) % 64, 0u);
  const auto cols = checkpoint->Read(o_proj, o_proj.Cols(3, 3), progress);
  ASSERT_TRUE(cols.ok()) << cols.status();
  EXPECT_EQ(read, 3 * 12 * 2 + 8 * 3 * 2);
  EXPECT_EQ(cols->view().Row<bf16>(1)[0].bits, 30 + 256 * 31);
  EXPECT_EQ(cols->view().Row<bf16>(7)[2].bits, 178 + 256 * 179);
  const auto all = checkpoint->Read(o_proj);
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(std::memcmp(all->view().Row<bf16>(2), rows->view().Row<bf16>(0), rows->bytes()), 0);
  for (const TensorBlock& outside :
       {o_proj.Rows(7, 2), o_proj.Rows(0, 9), o_proj.Cols(12, 1), o_proj.Rows(-1, 1), o_proj.Rows(0, -1),
        TensorBlock{0, INT64_MAX, 0, INT64_MAX}}) {
    EXPECT_EQ(checkpoint->Read(o_proj, outside).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST_F(CheckpointTest, AnUnlistedNameIsOurBug) {
  const auto checkpoint = OpenTarget(SmallTargetTensors("model."));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_DEATH(checkpoint->Get("layers.7.mlp.up_proj.weight"), "layers.7.mlp.up_proj.weight");
}

TEST_F(CheckpointTest, TheRevisionSeesConfigurationLayoutAndWeights) {
  std::vector<WrittenTensor> tensors = SmallTargetTensors("model.");
  const std::string first = OpenTarget(tensors)->revision();
  EXPECT_THAT(first, SizeIs(64));
  EXPECT_EQ(OpenTarget(tensors)->revision(), first);
  TargetConfig other = SmallTarget();
  other.digest = "0124";
  EXPECT_NE(OpenTarget(tensors, other)->revision(), first);
  std::swap(tensors[3], tensors[4]);
  EXPECT_NE(OpenTarget(tensors)->revision(), first);
  std::swap(tensors[3], tensors[4]);
  ASSERT_EQ(OpenTarget(tensors)->revision(), first);
  // One byte of any tensor.
  for (WrittenTensor& tensor : tensors) {
    int64_t bytes = ElementBytes(tensor.dtype);
    for (const int64_t size : tensor.shape) bytes *= size;
    for (int64_t i = 0; i < bytes; ++i) tensor.data.push_back(static_cast<char>(i % 251));
    ASSERT_EQ(OpenTarget(tensors)->revision(), first) << "as the writer fills it";
    tensor.data.back() ^= 1;
    EXPECT_NE(OpenTarget(tensors)->revision(), first) << tensor.name;
    tensor.data.clear();
  }
}

// Of a large tensor its samples count, of which both ends are some.
TEST_F(CheckpointTest, TheRevisionSamplesLargeTensors) {
  TargetConfig config = SmallTarget();
  config.vocab_size = 2113;  // 33,808 bytes of embedding
  std::vector<WrittenTensor> tensors = SmallTargetTensors("model.");
  constexpr int64_t kBytes = 2113 * 8 * 2;
  for (WrittenTensor& tensor : tensors) {
    if (tensor.shape[0] == 11) tensor.shape[0] = 2113;
  }
  ASSERT_GT(kBytes, Checkpoint::kSampledBytes);
  std::string& data = tensors[0].data;
  for (int64_t i = 0; i < kBytes; ++i) data.push_back(static_cast<char>(i % 251));
  const auto opened = OpenTarget(tensors, config);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const std::string first = opened->revision();
  int64_t seen = 0;
  for (int64_t byte = 0; byte < kBytes; byte += 512) {
    data[static_cast<size_t>(byte)] ^= 1;
    seen += OpenTarget(tensors, config)->revision() != first;
    data[static_cast<size_t>(byte)] ^= 1;
  }
  EXPECT_EQ(seen, Checkpoint::kSampledBytes / 512);
  for (const int64_t byte : {int64_t{0}, int64_t{4095}, kBytes - 4096, kBytes - 1}) {
    data[static_cast<size_t>(byte)] ^= 1;
    EXPECT_NE(OpenTarget(tensors, config)->revision(), first) << byte;
    data[static_cast<size_t>(byte)] ^= 1;
  }
}

TEST_F(CheckpointTest, TheTinyPairOpens) {
  const auto target_config = TargetConfig::Load(kModels + "tiny-qwen3.6");
  const auto draft_config = DraftConfig::Load(kModels + "tiny-qwen3.6-dflash");
  ASSERT_TRUE(target_config.ok() && draft_config.ok());
  const auto target = TargetCheckpoint::Open(kModels + "tiny-qwen3.6", *target_config);
  ASSERT_TRUE(target.ok()) << target.status();
  EXPECT_THAT(target->tensors(), SizeIs(2 * 11 + 6 * 14 + 3));
  ASSERT_THAT(target->skipped(), SizeIs(1));
  EXPECT_EQ(target->skipped()[0].prefix, "mtp.");
  EXPECT_EQ(target->skipped()[0].count, 15);
  EXPECT_EQ(target->total_bytes() + target->skipped()[0].bytes, 17550400);  // the index file's total
  const auto drafter = DraftCheckpoint::Open(kModels + "tiny-qwen3.6-dflash", *draft_config);
  ASSERT_TRUE(drafter.ok()) << drafter.status();
  EXPECT_THAT(drafter->tensors(), SizeIs(4 * 11 + 3));
  EXPECT_EQ(drafter->total_bytes(), 5642240);
  // Neither opens with the other's description.
  EXPECT_FALSE(DraftCheckpoint::Open(kModels + "tiny-qwen3.6", *draft_config).ok());
  EXPECT_FALSE(TargetCheckpoint::Open(kModels + "tiny-qwen3.6-dflash", *target_config).ok());
}

// A download that stopped: every truncation of the real files is seen before anything is read.
TEST_F(CheckpointTest, ATruncatedShardIsNamed) {
  const auto config = TargetConfig::Load(kModels + "tiny-qwen3.6");
  ASSERT_TRUE(config.ok());
  folder_.LinkAll(kModels + "tiny-qwen3.6");
  const std::string shard = folder_.File("model-00002-of-00002.safetensors");
  std::filesystem::remove(shard);
  std::filesystem::copy_file(kModels + "tiny-qwen3.6/model-00002-of-00002.safetensors", shard);
  ASSERT_TRUE(TargetCheckpoint::Open(folder_.path(), *config).ok());
  for (const int64_t size : {10141111, 10000000, 6648, 6647, 100, 8, 7, 0}) {
    SCOPED_TRACE(size);
    std::filesystem::resize_file(shard, size);
    EXPECT_THAT(Error(TargetCheckpoint::Open(folder_.path(), *config), absl::StatusCode::kDataLoss),
                HasSubstr(shard));
  }
  std::filesystem::remove(shard);
  EXPECT_THAT(Error(TargetCheckpoint::Open(folder_.path(), *config), absl::StatusCode::kNotFound),
              HasSubstr(shard));
}

}  // namespace
}  // namespace dflash
