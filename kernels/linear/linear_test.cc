// The contract of linear.h against a double reference, for the linked backend.
#include "kernels/linear/linear.h"

#include <algorithm>
#include <string>

#include "gtest/gtest.h"
#include "kernels/linear/linear_ref.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

Tolerance LinearTolerance(int64_t in_features) {
  return ActivationDType() == DType::kF32 ? Tolerance::F32Reduction(in_features)
                                          : Tolerance::F32MatrixUnit(in_features);
}

class LinearTest : public ::testing::Test {
 protected:
  // x rounded to what the backend computes with.
  HostMatrix<float> Rounded(const HostMatrix<float>& x) {
    return DeviceMatrix::Activations(x, stream_).ToHost();
  }
  template <typename W>
  HostMatrix<double> Oracle(const HostMatrix<float>& x, const HostMatrix<W>& w) {
    HostMatrix<double> y(x.rows, w.rows);
    const HostMatrix<float> rounded = Rounded(x);
    LinearRef<double>(rounded.values.data(), w.values.data(), x.rows, w.rows, x.cols, y.values.data());
    return y;
  }
  HostMatrix<float> Run(const HostMatrix<float>& x, const LinearWeight& w, Phase phase = Phase::kVerify,
                        int64_t extra_stride = 0) {
    const DeviceMatrix x_device = DeviceMatrix::Activations(x, stream_, extra_stride);
    const DeviceMatrix y = DeviceMatrix::Output(x.rows, w.out_features(), DType::kF32, stream_, extra_stride);
    EXPECT_TRUE(Linear(x_device.view(), w, phase, y.view(), stream_).ok());
    EXPECT_TRUE(y.GuardsIntact());
    return y.ToHost();
  }
  template <typename W>
  void ExpectMatchesOracle(int64_t T, int64_t N, int64_t K, int64_t extra_stride = 0) {
    SCOPED_TRACE(std::to_string(T) + " rows, " + std::to_string(N) + "x" + std::to_string(K));
    const HostMatrix<W> w = RandomMatrix<W>(N, K, 1);
    const HostMatrix<float> x = RandomMatrix<float>(T, K, 2);
    auto weight = LinearWeight::Pack({w.view()}, stream_);
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ(weight->out_features(), N);
    EXPECT_EQ(weight->in_features(), K);
    for (Phase phase : {Phase::kVerify, Phase::kPrefill}) {
      EXPECT_TRUE(Near(Run(x, *weight, phase, extra_stride), Oracle(x, w), LinearTolerance(K)));
    }
  }

  Stream stream_ = *Stream::Create({});
};

TEST(LinearRefTest, IsTheProductWithTheTransposedWeight) {
  const float x[] = {1, 2, 3, 4};                 // 2 x 2
  const float w[] = {10, 1, 0, -1, 0.5f, 0.25f};  // 3 x 2
  double y[6];
  LinearRef<double>(x, w, 2, 3, 2, y);
  const double expected[] = {12, -2, 1, 34, -4, 2.5};
  for (int i = 0; i < 6; ++i) EXPECT_EQ(y[i], expected[i]);
}

TEST_F(LinearTest, MatchesTheReferenceForEveryNumberOfRows) {
  for (int64_t T : {0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 15, 16, 17, 63, 64, 65, 200}) {
    ExpectMatchesOracle<bf16>(T, 80, 256);
    ExpectMatchesOracle<float>(T, 80, 256);
  }
}

TEST_F(LinearTest, MatchesTheReferenceForOddShapes) {
  for (int64_t N : {1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 1000}) {
    for (int64_t K : {1, 2, 127, 128, 129, 257}) {
      ExpectMatchesOracle<bf16>(1, N, K, 3);
      ExpectMatchesOracle<float>(17, N, K, 3);
    }
  }
  for (int64_t T : {1, 6, 7, 17}) ExpectMatchesOracle<bf16>(T, 40, 3000, 1);
}

// However a backend orders the outputs of a gate and an up projection in memory, y has them as they were
// given.
TEST_F(LinearTest, GateAndUpKeepTheirOrder) {
  for (int64_t N : {2, 16, 30, 48, 128, 272, 1008}) {
    const HostMatrix<bf16> gate = RandomMatrix<bf16>(N / 2, 72, 1), up = RandomMatrix<bf16>(N / 2, 72, 2);
    HostMatrix<bf16> stacked(N, 72);
    std::copy(gate.values.begin(), gate.values.end(), stacked.Row(0));
    std::copy(up.values.begin(), up.values.end(), stacked.Row(N / 2));
    auto weight = LinearWeight::Pack({gate.view(), up.view()}, stream_, LinearUse::kGateUp);
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ(weight->use(), LinearUse::kGateUp);
    for (int64_t T : {1, 17, 130, 300}) {
      const HostMatrix<float> x = RandomMatrix<float>(T, 72, 3);
      const HostMatrix<double> expected = Oracle(x, stacked);
      for (Phase phase : {Phase::kVerify, Phase::kPrefill}) {
        for (int64_t extra_stride : {0, 1, 8}) {
          SCOPED_TRACE(std::to_string(T) + " rows, " + std::to_string(N) + " outputs");
          EXPECT_TRUE(Near(Run(x, *weight, phase, extra_stride), expected, LinearTolerance(72)));
        }
      }
    }
  }
}

TEST_F(LinearTest, StacksPartsInOrder) {
  const HostMatrix<bf16> a = RandomMatrix<bf16>(5, 48, 1), b = RandomMatrix<bf16>(40, 48, 2),
                         c = RandomMatrix<bf16>(3, 48, 3);
  const HostMatrix<float> x = RandomMatrix<float>(4, 48, 4);
  auto stacked = LinearWeight::Pack({a.view(), b.view(), c.view()}, stream_);
  ASSERT_TRUE(stacked.ok());
  ASSERT_EQ(stacked->out_features(), 48);
  const HostMatrix<float> y = Run(x, *stacked);
  int64_t first = 0;
  for (const HostMatrix<bf16>* part : {&a, &b, &c}) {
    auto weight = LinearWeight::Pack({part->view()}, stream_);
    ASSERT_TRUE(weight.ok());
    const HostMatrix<float> alone = Run(x, *weight);
    for (int64_t t = 0; t < 4; ++t) {
      for (int64_t n = 0; n < part->rows; ++n) EXPECT_EQ(y.At(t, first + n), alone.At(t, n));
    }
    first += part->rows;
  }
}

TEST_F(LinearTest, PacksViewsWithAStride) {
  const HostMatrix<bf16> wide = RandomMatrix<bf16>(40, 100, 1);
  HostMatrix<bf16> narrow(40, 33);
  for (int64_t n = 0; n < 40; ++n) {
    for (int64_t k = 0; k < 33; ++k) narrow.At(n, k) = wide.At(n, 60 + k);
  }
  const HostMatrix<float> x = RandomMatrix<float>(2, 33, 2);
  auto from_view = LinearWeight::Pack({wide.view().Cols(60, 33)}, stream_);
  auto from_copy = LinearWeight::Pack({narrow.view()}, stream_);
  ASSERT_TRUE(from_view.ok() && from_copy.ok());
  EXPECT_TRUE(BitEqual(Run(x, *from_view), Run(x, *from_copy)));
}

TEST_F(LinearTest, PackedInPiecesIsPackedAtOnce) {
  const HostMatrix<bf16> bf = RandomMatrix<bf16>(300, 72, 1);
  const HostMatrix<float> f32 = RandomMatrix<float>(300, 72, 1);
  const HostMatrix<float> x = RandomMatrix<float>(3, 72, 2);
  const auto check = [&](const auto& all, DType dtype, LinearUse use) {
    const int64_t N = use == LinearUse::kGateUp ? 288 : 300;  // a gate of 144 outputs
    const auto w = all.Rows(0, N);
    auto whole = LinearWeight::Pack({w.view()}, stream_, use);
    auto pieces = LinearWeight::Allocate(N, 72, dtype, stream_, use);
    ASSERT_TRUE(whole.ok() && pieces.ok());
    for (auto [first, count] : {std::pair<int64_t, int64_t>{130, N - 130}, {0, 1}, {1, 120}, {121, 9}}) {
      const DeviceMatrix rows = DeviceMatrix::Input(w.Rows(first, count), stream_, 5);
      ASSERT_TRUE(pieces->PackRows(rows.view(), first, stream_).ok());
    }
    EXPECT_TRUE(BitEqual(Run(x, *pieces), Run(x, *whole)));
    const DeviceMatrix rows = DeviceMatrix::Input(w.Rows(0, 2), stream_);
    const DeviceMatrix other = DeviceMatrix::Input(RandomMatrix<float>(2, 71, 1), stream_);
    EXPECT_EQ(pieces->PackRows(rows.view(), N - 1, stream_).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(pieces->PackRows(rows.view(), -1, stream_).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(pieces->PackRows(other.view(), 0, stream_).code(), absl::StatusCode::kInvalidArgument);
  };
  for (LinearUse use : {LinearUse::kAny, LinearUse::kGateUp}) {
    check(bf, DType::kBf16, use);
    check(f32, DType::kF32, use);
  }
  EXPECT_EQ(LinearWeight::Allocate(33, 72, DType::kBf16, stream_, LinearUse::kGateUp).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(LinearWeight::Allocate(0, 72, DType::kBf16, stream_).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// Design promise: a row's bits do not depend on its company.
TEST_F(LinearTest, RowsAloneAndInCompanyHaveTheSameBits) {
  const HostMatrix<bf16> w = RandomMatrix<bf16>(100, 1300, 1);
  const HostMatrix<float> x = RandomMatrix<float>(64, 1300, 2);
  auto weight = LinearWeight::Pack({w.view()}, stream_);
  ASSERT_TRUE(weight.ok());
  const HostMatrix<float> all = Run(x, *weight);
  for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 15, 16, 17, 33}) {
    for (int64_t first : {int64_t{0}, int64_t{11}, 64 - rows}) {
      SCOPED_TRACE(std::to_string(rows) + " rows from " + std::to_string(first));
      EXPECT_TRUE(BitEqual(Run(x.Rows(first, rows), *weight), all.Rows(first, rows)));
    }
  }
}

TEST_F(LinearTest, NansAndInfinitiesStayInTheirRowAndColumn) {
  HostMatrix<float> w = RandomMatrix<float>(40, 64, 1, 0.5f, 1);
  HostMatrix<float> x = RandomMatrix<float>(7, 64, 2, 0.5f, 1);
  x.At(3, 10) = HUGE_VALF;
  w.At(20, 5) = NAN;
  auto weight = LinearWeight::Pack({w.view()}, stream_);
  ASSERT_TRUE(weight.ok());
  EXPECT_TRUE(Near(Run(x, *weight), Oracle(x, w), LinearTolerance(64)));
}

TEST_F(LinearTest, RefusesWhatDoesNotFit) {
  const HostMatrix<bf16> w = RandomMatrix<bf16>(8, 16, 1), other = RandomMatrix<bf16>(8, 17, 1);
  const HostMatrix<float> floats = RandomMatrix<float>(8, 16, 1);
  const auto code = [&](const std::vector<ConstMatrixView>& parts) {
    return LinearWeight::Pack(parts, stream_).status().code();
  };
  EXPECT_EQ(code({}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({w.view(), other.view()}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({w.view(), floats.view()}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({w.view(), ConstMatrixView(w.values.data(), 0, 16)}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({ConstMatrixView(static_cast<const bf16*>(nullptr), 8, 16)}),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({ConstMatrixView(w.values.data(), DType::kBf16, 8, 16, 15)}),
            absl::StatusCode::kInvalidArgument);

  auto weight = LinearWeight::Pack({w.view()}, stream_);
  ASSERT_TRUE(weight.ok());
  const auto linear = [&](int64_t x_rows, int64_t x_cols, int64_t y_rows, int64_t y_cols) {
    const DeviceMatrix x = DeviceMatrix::Activations(HostMatrix<float>(x_rows, x_cols), stream_);
    const DeviceMatrix y = DeviceMatrix::Output(y_rows, y_cols, DType::kF32, stream_);
    return Linear(x.view(), *weight, Phase::kVerify, y.view(), stream_).code();
  };
  EXPECT_EQ(linear(2, 16, 2, 8), absl::StatusCode::kOk);
  EXPECT_EQ(linear(2, 15, 2, 8), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(linear(2, 16, 3, 8), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(linear(2, 16, 2, 7), absl::StatusCode::kInvalidArgument);
  const DType wrong = ActivationDType() == DType::kF32 ? DType::kBf16 : DType::kF32;
  const DeviceMatrix x = DeviceMatrix::Output(2, 16, wrong, stream_);
  const DeviceMatrix y = DeviceMatrix::Output(2, 8, DType::kF32, stream_);
  EXPECT_EQ(Linear(x.view(), *weight, Phase::kVerify, y.view(), stream_).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dflash
