// The contract of rms_norm.h against a double reference, for the linked backend.
#include "kernels/rms_norm/rms_norm.h"

#include <cmath>
#include <string>

#include "gtest/gtest.h"
#include "kernels/rms_norm/rms_norm_ref.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"
#include "kernels/testing/replay.h"

namespace dflash {
namespace {

constexpr float kEps = 1e-6f;

Tolerance NormTolerance() {
  return ActivationDType() == DType::kF32 ? Tolerance{1e-30, 1e-6} : Tolerance::Bf16Elementwise();
}

class RmsNormTest : public ::testing::Test {
 protected:
  HostMatrix<float> Rounded(const HostMatrix<float>& x) {
    return DeviceMatrix::Activations(x, stream_).ToHost();
  }
  template <typename W>
  static HostMatrix<double> Oracle(const HostMatrix<float>& x, const HostMatrix<W>& w, NormWeight weight) {
    HostMatrix<double> y(x.rows, x.cols);
    for (int64_t t = 0; t < x.rows; ++t) {
      for (int64_t col = 0; col < x.cols; col += w.cols) {
        RmsNormRef<double>(x.Row(t) + col, w.values.data(), weight == NormWeight::kOnePlus ? 1.0 : 0.0,
                           static_cast<double>(kEps), w.cols, y.Row(t) + col);
      }
    }
    return y;
  }
  template <typename W>
  void ExpectMatchesOracle(int64_t T, int64_t H, int64_t D, float magnitude = 1) {
    SCOPED_TRACE(std::to_string(T) + " rows of " + std::to_string(H) + " x " + std::to_string(D));
    const HostMatrix<float> x = Rounded(RandomMatrix<float>(T, H * D, 1, -magnitude, magnitude));
    const HostMatrix<float> z = Rounded(RandomMatrix<float>(T, H * D, 2, -6, 6));
    const HostMatrix<W> w = RandomMatrix<W>(1, D, 3, -0.5f, 1.5f);
    const DeviceMatrix w_device = DeviceMatrix::Input(w, stream_);
    for (NormWeight weight : {NormWeight::kPlain, NormWeight::kOnePlus}) {
      const DeviceMatrix in = DeviceMatrix::Activations(x, stream_, 3);
      const DeviceMatrix out = DeviceMatrix::Output(T, H * D, ActivationDType(), stream_, 5);
      ASSERT_TRUE(RmsNorm(in.view(), w_device.view(), weight, kEps, out.view(), stream_).ok());
      EXPECT_TRUE(Near(out.ToHost(), Oracle(x, w, weight), NormTolerance()));
      EXPECT_TRUE(out.GuardsIntact());
      const DeviceMatrix in_place = DeviceMatrix::InOut(x, stream_, 2);
      ASSERT_TRUE(RmsNorm(in_place.view(), w_device.view(), weight, kEps, in_place.view(), stream_).ok());
      EXPECT_TRUE(BitEqual(in_place.ToHost(), out.ToHost()));
      EXPECT_TRUE(in_place.GuardsIntact());
    }
    for (GateActivation gate : {GateActivation::kSilu, GateActivation::kSigmoid}) {
      const DeviceMatrix in = DeviceMatrix::Activations(x, stream_, 3);
      const DeviceMatrix z_device = DeviceMatrix::Activations(z, stream_, 1);
      const DeviceMatrix out = DeviceMatrix::Output(T, H * D, ActivationDType(), stream_, 5);
      ASSERT_TRUE(
          GatedRmsNorm(in.view(), w_device.view(), z_device.view(), gate, kEps, out.view(), stream_).ok());
      HostMatrix<double> expected(T, H * D);
      for (int64_t t = 0; t < T; ++t) {
        for (int64_t col = 0; col < H * D; col += D) {
          GatedRmsNormRef<double>(x.Row(t) + col, w.values.data(), z.Row(t) + col,
                                  gate == GateActivation::kSilu, static_cast<double>(kEps), D,
                                  expected.Row(t) + col);
        }
      }
      EXPECT_TRUE(Near(out.ToHost(), expected, NormTolerance()));
      EXPECT_TRUE(out.GuardsIntact());
      const DeviceMatrix in_place = DeviceMatrix::InOut(x, stream_, 2);
      ASSERT_TRUE(GatedRmsNorm(in_place.view(), w_device.view(), z_device.view(), gate, kEps, in_place.view(),
                               stream_)
                      .ok());
      EXPECT_TRUE(BitEqual(in_place.ToHost(), out.ToHost()));
    }
  }

  Stream stream_ = *Stream::Create({});
};

TEST(RmsNormRefTest, IsTheFormula) {
  const double x[] = {3, 4, 0, 0};
  const double w[] = {2, 1, 5, 5};
  double y[4];
  RmsNormRef<double>(x, w, 0.0, 0.0, 2, y);  // mean square 12.5
  EXPECT_NEAR(y[0], 3 / std::sqrt(12.5) * 2, 1e-15);
  EXPECT_NEAR(y[1], 4 / std::sqrt(12.5), 1e-15);
  RmsNormRef<double>(x, w, 1.0, 2.75, 4, y);  // mean square 6.25, plus eps 9; factor 1 + w
  EXPECT_NEAR(y[0], 3.0 / 3 * 3, 1e-15);
  EXPECT_NEAR(y[1], 4.0 / 3 * 2, 1e-15);
  EXPECT_EQ(y[2], 0);
  const double z[] = {0, std::log(3.0)};                        // sigmoid 1/2, 3/4
  GatedRmsNormRef<double>(x, w, z, /*silu=*/false, 3.5, 2, y);  // 12.5 + 3.5 = 4^2
  EXPECT_NEAR(y[0], 3.0 / 4 * 2 / 2, 1e-15);
  EXPECT_NEAR(y[1], 0.75, 1e-15);
  GatedRmsNormRef<double>(x, w, z, /*silu=*/true, 3.5, 2, y);
  EXPECT_EQ(y[0], 0);
  EXPECT_NEAR(y[1], 0.75 * std::log(3.0), 1e-15);
}

TEST_F(RmsNormTest, MatchesTheReference) {
  for (int64_t T : {0, 1, 2, 17}) {
    for (int64_t D : {1, 2, 15, 16, 17, 63, 64, 65, 128, 256, 1000}) {
      ExpectMatchesOracle<bf16>(T, 1, D);
      ExpectMatchesOracle<float>(T, 3, D);
    }
  }
  ExpectMatchesOracle<bf16>(1, 1, 5120);
  ExpectMatchesOracle<bf16>(64, 8, 128);
}

// Rows that begin at multiples of 16 bytes, as the models' do, are read and written in wide words. Replayed
// from a graph.
TEST_F(RmsNormTest, MatchesTheReferenceAtTheModelsShapes) {
  struct Case {
    int64_t T, H, D;
  };
  // Hidden states; heads of the target's and the drafter's q; value heads of Gated DeltaNet; the small
  // pair's.
  for (const Case& c : {Case{1, 1, 5120},
                        {16, 1, 5120},
                        {129, 1, 5120},
                        {16, 24, 256},
                        {16, 32, 128},
                        {16, 48, 128},
                        {33, 1, 256},
                        {16, 6, 64}}) {
    for (int64_t extra_stride : {0, 8}) {
      SCOPED_TRACE(testing::Message()
                   << c.T << " rows of " << c.H << " x " << c.D << ", stride +" << extra_stride);
      const HostMatrix<float> x = Rounded(RandomMatrix<float>(c.T, c.H * c.D, 1, -4, 4));
      const HostMatrix<float> z = Rounded(RandomMatrix<float>(c.T, c.H * c.D, 2, -6, 6));
      const HostMatrix<bf16> w = RandomMatrix<bf16>(1, c.D, 3, -0.5f, 1.5f);
      const DeviceMatrix w_device = DeviceMatrix::Input(w, stream_);
      const DeviceMatrix in = DeviceMatrix::Activations(x, stream_, extra_stride);
      const DeviceMatrix z_device = DeviceMatrix::Activations(z, stream_, extra_stride);
      const DeviceMatrix out = DeviceMatrix::Output(c.T, c.H * c.D, ActivationDType(), stream_, extra_stride);
      const DeviceMatrix gated =
          DeviceMatrix::Output(c.T, c.H * c.D, ActivationDType(), stream_, extra_stride);
      ASSERT_TRUE(CaptureAndReplay(stream_, [&] {
                    return RmsNorm(in.view(), w_device.view(), NormWeight::kOnePlus, kEps, out.view(),
                                   stream_);
                  }).ok());
      EXPECT_TRUE(Near(out.ToHost(), Oracle(x, w, NormWeight::kOnePlus), NormTolerance()));
      EXPECT_TRUE(out.GuardsIntact());
      ASSERT_TRUE(CaptureAndReplay(stream_, [&] {
                    return GatedRmsNorm(in.view(), w_device.view(), z_device.view(), GateActivation::kSilu,
                                        kEps, gated.view(), stream_);
                  }).ok());
      HostMatrix<double> expected(c.T, c.H * c.D);
      for (int64_t t = 0; t < c.T; ++t) {
        for (int64_t col = 0; col < c.H * c.D; col += c.D) {
          GatedRmsNormRef<double>(x.Row(t) + col, w.values.data(), z.Row(t) + col, true,
                                  static_cast<double>(kEps), c.D, expected.Row(t) + col);
        }
      }
      EXPECT_TRUE(Near(gated.ToHost(), expected, NormTolerance()));
      EXPECT_TRUE(gated.GuardsIntact());
    }
  }
}

TEST_F(RmsNormTest, AddMatchesTheReferenceAtTheModelsShapes) {
  for (int64_t D : {256, 5120}) {
    const HostMatrix<bf16> w = RandomMatrix<bf16>(1, D, 3, -0.5f, 1.5f);
    const DeviceMatrix w_device = DeviceMatrix::Input(w, stream_);
    for (int64_t T : {1, 16, 129}) {
      for (int64_t extra_stride : {0, 8, 1}) {
        SCOPED_TRACE(testing::Message() << T << " rows of " << D << ", stride +" << extra_stride);
        const HostMatrix<float> residual = Rounded(RandomMatrix<float>(T, D, 1, -4, 4));
        const HostMatrix<float> delta = Rounded(RandomMatrix<float>(T, D, 2));
        const DeviceMatrix before = DeviceMatrix::Activations(residual, stream_, extra_stride);
        const DeviceMatrix r = DeviceMatrix::InOut(residual, stream_, extra_stride);
        const DeviceMatrix d = DeviceMatrix::Activations(delta, stream_, extra_stride);
        const DeviceMatrix y = DeviceMatrix::Output(T, D, ActivationDType(), stream_, extra_stride);
        ASSERT_TRUE(CaptureAndReplay(
                        stream_,
                        [&] {
                          return AddRmsNorm(r.view(), d.view(), w_device.view(), NormWeight::kOnePlus, kEps,
                                            y.view(), stream_);
                        },
                        [&] { return CopyRows(before.view(), r.view(), stream_); })
                        .ok());
        HostMatrix<float> sum(T, D);
        for (size_t i = 0; i < sum.values.size(); ++i) sum.values[i] = residual.values[i] + delta.values[i];
        sum = Rounded(sum);
        EXPECT_TRUE(BitEqual(r.ToHost(), sum));
        EXPECT_TRUE(Near(y.ToHost(), Oracle(sum, w, NormWeight::kOnePlus), NormTolerance()));
        EXPECT_TRUE(r.GuardsIntact());
        EXPECT_TRUE(y.GuardsIntact());
      }
    }
  }
}

TEST_F(RmsNormTest, LargeAndSmallInputs) {
  ExpectMatchesOracle<float>(2, 1, 100, 1e15f);
  ExpectMatchesOracle<float>(2, 1, 100, 1e-3f);  // eps is as large as the mean square
  ExpectMatchesOracle<float>(2, 1, 100, 1e-12f);
}

TEST_F(RmsNormTest, AddKeepsTheSumInTheResidual) {
  for (int64_t T : {0, 1, 5}) {
    for (int64_t D : {1, 16, 33, 256}) {
      const HostMatrix<float> residual = Rounded(RandomMatrix<float>(T, D, 1));
      const HostMatrix<float> delta = Rounded(RandomMatrix<float>(T, D, 2));
      const HostMatrix<bf16> w = RandomMatrix<bf16>(1, D, 3);
      const DeviceMatrix r = DeviceMatrix::InOut(residual, stream_, 2);
      const DeviceMatrix d = DeviceMatrix::Activations(delta, stream_, 1);
      const DeviceMatrix w_device = DeviceMatrix::Input(w, stream_);
      const DeviceMatrix y = DeviceMatrix::Output(T, D, ActivationDType(), stream_, 3);
      ASSERT_TRUE(
          AddRmsNorm(r.view(), d.view(), w_device.view(), NormWeight::kOnePlus, kEps, y.view(), stream_)
              .ok());
      HostMatrix<float> sum(T, D);
      for (size_t i = 0; i < sum.values.size(); ++i) sum.values[i] = residual.values[i] + delta.values[i];
      sum = Rounded(sum);
      EXPECT_TRUE(BitEqual(r.ToHost(), sum));
      EXPECT_TRUE(Near(y.ToHost(), Oracle(sum, w, NormWeight::kOnePlus), NormTolerance()));
      EXPECT_TRUE(r.GuardsIntact());
      EXPECT_TRUE(y.GuardsIntact());
    }
  }
}

TEST_F(RmsNormTest, NansAndInfinitiesStayInTheirGroup) {
  HostMatrix<float> x = RandomMatrix<float>(3, 40, 1);
  x.At(0, 3) = NAN;
  x.At(1, 25) = HUGE_VALF;
  const HostMatrix<float> w = RandomMatrix<float>(1, 20, 2, 0.5f, 1);
  const DeviceMatrix in = DeviceMatrix::Activations(x, stream_);
  const DeviceMatrix w_device = DeviceMatrix::Input(w, stream_);
  const DeviceMatrix out = DeviceMatrix::Output(3, 40, ActivationDType(), stream_);
  ASSERT_TRUE(RmsNorm(in.view(), w_device.view(), NormWeight::kPlain, kEps, out.view(), stream_).ok());
  EXPECT_TRUE(Near(out.ToHost(), Oracle(Rounded(x), w, NormWeight::kPlain), NormTolerance()));
}

TEST_F(RmsNormTest, RefusesWhatDoesNotFit) {
  const DeviceMatrix x = DeviceMatrix::Output(2, 32, ActivationDType(), stream_);
  const DeviceMatrix y = DeviceMatrix::Output(2, 32, ActivationDType(), stream_);
  const DeviceMatrix short_y = DeviceMatrix::Output(1, 32, ActivationDType(), stream_);
  const DeviceMatrix w = DeviceMatrix::Input(RandomMatrix<bf16>(1, 16, 1), stream_);
  const DeviceMatrix w_12 = DeviceMatrix::Input(RandomMatrix<bf16>(1, 12, 1), stream_);
  const DeviceMatrix w_two_rows = DeviceMatrix::Input(RandomMatrix<bf16>(2, 16, 1), stream_);
  const auto code = [&](const DeviceMatrix& weight, const DeviceMatrix& out, float eps) {
    return RmsNorm(x.view(), weight.view(), NormWeight::kPlain, eps, out.view(), stream_).code();
  };
  EXPECT_EQ(code(w, y, kEps), absl::StatusCode::kOk);
  EXPECT_EQ(code(w_12, y, kEps), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(w_two_rows, y, kEps), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(w, short_y, kEps), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(w, y, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(w, y, NAN), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(AddRmsNorm(x.view(), y.view(), w.view(), NormWeight::kPlain, kEps, y.view(), stream_).code(),
            absl::StatusCode::kInvalidArgument);  // 16 columns of weight for 32 of residual
  EXPECT_EQ(
      GatedRmsNorm(x.view(), w.view(), short_y.view(), GateActivation::kSilu, kEps, y.view(), stream_).code(),
      absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dflash
