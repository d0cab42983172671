#include "kernels/random_weights/random_weights.h"

#include <bit>
#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

// Computed with Python's unbounded integers from docs/spec/random-weights.md.
TEST(RandomElementTest, KnownValues) {
  EXPECT_EQ(MixBits(1), 0x5692161d100b05e5u);
  EXPECT_EQ(MixBits(2), 0xdbd238973a2b148au);
  constexpr uint64_t kKey = 0x123456789abcdef0u;
  const std::vector<uint64_t> indices = {0, 1, 2, 1271398399};
  const std::vector<int64_t> noise = {-77929, -10512, 27008, -88096};
  struct {
    RandomTensor tensor;
    std::vector<uint32_t> f32;
    std::vector<uint16_t> bf16;
  } const cases[] = {
      {{kKey, 1586, 0}, {0xbcebbd50, 0xbb7e6520, 0x3c2366c0, 0xbd053f64}, {0xbcec, 0xbb7e, 0x3c23, 0xbd05}},
      {{kKey, 7094, int64_t{1} << 32},
       {0x3f5f0c82, 0x3f7b8e1f, 0x3f85b5c0, 0x3f5abff9},
       {0x3f5f, 0x3f7c, 0x3f86, 0x3f5b}},
      {{kKey, 113511, -(int64_t{4} << 32)},
       {0xc0c1e806, 0xc088e3e7, 0xc0525143, 0xc0ca813b},
       {0xc0c2, 0xc089, 0xc052, 0xc0cb}},
  };
  for (size_t i = 0; i < indices.size(); ++i) {
    EXPECT_EQ(RandomNoise(kKey, indices[i]), noise[i]);
    for (const auto& expected : cases) {
      const float value = RandomElement(expected.tensor, indices[i]);
      EXPECT_EQ(std::bit_cast<uint32_t>(value), expected.f32[i]);
      EXPECT_EQ(bf16(value).bits, expected.bf16[i]);
    }
  }
  EXPECT_EQ(RandomNoise(0xfffffffffffffff0u, uint64_t{1} << 40), 14680);
}

template <typename T>
void ExpectBlock(const RandomTensor& tensor, int64_t tensor_cols, int64_t first_row, int64_t first_col,
                 int64_t rows, int64_t cols, int64_t extra_stride) {
  SCOPED_TRACE(testing::Message() << rows << "x" << cols << " at " << first_row << ", " << first_col
                                  << ", stride + " << extra_stride);
  const Stream stream = *Stream::Create({.threads = 2});
  const DeviceMatrix y = DeviceMatrix::Output(rows, cols, DTypeOf<T>::value, stream, extra_stride);
  ASSERT_TRUE(FillRandom(tensor, tensor_cols, first_row, first_col, y.view(), stream).ok());
  HostMatrix<float> expected(rows, cols);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const auto index = static_cast<uint64_t>((first_row + r) * tensor_cols + first_col + c);
      expected.At(r, c) = static_cast<float>(T(RandomElement(tensor, index)));
    }
  }
  EXPECT_TRUE(BitEqual(y.ToHost(), expected));
  EXPECT_TRUE(y.GuardsIntact());
}

TEST(FillRandomTest, EveryBlockHoldsTheElementsOfTheTensor) {
  const RandomTensor tensor = {.key = 0xfedcba9876543210u, .multiplier = 7094, .centre = int64_t{1} << 32};
  for (int64_t extra_stride : {0, 3, 8}) {
    ExpectBlock<bf16>(tensor, 1000, 0, 0, 3, 1000, extra_stride);
    ExpectBlock<bf16>(tensor, 1000, 248319, 8, 5, 640, extra_stride);  // beyond 2^27 elements
    ExpectBlock<bf16>(tensor, 1000, 7, 333, 70, 1, extra_stride);
    ExpectBlock<float>(tensor, 1000, 7, 333, 2, 257, extra_stride);
    ExpectBlock<float>(tensor, 5, 1, 0, 4, 5, extra_stride);
  }
  ExpectBlock<bf16>(tensor, 5120, 900000, 0, 2, 5120, 0);  // indices beyond 2^32
  ExpectBlock<bf16>(tensor, 16, 0, 0, 0, 16, 0);
}

TEST(FillRandomTest, RefusesABlockOutsideTheTensor) {
  const Stream stream = *Stream::Create({.threads = 1});
  const DeviceMatrix y = DeviceMatrix::Output(2, 8, DType::kBf16, stream);
  for (auto [cols, row, col] : {std::tuple{8, 0, 1}, {7, 0, 0}, {8, -1, 0}, {8, 0, -1}}) {
    EXPECT_EQ(FillRandom({}, cols, row, col, y.view(), stream).code(), absl::StatusCode::kInvalidArgument);
  }
}

// Mean, standard deviation and independence of neighbours, of columns and of tensors.
TEST(RandomElementTest, LooksLikeNoise) {
  constexpr int kCount = 1 << 16;
  const double expected = 65536 / std::sqrt(3.0);
  double sum = 0, squares = 0, neighbours = 0, column = 0, other_key = 0;
  for (uint64_t i = 0; i < kCount; ++i) {
    const auto noise = static_cast<double>(RandomNoise(1, i));
    sum += noise;
    squares += noise * noise;
    neighbours += noise * static_cast<double>(RandomNoise(1, i + 1));
    column += noise * static_cast<double>(RandomNoise(1, i + 5120));
    other_key += noise * static_cast<double>(RandomNoise(2, i));
  }
  const double tolerance = 4 / std::sqrt(static_cast<double>(kCount));  // four standard errors
  EXPECT_NEAR(sum / kCount / expected, 0, tolerance);
  EXPECT_NEAR(std::sqrt(squares / kCount) / expected, 1, tolerance);
  for (double product : {neighbours, column, other_key}) {
    EXPECT_NEAR(product / kCount / (expected * expected), 0, tolerance);
  }
}

}  // namespace
}  // namespace dflash
