// The contract of swiglu.h against a double reference, for the linked backend.
#include "kernels/swiglu/swiglu.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "kernels/linear/linear_ref.h"
#include "kernels/swiglu/swiglu_ref.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"
#include "kernels/testing/replay.h"

namespace dflash {
namespace {

Tolerance GateTolerance() {
  return ActivationDType() == DType::kF32 ? Tolerance::F32Elementwise() : Tolerance::Bf16Elementwise();
}

// Sums of K products, a gate and an up output of them, rounded, and their product. A rounding of the gate x
// counts up to |x| times.
Tolerance ChainTolerance(int64_t K) {
  if (ActivationDType() == DType::kF32) return {4e-6 * static_cast<double>(K), 1e-4};
  return {1e-5 * static_cast<double>(K), 8e-3 * std::sqrt(static_cast<double>(K))};
}

class SwiGluTest : public ::testing::Test {
 protected:
  HostMatrix<float> Rounded(const HostMatrix<float>& x) {
    return DeviceMatrix::Activations(x, stream_).ToHost();
  }
  Stream stream_ = *Stream::Create({});
};

TEST(SwiGluRefTest, IsTheFormula) {
  const double log3 = std::log(3.0);  // sigmoid 3/4
  const double gate_up[] = {0, log3, 7, 2};
  double y[2];
  SwiGluRef<double>(gate_up, 1, 2, y);
  EXPECT_EQ(y[0], 0);
  EXPECT_NEAR(y[1], log3 * 0.75 * 2, 1e-15);
  const double x[] = {8, -4};
  SigmoidGateRef<double>(x, gate_up, 2, y);
  EXPECT_EQ(y[0], 4);
  EXPECT_NEAR(y[1], -3, 1e-15);
}

TEST_F(SwiGluTest, MatchesTheReference) {
  for (int64_t T : {0, 1, 2, 17}) {
    for (int64_t F : {0, 1, 15, 16, 17, 64, 65, 1000, 5000}) {
      SCOPED_TRACE(std::to_string(T) + "x" + std::to_string(F));
      const HostMatrix<float> gate_up = Rounded(RandomMatrix<float>(T, 2 * F, 1, -12, 12));
      const DeviceMatrix in = DeviceMatrix::Activations(gate_up, stream_, 3);
      const DeviceMatrix y = DeviceMatrix::Output(T, F, ActivationDType(), stream_, 5);
      ASSERT_TRUE(SwiGlu(in.view(), y.view(), stream_).ok());
      HostMatrix<double> expected(T, F);
      SwiGluRef<double>(gate_up.values.data(), T, F, expected.values.data());
      EXPECT_TRUE(Near(y.ToHost(), expected, GateTolerance()));
      EXPECT_TRUE(y.GuardsIntact());
    }
  }
}

TEST_F(SwiGluTest, SigmoidGateMatchesTheReference) {
  for (int64_t T : {0, 1, 2, 17}) {
    for (int64_t C : {0, 1, 15, 16, 17, 64, 65, 1000, 5000}) {
      SCOPED_TRACE(std::to_string(T) + "x" + std::to_string(C));
      const HostMatrix<float> x = Rounded(RandomMatrix<float>(T, C, 1));
      const HostMatrix<float> gate = Rounded(RandomMatrix<float>(T, C, 2, -12, 12));
      const DeviceMatrix x_device = DeviceMatrix::InOut(x, stream_, 3);
      const DeviceMatrix gate_device = DeviceMatrix::Activations(gate, stream_, 5);
      ASSERT_TRUE(SigmoidGate(x_device.view(), gate_device.view(), stream_).ok());
      HostMatrix<double> expected(T, C);
      SigmoidGateRef<double>(x.values.data(), gate.values.data(), T * C, expected.values.data());
      EXPECT_TRUE(Near(x_device.ToHost(), expected, GateTolerance()));
      EXPECT_TRUE(x_device.GuardsIntact());
    }
  }
}

// Rows that begin at multiples of 16 bytes, as the models' do, are read and written in wide words. Replayed
// from a graph.
TEST_F(SwiGluTest, MatchesTheReferenceAtTheModelsShapes) {
  for (int64_t T : {1, 16, 129}) {
    for (int64_t F : {512, 6144, 17408}) {
      for (int64_t extra_stride : {0, 8}) {
        SCOPED_TRACE(testing::Message() << T << "x" << F << ", stride +" << extra_stride);
        const HostMatrix<float> gate_up = Rounded(RandomMatrix<float>(T, 2 * F, 1, -12, 12));
        const DeviceMatrix in = DeviceMatrix::Activations(gate_up, stream_, extra_stride);
        const DeviceMatrix y = DeviceMatrix::Output(T, F, ActivationDType(), stream_, extra_stride);
        ASSERT_TRUE(CaptureAndReplay(stream_, [&] { return SwiGlu(in.view(), y.view(), stream_); }).ok());
        HostMatrix<double> expected(T, F);
        SwiGluRef<double>(gate_up.values.data(), T, F, expected.values.data());
        EXPECT_TRUE(Near(y.ToHost(), expected, GateTolerance()));
        EXPECT_TRUE(y.GuardsIntact());
        // The same numbers as an attention output and its gate.
        const HostMatrix<float> x = DeviceMatrix::Activations(RandomMatrix<float>(T, F, 2), stream_).ToHost();
        HostMatrix<float> gate(T, F);
        for (int64_t t = 0; t < T; ++t) std::copy_n(gate_up.Row(t), F, gate.Row(t));
        const DeviceMatrix before = DeviceMatrix::Activations(x, stream_, extra_stride);
        const DeviceMatrix gated = DeviceMatrix::InOut(x, stream_, extra_stride);
        const DeviceMatrix gate_device = DeviceMatrix::Activations(gate, stream_, extra_stride);
        ASSERT_TRUE(CaptureAndReplay(
                        stream_, [&] { return SigmoidGate(gated.view(), gate_device.view(), stream_); },
                        [&] { return CopyRows(before.view(), gated.view(), stream_); })
                        .ok());
        SigmoidGateRef<double>(x.values.data(), gate.values.data(), T * F, expected.values.data());
        EXPECT_TRUE(Near(gated.ToHost(), expected, GateTolerance()));
        EXPECT_TRUE(gated.GuardsIntact());
      }
    }
  }
}

// The projection and its gates, in one call or in two: the same bits, and what the formula says.
TEST_F(SwiGluTest, LinearSwiGluEqualsItsParts) {
  for (int64_t T : {0, 1, 8, 33, 129, 257}) {
    for (const auto& [F, K] :
         {std::pair<int64_t, int64_t>{8, 40}, {32, 64}, {100, 48}, {160, 1300}, {520, 136}}) {
      const HostMatrix<bf16> rows = RandomMatrix<bf16>(2 * F, K, 1);
      const HostMatrix<float> x_host = Rounded(RandomMatrix<float>(T, K, 2));
      HostMatrix<double> gate_up_expected(T, 2 * F), expected(T, F);
      LinearRef<double>(x_host.values.data(), rows.values.data(), T, 2 * F, K,
                        gate_up_expected.values.data());
      SwiGluRef<double>(gate_up_expected.values.data(), T, F, expected.values.data());
      for (LinearUse use : {LinearUse::kAny, LinearUse::kGateUp}) {
        const LinearWeight w = LinearWeight::Pack({rows.view()}, stream_, use).value();
        for (Phase phase : {Phase::kPrefill, Phase::kVerify}) {
          for (int64_t extra_stride : {0, 3, 8}) {
            SCOPED_TRACE(testing::Message() << T << " rows, " << F << "x" << K << ", stride +" << extra_stride
                                            << (use == LinearUse::kGateUp ? ", packed for it" : ""));
            const DeviceMatrix x = DeviceMatrix::Activations(x_host, stream_, extra_stride);
            const DType act = ActivationDType();
            const DeviceMatrix y[2] = {DeviceMatrix::Output(T, F, act, stream_, extra_stride),
                                       DeviceMatrix::Output(T, F, act, stream_, extra_stride)};
            const DeviceMatrix gate_up[2] = {DeviceMatrix::Output(T, 2 * F, act, stream_, 16),
                                             DeviceMatrix::Output(T, 2 * F, act, stream_, 16)};
            ASSERT_TRUE(LinearSwiGlu(x.view(), w, phase, gate_up[0].view(), y[0].view(), stream_).ok());
            ASSERT_TRUE(Linear(x.view(), w, phase, gate_up[1].view(), stream_).ok());
            ASSERT_TRUE(SwiGlu(gate_up[1].view(), y[1].view(), stream_).ok());
            ASSERT_TRUE(BitEqual(y[0].ToHost(), y[1].ToHost()));
            ASSERT_TRUE(y[0].GuardsIntact());
            ASSERT_TRUE(gate_up[0].GuardsIntact());
            ASSERT_TRUE(Near(y[0].ToHost(), expected, ChainTolerance(K)));
          }
        }
      }
    }
  }
}

TEST_F(SwiGluTest, LinearSwiGluRefusesWhatDoesNotFit) {
  const HostMatrix<bf16> rows = RandomMatrix<bf16>(64, 32, 1);
  const LinearWeight w = LinearWeight::Pack({rows.view()}, stream_).value();
  const auto code = [&](int64_t x_cols, int64_t gate_cols, int64_t y_cols, int64_t y_rows) {
    const DType act = ActivationDType();
    return LinearSwiGlu(DeviceMatrix::Activations(RandomMatrix<float>(2, x_cols, 1), stream_).view(), w,
                        Phase::kVerify, DeviceMatrix::Output(2, gate_cols, act, stream_).view(),
                        DeviceMatrix::Output(y_rows, y_cols, act, stream_).view(), stream_)
        .code();
  };
  EXPECT_EQ(code(32, 64, 32, 2), absl::StatusCode::kOk);
  EXPECT_EQ(code(31, 64, 32, 2), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(32, 62, 31, 2), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(32, 64, 31, 2), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(32, 64, 32, 3), absl::StatusCode::kInvalidArgument);
}

TEST_F(SwiGluTest, RefusesWhatDoesNotFit) {
  const auto matrix = [&](int64_t rows, int64_t cols) {
    return DeviceMatrix::Output(rows, cols, ActivationDType(), stream_);
  };
  EXPECT_EQ(SwiGlu(matrix(2, 31).view(), matrix(2, 15).view(), stream_).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SwiGlu(matrix(2, 32).view(), matrix(2, 15).view(), stream_).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SwiGlu(matrix(2, 32).view(), matrix(3, 16).view(), stream_).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SigmoidGate(matrix(2, 32).view(), matrix(2, 31).view(), stream_).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SigmoidGate(matrix(2, 32).view(), matrix(1, 32).view(), stream_).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dflash
