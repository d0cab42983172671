#include "worker/model/tensor_slice.h"

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/model/testing/safetensors_writer.h"
#include "worker/model/testing/temporary_folder.h"

namespace dflash {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::string kModels = std::string(DFLASHD_SOURCE_DIR) + "/models/";

// The shapes of the 27B target, two layers of it.
TargetConfig Target27B() {
  TargetConfig config;
  config.vocab_size = 248320;
  config.hidden_size = 5120;
  config.intermediate_size = 17408;
  config.layers = {TargetLayerKind::kLinearAttention, TargetLayerKind::kFullAttention};
  config.num_attention_heads = 24;
  config.num_key_value_heads = 4;
  config.head_dim = 256;
  config.linear_key_heads = 16;
  config.linear_value_heads = 48;
  config.linear_key_head_dim = 128;
  config.linear_value_head_dim = 128;
  config.conv_kernel = 4;
  config.origin = "m/config.json";
  return config;
}

DraftConfig Drafter27B() {
  DraftConfig config;
  config.hidden_size = 5120;
  config.intermediate_size = 17408;
  config.num_attention_heads = 32;
  config.num_key_value_heads = 8;
  config.head_dim = 128;
  config.layers.resize(1);
  config.target_layer_ids.resize(5);
  config.origin = "d/config.json";
  return config;
}

// "rows first+count, ... | cols first+count | zeros n"
std::string Text(const TensorSlice& slice) {
  std::string text;
  for (const TensorBlock& block : slice.blocks)
    absl::StrAppend(&text, block.first_row, "+", block.row_count, " ");
  absl::StrAppend(&text, "| ", slice.blocks[0].first_col, "+", slice.blocks[0].col_count);
  if (slice.zero_rows > 0) absl::StrAppend(&text, " | zeros ", slice.zero_rows);
  return text;
}

std::string Slice(const TensorSlices& slices, const std::string& name) {
  const auto slice = slices.find(name);
  return slice == slices.end() ? "none" : Text(slice->second);
}

TEST(TensorSliceTest, LiteralsOfRankThreeOfEight) {
  const TensorSlices slices = SliceTensors(Target27B(), {.rank = 3, .size = 8});
  const std::map<std::string, std::string> expected = {
      {"embed_tokens.weight", "93120+31040 | 0+5120"},
      {"lm_head.weight", "93120+31040 | 0+5120"},
      {"norm.weight", "0+5120 | 0+1"},
      {"layers.0.input_layernorm.weight", "0+5120 | 0+1"},
      {"layers.0.post_attention_layernorm.weight", "0+5120 | 0+1"},
      {"layers.0.mlp.gate_proj.weight", "6528+2176 | 0+5120"},
      {"layers.0.mlp.up_proj.weight", "6528+2176 | 0+5120"},
      {"layers.0.mlp.down_proj.weight", "0+5120 | 6528+2176"},
      {"layers.0.linear_attn.in_proj_qkv.weight", "768+256 2816+256 6400+768 | 0+5120"},
      {"layers.0.linear_attn.conv1d.weight", "768+256 2816+256 6400+768 | 0+4"},
      {"layers.0.linear_attn.in_proj_z.weight", "2304+768 | 0+5120"},
      {"layers.0.linear_attn.in_proj_a.weight", "18+6 | 0+5120"},
      {"layers.0.linear_attn.in_proj_b.weight", "18+6 | 0+5120"},
      {"layers.0.linear_attn.A_log", "18+6 | 0+1"},
      {"layers.0.linear_attn.dt_bias", "18+6 | 0+1"},
      {"layers.0.linear_attn.norm.weight", "0+128 | 0+1"},
      {"layers.0.linear_attn.out_proj.weight", "0+5120 | 2304+768"},
      {"layers.1.input_layernorm.weight", "0+5120 | 0+1"},
      {"layers.1.post_attention_layernorm.weight", "0+5120 | 0+1"},
      {"layers.1.mlp.gate_proj.weight", "6528+2176 | 0+5120"},
      {"layers.1.mlp.up_proj.weight", "6528+2176 | 0+5120"},
      {"layers.1.mlp.down_proj.weight", "0+5120 | 6528+2176"},
      {"layers.1.self_attn.q_proj.weight", "4608+1536 | 0+5120"},  // heads 9, 10, 11 of 512 rows
      {"layers.1.self_attn.k_proj.weight", "256+256 | 0+5120"},    // head 1 serves ranks 2 and 3
      {"layers.1.self_attn.v_proj.weight", "256+256 | 0+5120"},
      {"layers.1.self_attn.o_proj.weight", "0+5120 | 2304+768"},
      {"layers.1.self_attn.q_norm.weight", "0+256 | 0+1"},
      {"layers.1.self_attn.k_norm.weight", "0+256 | 0+1"},
  };
  ASSERT_EQ(slices.size(), expected.size());
  for (const auto& [name, text] : expected) EXPECT_EQ(Slice(slices, name), text) << name;
}

TEST(TensorSliceTest, LiteralsOfOtherGroupSizes) {
  const auto slice = [](int64_t rank, int64_t size, const std::string& name) {
    return Slice(SliceTensors(Target27B(), {.rank = rank, .size = size}), name);
  };
  const std::string kv = "layers.1.self_attn.k_proj.weight";
  EXPECT_EQ(slice(0, 1, kv), "0+1024 | 0+5120");
  EXPECT_EQ(slice(1, 2, kv), "512+512 | 0+5120");
  EXPECT_EQ(slice(3, 4, kv), "768+256 | 0+5120");
  EXPECT_EQ(slice(0, 8, kv), "0+256 | 0+5120");
  EXPECT_EQ(slice(1, 8, kv), "0+256 | 0+5120");
  EXPECT_EQ(slice(7, 8, kv), "768+256 | 0+5120");
  const std::string qkv = "layers.0.linear_attn.in_proj_qkv.weight";
  EXPECT_EQ(slice(0, 1, qkv), "0+2048 2048+2048 4096+6144 | 0+5120");
  EXPECT_EQ(slice(1, 2, qkv), "1024+1024 3072+1024 7168+3072 | 0+5120");
  EXPECT_EQ(slice(1, 4, "embed_tokens.weight"), "62080+62080 | 0+5120");
}

TEST(TensorSliceTest, LiteralsOfTheDrafter) {
  const TensorSlices slices = SliceTensors(Drafter27B(), {.rank = 1, .size = 4});
  const std::map<std::string, std::string> expected = {
      {"fc.weight", "0+5120 | 6400+6400"},
      {"hidden_norm.weight", "0+5120 | 0+1"},
      {"norm.weight", "0+5120 | 0+1"},
      {"layers.0.input_layernorm.weight", "0+5120 | 0+1"},
      {"layers.0.post_attention_layernorm.weight", "0+5120 | 0+1"},
      {"layers.0.mlp.gate_proj.weight", "4352+4352 | 0+5120"},
      {"layers.0.mlp.up_proj.weight", "4352+4352 | 0+5120"},
      {"layers.0.mlp.down_proj.weight", "0+5120 | 4352+4352"},
      {"layers.0.self_attn.q_proj.weight", "1024+1024 | 0+5120"},
      {"layers.0.self_attn.k_proj.weight", "256+256 | 0+5120"},
      {"layers.0.self_attn.v_proj.weight", "256+256 | 0+5120"},
      {"layers.0.self_attn.o_proj.weight", "0+5120 | 1024+1024"},
      {"layers.0.self_attn.q_norm.weight", "0+128 | 0+1"},
      {"layers.0.self_attn.k_norm.weight", "0+128 | 0+1"},
  };
  ASSERT_EQ(slices.size(), expected.size());
  for (const auto& [name, text] : expected) EXPECT_EQ(Slice(slices, name), text) << name;
}

TEST(TensorSliceTest, VocabularyIsPaddedToTheSameRowsOnEveryRank) {
  TargetConfig config = Target27B();
  config.vocab_size = 9;
  std::vector<std::string> slices;
  for (int64_t rank = 0; rank < 8; ++rank)
    slices.push_back(Slice(SliceTensors(config, {.rank = rank, .size = 8}), "lm_head.weight"));
  EXPECT_THAT(slices, ElementsAre("0+2 | 0+5120", "2+2 | 0+5120", "4+2 | 0+5120", "6+2 | 0+5120",
                                  "8+1 | 0+5120 | zeros 1", "9+0 | 0+5120 | zeros 2",
                                  "9+0 | 0+5120 | zeros 2", "9+0 | 0+5120 | zeros 2"));
  EXPECT_EQ(RankConfig(config, {.rank = 7, .size = 8})->vocab_size, 2);
}

TEST(RankConfigTest, LiteralShares) {
  const TargetConfig local = *RankConfig(Target27B(), {.rank = 5, .size = 8});
  EXPECT_EQ(local.num_attention_heads, 3);
  EXPECT_EQ(local.num_key_value_heads, 1);
  EXPECT_EQ(local.linear_key_heads, 2);
  EXPECT_EQ(local.linear_value_heads, 6);
  EXPECT_EQ(local.intermediate_size, 2176);
  EXPECT_EQ(local.vocab_size, 31040);
  EXPECT_EQ(local.linear_qkv_size(), 1280);
  EXPECT_EQ(local.hidden_size, 5120);
  const DraftConfig draft = *RankConfig(Drafter27B(), {.rank = 1, .size = 4});
  EXPECT_EQ(draft.num_attention_heads, 8);
  EXPECT_EQ(draft.num_key_value_heads, 2);
  EXPECT_EQ(draft.intermediate_size, 4352);
}

// Whatever the group, its ranks' sizes are those of its slices.
TEST(RankConfigTest, AgreesWithTheSlices) {
  for (int64_t size : {1, 2, 4, 8}) {
    for (int64_t rank = 0; rank < size; ++rank) {
      const TensorSlices slices = SliceTensors(Target27B(), {.rank = rank, .size = size});
      const TargetConfig local = *RankConfig(Target27B(), {.rank = rank, .size = size});
      for (const ExpectedTensor& tensor : ExpectedTensors(local)) {
        EXPECT_EQ(slices.at(tensor.name).rows(), tensor.shape[0].size) << tensor.name;
        int64_t cols = 1;
        for (size_t i = 1; i < tensor.shape.size(); ++i) cols *= tensor.shape[i].size;
        EXPECT_EQ(slices.at(tensor.name).cols(), cols) << tensor.name;
      }
    }
  }
}

TEST(RankConfigTest, NamesTheKeyThatDoesNotDivide) {
  const auto error = [](auto config, int64_t size) {
    const absl::Status status = RankConfig(config, {.rank = 0, .size = size}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_EQ(error(Target27B(), 16),
            "m/config.json: num_attention_heads 24 does not divide by the 16 ranks of the group");
  TargetConfig config = Target27B();
  config.num_attention_heads = 12;
  config.num_key_value_heads = 3;
  EXPECT_THAT(error(config, 4),
              HasSubstr("num_key_value_heads 3 neither divides by nor divides the 4 ranks"));
  config = Target27B();
  config.linear_key_heads = 6;
  EXPECT_THAT(error(config, 4), HasSubstr("linear_num_key_heads 6"));
  config = Target27B();
  config.linear_value_heads = 6;
  EXPECT_THAT(error(config, 4), HasSubstr("linear_num_value_heads 6"));
  config = Target27B();
  config.intermediate_size = 17410;
  EXPECT_THAT(error(config, 4), HasSubstr("intermediate_size 17410"));
  const DraftConfig tiny = *DraftConfig::Load(kModels + "tiny-qwen3.6-dflash");
  EXPECT_TRUE(RankConfig(tiny, {.rank = 1, .size = 2}).ok());
  EXPECT_THAT(error(tiny, 4), HasSubstr("num_attention_heads 6 does not divide by the 4 ranks"));
  EXPECT_THAT(error(tiny, 4), HasSubstr("tiny-qwen3.6-dflash/config.json"));
}

class ReadSliceTest : public ::testing::Test {
 protected:
  // fc is [8, 8]; element (r, c) says where it comes from.
  void SetUp() override {
    std::string data;
    for (int r = 0; r < 8; ++r) {
      for (int c = 0; c < 8; ++c) {
        data.push_back(static_cast<char>(r));
        data.push_back(static_cast<char>(c));
      }
    }
    folder_.Write("model.safetensors", Safetensors({{"norm.weight", "BF16", {8}, ""},
                                                    {"hidden_norm.weight", "BF16", {8}, ""},
                                                    {"fc.weight", "BF16", {8, 8}, data}}));
    DraftConfig config;  // no layers
    config.hidden_size = 8;
    config.origin = "d/config.json";
    config.digest = "4567";
    config.target_layer_ids = {LayerIndex{0}};
    absl::StatusOr<DraftCheckpoint> opened = DraftCheckpoint::Open(folder_.path(), config);
    ASSERT_TRUE(opened.ok()) << opened.status();
    checkpoint_.emplace(*std::move(opened));
  }

  // Row and first column of each row read; "0 0" for zeros.
  std::vector<std::string> Read(const TensorSlice& slice, int64_t first, int64_t count) {
    bytes_ = 0;
    absl::StatusOr<HostTensor> read = ReadSlice(*checkpoint_, checkpoint_->Get("fc.weight"), slice, first,
                                                count, [this](int64_t bytes) { bytes_ += bytes; });
    EXPECT_TRUE(read.ok()) << read.status();
    std::vector<std::string> rows;
    for (int64_t row = 0; row < read->view().rows; ++row) {
      const auto* at = static_cast<const char*>(read->view().data) + row * read->view().cols * 2;
      rows.push_back(absl::StrCat(int{at[0]}, " ", int{at[1]}));
    }
    return rows;
  }

  TemporaryFolder folder_;
  std::optional<DraftCheckpoint> checkpoint_;
  int64_t bytes_ = 0;
};

TEST_F(ReadSliceTest, StacksBlocksAndZeros) {
  const TensorSlice slice = {.blocks = {{2, 2, 3, 2}, {6, 1, 3, 2}}, .zero_rows = 2};
  EXPECT_EQ(slice.rows(), 5);
  EXPECT_THAT(Read(slice, 0, 5), ElementsAre("2 3", "3 3", "6 3", "0 0", "0 0"));
  EXPECT_EQ(bytes_, 3 * 2 * 2);  // and nothing else
  EXPECT_THAT(Read(slice, 1, 3), ElementsAre("3 3", "6 3", "0 0"));
  EXPECT_THAT(Read(slice, 2, 1), ElementsAre("6 3"));
  EXPECT_THAT(Read(slice, 3, 2), ElementsAre("0 0", "0 0"));
  EXPECT_EQ(bytes_, 0);
  EXPECT_THAT(Read(slice, 0, 2), ElementsAre("2 3", "3 3"));
}

}  // namespace
}  // namespace dflash
