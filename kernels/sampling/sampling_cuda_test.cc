// What the GPU adds to sampling_test.cc: the real vocabulary, many rows, captured launches. Token for token:
// sampling.h fixes every rounding.
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device/graph.h"
#include "kernels/sampling/sampling.h"
#include "kernels/sampling/sampling_ref.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

class SamplingCudaTest : public ::testing::Test {
 protected:
  std::vector<int32_t> Sample(const HostMatrix<float>& logits, const std::vector<SamplingParams>& params,
                              const std::vector<int64_t>& positions, int64_t vocabulary) {
    const DeviceMatrix device_logits = DeviceMatrix::Input(logits, stream_, /*extra_stride=*/3);
    DeviceArray<SamplingParams> device_params(params, stream_);
    DeviceArray<int64_t> device_positions(positions, stream_);
    DeviceArray<int32_t> tokens(std::vector<int32_t>(static_cast<size_t>(logits.rows), -99), stream_);
    const absl::Status status = SampleRows(device_logits.view(), device_params.data(),
                                           device_positions.data(), vocabulary, tokens.data(), stream_);
    EXPECT_TRUE(status.ok()) << status;
    return tokens.ToHost();
  }
  void ExpectReference(const HostMatrix<float>& logits, const std::vector<SamplingParams>& params,
                       int64_t vocabulary) {
    std::vector<int64_t> positions;
    for (int64_t r = 0; r < logits.rows; ++r)
      positions.push_back(r * 977 + (r % 3 == 0 ? int64_t{1} << 33 : 0));
    const std::vector<int32_t> tokens = Sample(logits, params, positions, vocabulary);
    for (int64_t r = 0; r < logits.rows; ++r) {
      const auto at = static_cast<size_t>(r);
      ASSERT_EQ(tokens[at], SampleRef(logits.Row(r), vocabulary, params[at], positions[at]))
          << "row " << r << ": temperature " << params[at].temperature << " top_k " << params[at].top_k
          << " top_p " << params[at].top_p << " min_p " << params[at].min_p;
    }
  }

  Stream stream_ = *Stream::Create({});
};

// The real vocabulary: peaked rows, whose candidates fit into a list, and flat ones, where selection goes
// over the whole row.
TEST_F(SamplingCudaTest, EqualsTheReferenceAtRealSize) {
  const int64_t vocabulary = 248077, columns = 248320;
  const std::vector<SamplingParams> params = {
      {0, 0, 1, 0, 1},       {0.7f, 20, 0.8f, 0, 2},   {1, 20, 0.95f, 0, 3},    {1, 0, 0.95f, 0, 4},
      {1, 0, 1, 0, 5},       {1, 0, 1, 0.05f, 6},      {1.5f, 0, 0.999f, 0, 7}, {1, 3000, 1, 0, 8},
      {1, 3000, 0.9f, 0, 9}, {1, 1 << 20, 0.5f, 0, 0}, {0.7f, 64, 1, 0.1f, 11}, {3, 2048, 0.3f, 0, 12}};
  for (float spread : {0.5f, 10.0f}) {
    HostMatrix<float> logits = RandomMatrix<float>(static_cast<int64_t>(params.size()), columns, 3, -1, 1);
    // The cube of a uniform number: few far from the middle.
    for (float& logit : logits.values) logit = spread * logit * logit * logit;
    ExpectReference(logits, params, vocabulary);
  }
}

TEST_F(SamplingCudaTest, MoreRowsThanOneRoundOfLaunches) {
  const int64_t rows = 1100, vocabulary = 50;
  std::vector<SamplingParams> params;
  for (int64_t r = 0; r < rows; ++r)
    params.push_back({1, static_cast<int32_t>(r % 5), 0.9f, 0, static_cast<uint64_t>(r)});
  ExpectReference(RandomMatrix<float>(rows, vocabulary, 5, -4, 4), params, vocabulary);
}

TEST_F(SamplingCudaTest, ReplaysWithOtherParametersAndPositions) {
  const int64_t rows = 5, vocabulary = 248077, columns = 248320;
  const HostMatrix<float> logits = RandomMatrix<float>(rows, columns, 9, -6, 6);
  const DeviceMatrix device_logits = DeviceMatrix::Input(logits, stream_);
  DeviceArray<SamplingParams> params(std::vector<SamplingParams>(rows), stream_);
  DeviceArray<int64_t> positions(std::vector<int64_t>(rows, 0), stream_);
  DeviceArray<int32_t> tokens(std::vector<int32_t>(rows, -99), stream_);
  auto graph = Graph::Capture(stream_, [&] {
    return SampleRows(device_logits.view(), params.data(), positions.data(), vocabulary, tokens.data(),
                      stream_);
  });
  ASSERT_TRUE(graph.ok()) << graph.status();
  for (uint64_t round = 0; round < 3; ++round) {
    const std::vector<SamplingParams> now = {{0, 0, 1, 0, round},
                                             {1, 0, 1, 0, round},
                                             {1, 20, 0.9f, 0, round},
                                             {4, 0, 0.99f, 0, round},
                                             {1, 2500, 1, 0, round}};
    const std::vector<int64_t> at = {1, 2, static_cast<int64_t>(3 + round), 4, 5};
    ASSERT_TRUE(
        CopyToDevice(params.data(), now.data(), rows * static_cast<int64_t>(sizeof(now[0])), stream_).ok());
    ASSERT_TRUE(CopyToDevice(positions.data(), at.data(), rows * 8, stream_).ok());
    ASSERT_TRUE(graph->Launch(stream_).ok());
    const std::vector<int32_t> result = tokens.ToHost();
    for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
      EXPECT_EQ(result[r], SampleRef(logits.Row(static_cast<int64_t>(r)), vocabulary, now[r], at[r]))
          << round << " " << r;
    }
  }
}

}  // namespace
}  // namespace dflash
