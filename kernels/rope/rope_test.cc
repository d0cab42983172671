// The contract of rope.h against a double reference, for the linked backend.
#include "kernels/rope/rope.h"

#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/rope/rope_ref.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"
#include "kernels/testing/replay.h"

namespace dflash {
namespace {

Tolerance RopeTolerance() {
  // Sums of two products of numbers up to 1.
  return ActivationDType() == DType::kF32 ? Tolerance{3e-7, 0} : Tolerance::Bf16Reduction(2);
}

class RopeTest : public ::testing::Test {
 protected:
  void ExpectMatchesOracle(int64_t T, int64_t heads, const RopeShape& shape,
                           const std::vector<Segment>& segments, int64_t extra_stride = 7) {
    SCOPED_TRACE(std::to_string(heads) + " heads of " + std::to_string(shape.head_dim) + ", rotary " +
                 std::to_string(shape.rotary_dim));
    const HostMatrix<float> x =
        DeviceMatrix::Activations(RandomMatrix<float>(T, heads * shape.head_dim, 1), stream_).ToHost();
    const DeviceMatrix before = DeviceMatrix::Activations(x, stream_, extra_stride);
    const DeviceMatrix device = DeviceMatrix::InOut(x, stream_, extra_stride);
    DeviceArray<Segment> list(segments, stream_);
    ASSERT_TRUE(CaptureAndReplay(
                    stream_,
                    [&] {
                      return ApplyRope(device.view(), shape, {list.data(), list.size()}, stream_);
                    },
                    [&] { return CopyRows(before.view(), device.view(), stream_); })
                    .ok());
    EXPECT_TRUE(device.GuardsIntact());
    HostMatrix<double> expected = Converted<double>(x);
    std::vector<bool> rotated(static_cast<size_t>(T), false);
    for (const Segment& segment : segments) {
      for (int32_t i = 0; i < segment.row_count; ++i) {
        rotated[static_cast<size_t>(segment.first_row + i)] = true;
        for (int64_t head = 0; head < heads; ++head) {
          RopeRef<double>(expected.Row(segment.first_row + i) + head * shape.head_dim, shape.rotary_dim,
                          shape.theta, segment.start_position + i);
        }
      }
    }
    const HostMatrix<float> actual = device.ToHost();
    EXPECT_TRUE(Near(actual, expected, RopeTolerance()));
    // What is not rotated keeps its bits.
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t col = 0; col < x.cols; ++col) {
        if (rotated[static_cast<size_t>(t)] && col % shape.head_dim < shape.rotary_dim) continue;
        ASSERT_EQ(actual.At(t, col), x.At(t, col));
      }
    }
  }
  Stream stream_ = *Stream::Create({});
};

TEST(RopeRefTest, RotatesHalfSplitPairs) {
  double at_zero[] = {1, 2, 3, 4, 5};
  RopeRef<double>(at_zero, 4, 10000, 0);
  EXPECT_EQ(at_zero[0], 1);
  EXPECT_EQ(at_zero[3], 4);
  // Frequencies 1 and 1/100 for rotary 4, theta 10^4: pairs (0, 2) by 3, (1, 3) by 0.03; element 4 passes.
  double x[] = {1, 0, 0, 1, 5};
  RopeRef<double>(x, 4, 10000, 3);
  EXPECT_NEAR(x[0], -0.9899924966, 1e-9);  // cos 3
  EXPECT_NEAR(x[2], 0.1411200081, 1e-9);   // sin 3
  EXPECT_NEAR(x[1], -0.0299955002, 1e-8);  // -sin 0.03
  EXPECT_NEAR(x[3], 0.9995500337, 1e-8);   // cos 0.03
  EXPECT_EQ(x[4], 5);
}

TEST_F(RopeTest, MatchesTheReference) {
  const std::vector<Segment> one = {{.slot = 0, .first_row = 0, .row_count = 1, .start_position = 0}};
  const std::vector<Segment> some = {{.slot = 2, .first_row = 1, .row_count = 16, .start_position = 1000},
                                     {.slot = 0, .first_row = 17, .row_count = 0, .start_position = 5},
                                     {.slot = 1, .first_row = 18, .row_count = 3, .start_position = 262000}};
  for (const RopeShape& shape : {RopeShape{2, 2, 1e4}, RopeShape{7, 6, 1e4}, RopeShape{64, 64, 1e7},
                                 RopeShape{128, 128, 1e7}, RopeShape{256, 64, 1e7}, RopeShape{34, 34, 1e6}}) {
    ExpectMatchesOracle(1, 1, shape, one);
    ExpectMatchesOracle(22, 3, shape, some);
    ExpectMatchesOracle(0, 3, shape, {});
    ExpectMatchesOracle(4, 3, shape, {});
  }
  // The heads of the large models, rows at multiples of 16 bytes.
  for (int64_t extra_stride : {0, 8}) {
    ExpectMatchesOracle(22, 24, {256, 64, 1e7}, some, extra_stride);
    ExpectMatchesOracle(22, 32, {128, 128, 1e7}, some, extra_stride);
  }
}

TEST_F(RopeTest, WorksOnAColumnBlock) {
  const HostMatrix<float> x = DeviceMatrix::Activations(RandomMatrix<float>(2, 40, 1), stream_).ToHost();
  const DeviceMatrix all = DeviceMatrix::InOut(x, stream_);
  DeviceArray<Segment> list({{.slot = 0, .first_row = 0, .row_count = 2, .start_position = 9}}, stream_);
  ASSERT_TRUE(ApplyRope(all.view().Cols(8, 16), {16, 16, 1e4}, {list.data(), list.size()}, stream_).ok());
  HostMatrix<double> expected = Converted<double>(x);
  for (int64_t t = 0; t < 2; ++t) RopeRef<double>(expected.Row(t) + 8, 16, 1e4, 9 + t);
  EXPECT_TRUE(Near(all.ToHost(), expected, RopeTolerance()));
  EXPECT_EQ(all.ToHost().At(0, 7), x.At(0, 7));
  EXPECT_EQ(all.ToHost().At(1, 24), x.At(1, 24));
}

// The norm of heads before the rotation, in one call or in four.
TEST_F(RopeTest, NormAndRopeEqualsItsParts) {
  for (const RopeShape& shape : {RopeShape{256, 64, 1e7}, {128, 128, 1e6}, {128, 40, 1e4}, {32, 16, 1e4}}) {
    for (int64_t q_heads : {int64_t{0}, int64_t{6}}) {
      for (int64_t extra_stride : {0, 8, 1}) {
        for (NormWeight weight : {NormWeight::kPlain, NormWeight::kOnePlus}) {
          SCOPED_TRACE(std::to_string(shape.head_dim) + ", stride +" + std::to_string(extra_stride));
          DeviceArray<Segment> list({{0, 1, 5, 0}, {0, 7, 3, 30000}}, stream_);  // row 0 and 6: nobody's
          const auto matrix = [&](int64_t heads) {
            return DeviceMatrix::InOut(
                RandomMatrix<float>(11, heads * shape.head_dim, static_cast<uint32_t>(heads)), stream_,
                extra_stride);
          };
          const DeviceMatrix w[2] = {
              DeviceMatrix::Activations(RandomMatrix<float>(1, shape.head_dim, 5), stream_),
              DeviceMatrix::Activations(RandomMatrix<float>(1, shape.head_dim, 6), stream_)};
          const DeviceMatrix q[2] = {matrix(q_heads), matrix(q_heads)}, k[2] = {matrix(3), matrix(3)};
          const SegmentList segments = {list.data(), list.size()};
          ASSERT_TRUE(NormAndRope(q[0].view(), w[0].view(), k[0].view(), w[1].view(), weight, 1e-6f, shape,
                                  segments, stream_)
                          .ok());
          for (const auto& [x, x_weight] : {std::pair(&q[1], &w[0]), {&k[1], &w[1]}}) {
            if (x->view().cols == 0) continue;
            ASSERT_TRUE(RmsNorm(x->view(), x_weight->view(), weight, 1e-6f, x->view(), stream_).ok());
            ASSERT_TRUE(ApplyRope(x->view(), shape, segments, stream_).ok());
          }
          EXPECT_TRUE(BitEqual(q[0].ToHost(), q[1].ToHost()));
          EXPECT_TRUE(BitEqual(k[0].ToHost(), k[1].ToHost()));
          EXPECT_TRUE(k[0].GuardsIntact());
        }
      }
    }
  }
}

TEST_F(RopeTest, RefusesWhatDoesNotFit) {
  const DeviceMatrix x = DeviceMatrix::InOut(RandomMatrix<float>(2, 32, 1), stream_);
  DeviceArray<Segment> list({{.slot = 0, .first_row = 0, .row_count = 2, .start_position = 0}}, stream_);
  const auto code = [&](RopeShape shape) {
    return ApplyRope(x.view(), shape, {list.data(), list.size()}, stream_).code();
  };
  EXPECT_EQ(code({16, 8, 1e4}), absl::StatusCode::kOk);
  EXPECT_EQ(code({15, 8, 1e4}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({16, 7, 1e4}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({16, 18, 1e4}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({16, 0, 1e4}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({0, 0, 1e4}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({16, 8, 0}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({16, 8, NAN}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ApplyRope(x.view(), {16, 8, 1e4}, {nullptr, 1}, stream_).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dflash
