// The contract of causal_conv.h against a double reference, for the linked backend.
#include "kernels/causal_conv/causal_conv.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/causal_conv/causal_conv_ref.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

// The states of some slots, zero at first, between guards.
struct State {
  State(int64_t slots, int64_t taps, int64_t channels, const Stream& stream)
      : matrix(DeviceMatrix::InOut(HostMatrix<float>(slots * (taps - 1), channels), stream)),
        state{matrix.view().data, slots, taps, channels} {}
  DeviceMatrix matrix;
  ConvState state;
};

// Rows of a step, of which the first `accepted` are committed; the next step begins behind them.
struct Step {
  int32_t rows, accepted;
};

class CausalConvTest : public ::testing::Test {
 protected:
  Tolerance OutputTolerance(int64_t taps) {
    return ActivationDType() == DType::kF32 ? Tolerance::F32Reduction(taps, 3)
                                            : Tolerance::Bf16Reduction(taps, 3);
  }
  HostMatrix<float> RandomInput(int64_t rows, int64_t channels, uint32_t seed) {
    return DeviceMatrix::Activations(RandomMatrix<float>(rows, channels, seed, -3, 3), stream_).ToHost();
  }
  static HostMatrix<double> Oracle(const HostMatrix<float>& x, const HostMatrix<float>& w) {
    HostMatrix<double> y(x.rows, x.cols);
    CausalConvRef<double>(x.values.data(), w.values.data(), x.rows, x.cols, w.cols, y.values.data());
    return y;
  }
  // A whole sequence in one of two slots, cut into steps.
  template <typename W>
  HostMatrix<float> RunSteps(const HostMatrix<float>& x, const HostMatrix<W>& w,
                             const std::vector<Step>& steps) {
    const DeviceMatrix weight = DeviceMatrix::Input(w, stream_);
    State state(2, w.cols, x.cols, stream_);
    HostMatrix<float> y(x.rows, x.cols);
    int32_t position = 0;
    for (const Step& step : steps) {
      const DeviceMatrix in = DeviceMatrix::Activations(x.Rows(position, step.rows), stream_, 1);
      const DeviceMatrix out = DeviceMatrix::Output(step.rows, x.cols, ActivationDType(), stream_, 2);
      DeviceArray<Segment> segments({{1, 0, step.rows, position}}, stream_);
      DeviceArray<int32_t> counts({step.accepted}, stream_);
      const SegmentList list = {segments.data(), 1};
      const HostMatrix<float> before = state.matrix.ToHost();
      EXPECT_TRUE(CausalConv(in.view(), weight.view(), list, state.state, out.view(), stream_).ok());
      EXPECT_TRUE(BitEqual(state.matrix.ToHost(), before));
      EXPECT_TRUE(AdvanceConvState(in.view(), list, step.accepted == step.rows ? nullptr : counts.data(),
                                   state.state, stream_)
                      .ok());
      EXPECT_TRUE(out.GuardsIntact());
      EXPECT_TRUE(state.matrix.GuardsIntact());
      const HostMatrix<float> rows = out.ToHost();
      std::copy(rows.values.begin(), rows.values.end(), y.Row(position));
      position += step.accepted;
    }
    EXPECT_EQ(position, x.rows);
    return y;
  }

  Stream stream_ = Stream::Create({.threads = 2}).value();
};

TEST(CausalConvReferenceTest, LiteralValues) {
  // Two channels, three taps; w[c, 2] belongs to the current row. silu(x) = x / (1 + e^-x).
  const std::vector<float> x = {1, 10, 2, 20}, w = {5, 3, 1, 0, 0.5f, 0.25f};
  std::vector<double> y(4);
  CausalConvRef<double>(x.data(), w.data(), 2, 2, 3, y.data());
  EXPECT_DOUBLE_EQ(y[0], 1 / (1 + std::exp(-1.0)));
  EXPECT_DOUBLE_EQ(y[1], 2.5 / (1 + std::exp(-2.5)));
  EXPECT_DOUBLE_EQ(y[2], 5 / (1 + std::exp(-5.0)));
  EXPECT_DOUBLE_EQ(y[3], 10 / (1 + std::exp(-10.0)));
}

TEST_F(CausalConvTest, MatchesDoubleReference) {
  for (int64_t taps : {1, 2, 4, 7}) {
    for (int64_t channels : {1, 15, 16, 64, 203}) {
      SCOPED_TRACE(testing::Message() << taps << " taps, " << channels << " channels");
      const HostMatrix<float> x = RandomInput(21, channels, 1), w = RandomMatrix<float>(channels, taps, 2);
      const HostMatrix<bf16> narrow = Converted<bf16>(w);
      EXPECT_TRUE(Near(RunSteps(x, w, {{21, 21}}), Oracle(x, w), OutputTolerance(taps)));
      EXPECT_TRUE(
          Near(RunSteps(x, narrow, {{21, 21}}), Oracle(x, Converted<float>(narrow)), OutputTolerance(taps)));
    }
  }
}

// Any cut into steps and any accepted part of them, none and fewer than the state included.
TEST_F(CausalConvTest, BitsDoNotDependOnWhereStepsAreCut) {
  for (int64_t taps : {1, 2, 4, 7}) {
    const HostMatrix<float> x = RandomInput(24, 37, 3), w = RandomMatrix<float>(37, taps, 4);
    const HostMatrix<float> whole = RunSteps(x, w, {{24, 24}});
    EXPECT_TRUE(BitEqual(RunSteps(x, w, std::vector<Step>(24, {1, 1})), whole));
    EXPECT_TRUE(
        BitEqual(RunSteps(x, w, {{5, 2}, {16, 0}, {16, 1}, {3, 3}, {1, 1}, {17, 7}, {10, 10}}), whole));
  }
}

TEST_F(CausalConvTest, SegmentsOfAStepDoNotMeet) {
  const int64_t channels = 20;
  const HostMatrix<float> w = RandomMatrix<float>(channels, 4, 1), x = RandomInput(12, channels, 2);
  DeviceArray<Segment> segments({{2, 7, 4, 90}, {0, 1, 5, 3}, {1, 6, 0, 4}}, stream_);
  DeviceArray<int32_t> accepted({2, 0, 0}, stream_);
  const SegmentList list = {segments.data(), 3};
  State state(3, 4, channels, stream_);
  const DeviceMatrix in = DeviceMatrix::Activations(x, stream_), weight = DeviceMatrix::Input(w, stream_);
  const DeviceMatrix out = DeviceMatrix::Output(12, channels, ActivationDType(), stream_);
  ASSERT_TRUE(CausalConv(in.view(), weight.view(), list, state.state, out.view(), stream_).ok());
  const HostMatrix<float> y = out.ToHost();
  EXPECT_TRUE(BitEqual(y.Rows(7, 4), RunSteps(x.Rows(7, 4), w, {{4, 4}})));
  EXPECT_TRUE(BitEqual(y.Rows(1, 5), RunSteps(x.Rows(1, 5), w, {{5, 5}})));
  for (int64_t row : {0, 6, 11}) EXPECT_TRUE(std::isnan(y.At(row, 0)));  // rows of no segment

  ASSERT_TRUE(AdvanceConvState(in.view(), list, accepted.data(), state.state, stream_).ok());
  HostMatrix<float> want(9, channels);  // slot 2: zero, then the two accepted rows
  std::copy_n(x.Row(7), 2 * channels, want.Row(7));
  EXPECT_TRUE(BitEqual(state.matrix.ToHost(), want));
}

// More layers than a launch of the CUDA backend takes: each as if it were alone.
TEST_F(CausalConvTest, LayersAdvanceTogether) {
  constexpr int64_t kLayers = 67, kChannels = 37;
  DeviceArray<Segment> segments({{2, 7, 4, 90}, {0, 1, 5, 3}}, stream_);
  DeviceArray<int32_t> accepted({2, 5}, stream_);
  const SegmentList list = {segments.data(), 2};
  std::vector<DeviceMatrix> inputs;
  std::vector<State> together, alone;
  std::vector<ConvCommit> layers;
  for (uint32_t i = 0; i < kLayers; ++i) {
    inputs.push_back(DeviceMatrix::Activations(RandomInput(12, kChannels, i), stream_));
    together.emplace_back(3, 4, kChannels, stream_);
    alone.emplace_back(3, 4, kChannels, stream_);
  }
  for (size_t i = 0; i < kLayers; ++i) layers.push_back({inputs[i].view(), together[i].state});
  for (int step = 0; step < 2; ++step) {
    ASSERT_TRUE(AdvanceConvStates(layers, list, accepted.data(), stream_).ok());
    for (size_t i = 0; i < kLayers; ++i) {
      ASSERT_TRUE(AdvanceConvState(inputs[i].view(), list, accepted.data(), alone[i].state, stream_).ok());
      EXPECT_TRUE(BitEqual(together[i].matrix.ToHost(), alone[i].matrix.ToHost())) << "layer " << i;
      EXPECT_TRUE(together[i].matrix.GuardsIntact());
    }
  }
  EXPECT_FALSE(BitEqual(together[0].matrix.ToHost(), together[66].matrix.ToHost()));
  layers[5].state.taps = 3;
  EXPECT_EQ(AdvanceConvStates(layers, list, nullptr, stream_).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(AdvanceConvStates({}, list, nullptr, stream_).ok());
}

TEST_F(CausalConvTest, RefusesShapesThatDisagree) {
  constexpr auto kBad = absl::StatusCode::kInvalidArgument;
  State good(1, 4, 8, stream_);
  EXPECT_EQ(good.state.Bytes(), 3 * 8 * SizeOf(ActivationDType()));
  DeviceArray<Segment> segment({{0, 0, 2, 0}}, stream_);
  const SegmentList list = {segment.data(), 1};
  const auto activations = [&](int64_t rows, int64_t cols) {
    return DeviceMatrix::Activations(HostMatrix<float>(rows, cols), stream_);
  };
  const auto weights = [&](int64_t rows, int64_t cols) {
    return DeviceMatrix::Input(HostMatrix<float>(rows, cols), stream_);
  };
  const auto run = [&](const DeviceMatrix& x, const DeviceMatrix& w, const DeviceMatrix& y,
                       SegmentList segments, const ConvState& state) {
    return CausalConv(x.view(), w.view(), segments, state, y.view(), stream_).code();
  };
  const DeviceMatrix x = activations(2, 8), y = activations(2, 8), w = weights(8, 4);
  EXPECT_EQ(run(x, w, y, list, good.state), absl::StatusCode::kOk);
  EXPECT_EQ(run(activations(2, 9), w, y, list, good.state), kBad);
  EXPECT_EQ(run(x, weights(8, 3), y, list, good.state), kBad);
  EXPECT_EQ(run(x, weights(7, 4), y, list, good.state), kBad);
  EXPECT_EQ(run(x, w, activations(3, 8), list, good.state), kBad);
  EXPECT_EQ(run(x, w, y, {nullptr, 1}, good.state), kBad);
  ConvState no_taps = good.state;
  no_taps.taps = 0;
  EXPECT_EQ(run(x, w, y, list, no_taps), kBad);
  EXPECT_EQ(AdvanceConvState(activations(2, 9).view(), list, nullptr, good.state, stream_).code(), kBad);
  EXPECT_EQ(AdvanceConvState(x.view(), list, nullptr, no_taps, stream_).code(), kBad);
}

}  // namespace
}  // namespace dflash
