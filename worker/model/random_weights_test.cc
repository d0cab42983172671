#include "worker/model/random_weights.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "worker/model/checkpoint.h"
#include "worker/model/testing/temporary_folder.h"

namespace dflash {
namespace {

uint64_t ChecksumOf(ModelRole role, const std::string& name, const std::vector<int64_t>& shape,
                    uint64_t seed) {
  const RandomTensor tensor = RandomTensorOf(role, name, shape, seed);
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  std::vector<uint16_t> bits;
  for (int64_t i = 0; i < count; ++i)
    bits.push_back(bf16(RandomElement(tensor, static_cast<uint64_t>(i))).bits);
  // In two parts, as large tensors are summed.
  const uint64_t first = TensorChecksum(bits.data(), count / 3, 0, 0);
  return TensorChecksum(bits.data() + count / 3, count - count / 3, count / 3, first);
}

// The other implementation's answers: tools/reference/random_weights.py.
TEST(RandomWeightsTest, AgreeWithTheSecondImplementation) {
  constexpr ModelRole kTarget = ModelRole::kTarget, kDrafter = ModelRole::kDrafter;
  EXPECT_EQ(ChecksumOf(kTarget, "embed_tokens.weight", {300, 40}, 7), 0x000004403e0baadau);
  EXPECT_EQ(ChecksumOf(kTarget, "layers.0.linear_attn.conv1d.weight", {30, 1, 4}, 7), 0x000000001b0de332u);
  EXPECT_EQ(ChecksumOf(kTarget, "layers.0.linear_attn.A_log", {48}, 7), 0x00000000023d879du);
  EXPECT_EQ(ChecksumOf(kTarget, "layers.0.linear_attn.dt_bias", {48}, 7), 0x0000000006c487aau);
  EXPECT_EQ(ChecksumOf(kTarget, "layers.0.linear_attn.norm.weight", {128}, 7), 0x000000000fdf7e7eu);
  EXPECT_EQ(ChecksumOf(kTarget, "layers.0.input_layernorm.weight", {5120}, 7), 0x000000c52c271cb7u);
  EXPECT_EQ(ChecksumOf(kTarget, "lm_head.weight", {300, 40}, 7), 0x0000044373283438u);
  EXPECT_EQ(ChecksumOf(kTarget, "layers.3.mlp.down_proj.weight", {512, 1740}, 7), 0x00596045743a13e4u);
  EXPECT_EQ(ChecksumOf(kTarget, "layers.0.linear_attn.out_proj.weight", {64, 96}, 7), 0x00000118cb03230du);
  EXPECT_EQ(ChecksumOf(kDrafter, "fc.weight", {64, 2560}, 7), 0x0003094bc6773198u);
  EXPECT_EQ(ChecksumOf(kDrafter, "layers.0.input_layernorm.weight", {5120}, 7), 0x0000006334be34eau);
  EXPECT_EQ(ChecksumOf(kDrafter, "layers.3.mlp.down_proj.weight", {512, 1740}, uint64_t{1} << 62),
            0x00596ccab9eab951u);
}

TEST(RandomWeightsTest, ACheckpointOfThe27BShapesIsComplete) {
  const std::string folder = std::string(DFLASHD_SOURCE_DIR) + "/tests/shapes/qwen3_6_27b";
  const auto config = TargetConfig::Load(folder);
  ASSERT_TRUE(config.ok()) << config.status();
  const auto target = TargetCheckpoint::Random(folder, *config, 1);
  ASSERT_TRUE(target.ok()) << target.status();
  EXPECT_EQ(target->total_bytes(),
            2 * int64_t{26895998464});  // docs/spec/qwen3_5.md: parameters of the text model
  EXPECT_TRUE(target->is_random());
  const auto draft_config = DraftConfig::Load(folder + "_dflash");
  ASSERT_TRUE(draft_config.ok()) << draft_config.status();
  EXPECT_TRUE(draft_config->CheckFits(*config).ok());
  const auto draft = DraftCheckpoint::Random(folder + "_dflash", *draft_config, 1);
  ASSERT_TRUE(draft.ok()) << draft.status();
  EXPECT_EQ(draft->total_bytes(), 2 * int64_t{1730213120});
  EXPECT_EQ(draft->tensors().size(), 58u);
  EXPECT_NE(TargetCheckpoint::Random(folder, *config, 2)->revision(), target->revision());

  // A block is cut out of the tensor, not made anew.
  const TensorInfo& tensor = target->Get("layers.3.self_attn.q_proj.weight");
  const auto block = target->Read(tensor, {12287, 1, 5000, 120});
  ASSERT_TRUE(block.ok());
  for (int64_t col = 0; col < 120; ++col) {
    const float value = RandomElement(*tensor.random, static_cast<uint64_t>(12287 * 5120 + 5000 + col));
    EXPECT_EQ(block->view().Row<bf16>(0)[col].bits, bf16(value).bits);
  }
}

TEST(RandomWeightsTest, TheReducedShapesFitTogether) {
  const std::string folder = std::string(DFLASHD_SOURCE_DIR) + "/tests/shapes/qwen3_6_27b_8_layers";
  const auto config = TargetConfig::Load(folder);
  ASSERT_TRUE(config.ok()) << config.status();
  const auto draft_config = DraftConfig::Load(folder + "_dflash");
  ASSERT_TRUE(draft_config.ok()) << draft_config.status();
  EXPECT_TRUE(draft_config->CheckFits(*config).ok());
}

TEST(RandomWeightsTest, AreRefusedBesideRealOnes) {
  const std::string folder = std::string(DFLASHD_SOURCE_DIR) + "/models/tiny-qwen3.6";
  const auto config = TargetConfig::Load(folder);
  ASSERT_TRUE(config.ok());
  const absl::Status status = TargetCheckpoint::Random(folder, *config, 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find(folder), std::string::npos) << status;

  const TemporaryFolder broken;  // weights that could not be read are weights, too
  broken.Write("model.safetensors", "not a weight file");
  EXPECT_EQ(TargetCheckpoint::Random(broken.path(), *config, 1).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dflash
