// What the loader puts on the device, against what the checkpoint's own reader says.
#include "worker/model/weight_loader.h"

#include <filesystem>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"
#include "worker/model/testing/safetensors_writer.h"
#include "worker/model/testing/temporary_folder.h"

namespace dflash {
namespace {

// One drafter layer: enough kinds of tensors, and few names.
DraftConfig Config(int64_t intermediate) {
  DraftConfig config;
  config.hidden_size = 96;
  config.intermediate_size = intermediate;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 16;
  config.layers = {{}};
  config.target_layer_ids = {LayerIndex{0}, LayerIndex{2}};
  config.origin = "m/config.json";
  config.digest = "0";
  return config;
}

void WriteCheckpoint(const DraftConfig& config, const TemporaryFolder& folder) {
  std::vector<WrittenTensor> tensors;
  uint64_t state = 1;
  for (const ExpectedTensor& expected : ExpectedTensors(config)) {
    WrittenTensor tensor;
    tensor.name = expected.name;
    int64_t bytes = 2;
    for (const ExpectedSize& size : expected.shape) {
      tensor.shape.push_back(size.size);
      bytes *= size.size;
    }
    for (int64_t i = 0; i < bytes; i += 2) {  // finite bf16 numbers
      state = MixBits(state + 0x9e3779b97f4a7c15u);
      const bf16 value(static_cast<float>(state >> 40) * 0x1p-24f - 0.5f);
      tensor.data.append(reinterpret_cast<const char*>(&value), 2);
    }
    tensors.push_back(std::move(tensor));
  }
  folder.Write("model.safetensors", Safetensors(tensors));
}

class WeightLoaderTest : public ::testing::Test {
 protected:
  // The weight's matrix, through the operation that uses it: the identity's rows pick its columns, exactly.
  std::vector<float> Columns(const LinearWeight& weight) {
    const int64_t K = weight.in_features(), N = weight.out_features();
    HostMatrix<float> identity(K, K);
    for (int64_t k = 0; k < K; ++k) identity.At(k, k) = 1;
    const DeviceMatrix x = DeviceMatrix::Activations(identity, stream_);
    const DeviceMatrix y = DeviceMatrix::Output(K, N, DType::kF32, stream_);
    EXPECT_TRUE(Linear(x.view(), weight, Phase::kPrefill, y.view(), stream_).ok());
    return y.ToHost().values;
  }
  // The same from what the checkpoint's reader says.
  std::vector<float> Expected(const Checkpoint& checkpoint, const TensorSlices& slices,
                              const std::vector<WeightLoader::Part>& parts) {
    std::vector<HostTensor> hosts;
    int64_t N = 0;
    for (const WeightLoader::Part& part : parts) {
      hosts.push_back(*ReadSlice(checkpoint, checkpoint.Get(part.name), slices.find(part.name)->second,
                                 part.first, part.count, {}));
      N += part.count;
    }
    const int64_t K = hosts[0].view().cols;
    std::vector<float> columns(static_cast<size_t>(K * N));
    int64_t n = 0;
    for (const HostTensor& host : hosts) {
      for (int64_t row = 0; row < host.view().rows; ++row, ++n) {
        for (int64_t k = 0; k < K; ++k) {
          columns[static_cast<size_t>(k * N + n)] = static_cast<float>(host.view().Row<bf16>(row)[k]);
        }
      }
    }
    return columns;
  }

  std::string BytesOf(const void* device, int64_t bytes) {
    std::string host(static_cast<size_t>(bytes), '\0');
    EXPECT_TRUE(CopyToHost(host.data(), device, bytes, stream_).ok());
    return host;
  }

  void ExpectLoads(const DraftCheckpoint& checkpoint, const WeightLoader::Options& options) {
    SCOPED_TRACE(options.piece_bytes);
    const std::string mlp = "layers.0.mlp.", attention = "layers.0.self_attn.";
    TensorSlices slices = SliceTensors(Config(80), {});
    // As ranks cut: columns; rows from several places, and rows of zeros.
    slices[mlp + "down_proj.weight"] = {{{0, 96, 64, 16}}, 0};
    slices["fc.weight"] = {{{90, 6, 5, 100}, {3, 7, 5, 100}}, 4};
    slices[mlp + "gate_proj.weight"] = {{{40, 20, 0, 96}, {0, 30, 0, 96}}, 6};
    WeightLoader loader(checkpoint, slices, stream_, options);
    Matrix norm, fc;
    Buffer q_norm;
    LinearWeight gate_up, down, heads;
    const std::vector<WeightLoader::Part> gate_up_parts = {loader.Whole(mlp + "gate_proj.weight"),
                                                           loader.Whole(mlp + "up_proj.weight")};
    const std::vector<WeightLoader::Part> down_parts = {loader.Whole(mlp + "down_proj.weight")};
    const std::vector<WeightLoader::Part> head_parts = {loader.Rows(mlp + "gate_proj.weight", 10, 40),
                                                        loader.Rows(attention + "q_proj.weight", 48, 16),
                                                        loader.Rows(attention + "q_proj.weight", 0, 16)};
    loader.Plain("norm.weight", &norm);
    loader.Plain("fc.weight", &fc);
    loader.Float32(attention + "q_norm.weight", &q_norm);
    loader.Linear(gate_up_parts, &gate_up);
    loader.Linear(down_parts, &down);
    loader.Linear(head_parts, &heads);
    int64_t progress = 0;
    ASSERT_TRUE(loader.Run([&](int64_t bytes) { progress += bytes; }).ok());

    const auto is_read = [&](const Matrix& matrix, const std::string& name) {
      const TensorSlice& slice = slices[name];
      const HostTensor host = *ReadSlice(checkpoint, checkpoint.Get(name), slice, 0, slice.rows(), {});
      return matrix.view().rows * matrix.view().cols == host.view().rows * host.view().cols &&
             BytesOf(matrix.view().data, host.bytes()) ==
                 std::string(reinterpret_cast<const char*>(host.view().data),
                             static_cast<size_t>(host.bytes()));
    };
    EXPECT_EQ(norm.view().rows, 1);
    EXPECT_TRUE(is_read(norm, "norm.weight"));
    EXPECT_EQ(fc.view().rows, 17);
    EXPECT_TRUE(is_read(fc, "fc.weight"));
    const HostTensor q_norm_host = *checkpoint.Read(checkpoint.Get(attention + "q_norm.weight"));
    std::vector<float> q_norm_values(16);
    ASSERT_TRUE(CopyToHost(q_norm_values.data(), q_norm.data(), q_norm.bytes(), stream_).ok());
    for (int64_t i = 0; i < 16; ++i) {
      EXPECT_EQ(q_norm_values[static_cast<size_t>(i)],
                static_cast<float>(q_norm_host.view().Row<bf16>(i)[0]));
    }
    EXPECT_EQ(Columns(gate_up), Expected(checkpoint, slices, gate_up_parts));
    EXPECT_EQ(Columns(down), Expected(checkpoint, slices, down_parts));
    EXPECT_EQ(Columns(heads), Expected(checkpoint, slices, head_parts));
    // Rows of zeros are not read.
    EXPECT_EQ(progress, 2 * (96 + 13 * 100 + 16 + (50 + 80) * 96 + 96 * 16 + (40 + 16 + 16) * 96));
  }

  const Stream stream_ = *Stream::Create({.threads = 2});
};

// At once; in more pieces than the ring holds; row by row.
const std::vector<WeightLoader::Options> kOptions = {
    {}, {.piece_bytes = 1000, .buffers = 5}, {.piece_bytes = 1, .buffers = 1}};

TEST_F(WeightLoaderTest, LoadsFiles) {
  const TemporaryFolder folder;
  const DraftConfig config = Config(80);
  WriteCheckpoint(config, folder);
  const auto checkpoint = DraftCheckpoint::Open(folder.path(), config);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  for (const WeightLoader::Options& options : kOptions) ExpectLoads(*checkpoint, options);
}

TEST_F(WeightLoaderTest, MakesRandomWeights) {
  const TemporaryFolder folder;
  const auto checkpoint = DraftCheckpoint::Random(folder.path(), Config(80), 3);
  ASSERT_TRUE(checkpoint.ok());
  for (const WeightLoader::Options& options : kOptions) ExpectLoads(*checkpoint, options);
}

TEST_F(WeightLoaderTest, RefusesPartsThatDoNotStack) {
  const TemporaryFolder folder;
  const auto checkpoint = DraftCheckpoint::Random(folder.path(), Config(80), 3);
  ASSERT_TRUE(checkpoint.ok());
  WeightLoader loader(*checkpoint, SliceTensors(Config(80), {}), stream_);
  LinearWeight weight;
  loader.Linear({loader.Whole("fc.weight"), loader.Whole("layers.0.self_attn.q_proj.weight")}, &weight);
  EXPECT_EQ(loader.Run({}).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(WeightLoaderTest, ReportsAFileThatWasTruncatedMeanwhile) {
  const TemporaryFolder folder;
  const DraftConfig config = Config(80);
  WriteCheckpoint(config, folder);
  const auto checkpoint = DraftCheckpoint::Open(folder.path(), config);
  ASSERT_TRUE(checkpoint.ok());
  std::filesystem::resize_file(folder.File("model.safetensors"), 60000);
  WeightLoader loader(*checkpoint, SliceTensors(Config(80), {}), stream_,
                      {.piece_bytes = 1000, .buffers = 5});
  LinearWeight gate, up, down;
  loader.Linear({loader.Whole("layers.0.mlp.gate_proj.weight")}, &gate);
  loader.Linear({loader.Whole("layers.0.mlp.up_proj.weight")}, &up);
  loader.Linear({loader.Whole("layers.0.mlp.down_proj.weight")}, &down);
  EXPECT_EQ(loader.Run({}).code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace dflash
