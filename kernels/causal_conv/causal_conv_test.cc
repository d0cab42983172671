#include "kernels/causal_conv/causal_conv.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/causal_conv/causal_conv_ref.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/cpu_variants.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

Stream MakeStream(int threads = 2) { return Stream::Create({.threads = threads}).value(); }

struct State {
  State(int64_t slots, int64_t taps, int64_t channels, float fill, const Stream& stream)
      : values(std::vector<float>(static_cast<size_t>(slots * (taps - 1) * channels), fill), stream),
        state{values.data(), slots, taps, channels} {}
  DeviceArray<float> values;
  ConvState state;
};

HostMatrix<double> Oracle(const HostMatrix<float>& x, const HostMatrix<float>& w) {
  HostMatrix<double> y(x.rows, x.cols);
  CausalConvRef<double>(x.values.data(), w.values.data(), x.rows, x.cols, w.cols, y.values.data());
  return y;
}

// One slot, the whole sequence cut into steps; of each step only `accepted` rows are committed and the next
// step begins there.
struct Step {
  int32_t rows, accepted;
};

HostMatrix<float> RunSteps(const HostMatrix<float>& x, ConstMatrixView w, const std::vector<Step>& steps,
                           const Stream& stream) {
  State state(2, w.cols, x.cols, 0, stream);
  HostMatrix<float> y(x.rows, x.cols);
  int32_t position = 0;
  for (const Step& step : steps) {
    const DeviceMatrix in = DeviceMatrix::Input(x.Rows(position, step.rows), stream, 1);
    const DeviceMatrix out = DeviceMatrix::Output(step.rows, x.cols, DType::kF32, stream, 2);
    DeviceArray<Segment> segments({{1, 0, step.rows, position}}, stream);
    DeviceArray<int32_t> counts({step.accepted}, stream);
    EXPECT_TRUE(CausalConv(in.view(), w, {segments.data(), 1}, state.state, out.view(), stream).ok());
    EXPECT_TRUE(AdvanceConvState(in.view(), {segments.data(), 1},
                                 step.accepted == step.rows ? nullptr : counts.data(), state.state, stream)
                    .ok());
    EXPECT_TRUE(out.GuardsIntact());
    const HostMatrix<float> rows = out.ToHost();
    std::copy(rows.values.begin(), rows.values.end(), y.Row(position));
    position += step.accepted;
  }
  EXPECT_EQ(position, x.rows);
  return y;
}

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

TEST(CausalConvTest, MatchesDoubleReference) {
  const Stream stream = MakeStream();
  for (int64_t taps : {1, 2, 4, 7}) {
    for (int64_t channels : {1, 15, 16, 64, 203}) {
      SCOPED_TRACE(testing::Message() << taps << " taps, " << channels << " channels");
      const HostMatrix<float> x = RandomMatrix<float>(21, channels, 1, -3, 3);
      const HostMatrix<float> w = RandomMatrix<float>(channels, taps, 2);
      const HostMatrix<bf16> narrow = Converted<bf16>(w);
      EXPECT_TRUE(
          Near(RunSteps(x, w.view(), {{21, 21}}, stream), Oracle(x, w), Tolerance::F32Reduction(taps, 3)));
      EXPECT_TRUE(Near(RunSteps(x, narrow.view(), {{21, 21}}, stream), Oracle(x, Converted<float>(narrow)),
                       Tolerance::F32Reduction(taps, 3)));
    }
  }
}

// Any cut into steps and any accepted part of them, none and fewer than the state included.
TEST(CausalConvTest, BitsDoNotDependOnWhereStepsAreCut) {
  const Stream stream = MakeStream();
  for (int64_t taps : {1, 2, 4, 7}) {
    const HostMatrix<float> x = RandomMatrix<float>(24, 37, 3, -3, 3);
    const HostMatrix<float> w = RandomMatrix<float>(37, taps, 4);
    const HostMatrix<float> whole = RunSteps(x, w.view(), {{24, 24}}, stream);
    EXPECT_TRUE(BitEqual(RunSteps(x, w.view(), std::vector<Step>(24, {1, 1}), stream), whole));
    EXPECT_TRUE(BitEqual(
        RunSteps(x, w.view(), {{5, 2}, {16, 0}, {16, 1}, {3, 3}, {1, 1}, {17, 7}, {10, 10}}, stream), whole));
  }
}

TEST(CausalConvTest, BitsDoNotDependOnThreadsOrInstructions) {
  const HostMatrix<float> x = RandomMatrix<float>(9, 203, 5, -3, 3);
  const HostMatrix<bf16> w = RandomMatrix<bf16>(203, 4, 6);
  ExpectEqualOnAllCpuVariants([&](const Stream& stream) {
    return RunSteps(x, w.view(), {{5, 2}, {7, 7}}, stream);
  });
}

TEST(CausalConvTest, SegmentsOfAStepDoNotMeet) {
  const Stream stream = MakeStream(3);
  const int64_t channels = 20;
  const HostMatrix<float> w = RandomMatrix<float>(channels, 4, 1);
  const HostMatrix<float> x = RandomMatrix<float>(12, channels, 2);
  const std::vector<Segment> segments = {{2, 7, 4, 90}, {0, 1, 5, 3}, {1, 6, 0, 4}};
  const std::vector<int32_t> counts = {2, 0, 0};
  State state(3, 4, channels, 0, stream);
  const DeviceMatrix in = DeviceMatrix::Input(x, stream);
  const DeviceMatrix out = DeviceMatrix::Output(12, channels, DType::kF32, stream);
  DeviceArray<Segment> list(segments, stream);
  DeviceArray<int32_t> accepted(counts, stream);
  ASSERT_TRUE(CausalConv(in.view(), w.view(), {list.data(), 3}, state.state, out.view(), stream).ok());
  const HostMatrix<float> y = out.ToHost();
  EXPECT_TRUE(BitEqual(y.Rows(7, 4), RunSteps(x.Rows(7, 4), w.view(), {{4, 4}}, stream)));
  EXPECT_TRUE(BitEqual(y.Rows(1, 5), RunSteps(x.Rows(1, 5), w.view(), {{5, 5}}, stream)));
  EXPECT_TRUE(std::isnan(y.At(0, 0)));  // rows of no segment
  EXPECT_TRUE(std::isnan(y.At(6, 0)));
  EXPECT_TRUE(std::isnan(y.At(11, channels - 1)));

  ASSERT_TRUE(AdvanceConvState(in.view(), {list.data(), 3}, accepted.data(), state.state, stream).ok());
  const std::vector<float> after = state.values.ToHost();
  for (int64_t i = 0; i < 3 * 3 * channels; ++i) {
    const int64_t slot = i / (3 * channels), row = i / channels % 3, channel = i % channels;
    const float want = slot == 2 && row > 0 ? x.At(7 + row - 1, channel) : 0;
    ASSERT_EQ(after[static_cast<size_t>(i)], want) << i;
  }
}

TEST(CausalConvTest, RefusesShapesThatDisagree) {
  const Stream stream = MakeStream();
  State state(1, 4, 8, 0, stream);
  EXPECT_EQ(state.state.Bytes(), 3 * 8 * 4);
  HostMatrix<float> x(2, 8), wide(2, 9), w(8, 4), short_w(8, 3), y(2, 8), more(3, 8);
  const auto run = [&](const HostMatrix<float>& in, const HostMatrix<float>& weight, HostMatrix<float>& out,
                       Segment segment) {
    return CausalConv(in.view(), weight.view(), {&segment, 1}, state.state,
                      MatrixView(out.values.data(), out.rows, out.cols), stream)
        .code();
  };
  constexpr auto kBad = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(run(x, w, y, {0, 0, 2, 0}), absl::StatusCode::kOk);
  EXPECT_EQ(run(wide, w, y, {0, 0, 2, 0}), kBad);
  EXPECT_EQ(run(x, short_w, y, {0, 0, 2, 0}), kBad);
  EXPECT_EQ(run(x, w, more, {0, 0, 2, 0}), kBad);
  EXPECT_EQ(run(x, w, y, {1, 0, 2, 0}), kBad);
  EXPECT_EQ(run(x, w, y, {0, 1, 2, 0}), kBad);
  const Segment segment = {0, 0, 2, 0};
  const int32_t three = 3;
  EXPECT_EQ(AdvanceConvState(x.view(), {&segment, 1}, &three, state.state, stream).code(), kBad);
  EXPECT_EQ(AdvanceConvState(wide.view(), {&segment, 1}, nullptr, state.state, stream).code(), kBad);
}

}  // namespace
}  // namespace dflash
