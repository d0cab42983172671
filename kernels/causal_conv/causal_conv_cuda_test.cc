// What the GPU adds to causal_conv_test.cc: many rows (another block shape), real sizes, captured launches.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/causal_conv/causal_conv.h"
#include "kernels/causal_conv/causal_conv_ref.h"
#include "kernels/device/graph.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

struct Step {
  int32_t rows, accepted;
};

class CausalConvCudaTest : public ::testing::Test {
 protected:
  // Inputs as the backend sees them.
  HostMatrix<float> Inputs(int64_t rows, int64_t channels, uint32_t seed) {
    return DeviceMatrix::Activations(RandomMatrix<float>(rows, channels, seed, -3, 3), stream_).ToHost();
  }
  // One sequence cut into steps; of each only `accepted` rows are committed and the next begins there.
  template <typename W>
  HostMatrix<float> RunSteps(const HostMatrix<float>& x, const HostMatrix<W>& w,
                             const std::vector<Step>& steps, int64_t extra_stride) {
    const DeviceMatrix weight = DeviceMatrix::Input(w, stream_);
    ConvState state = {nullptr, 2, w.cols, x.cols};
    Buffer memory = Buffer::Allocate(state.Bytes(), stream_).value();
    state.data = memory.data();
    HostMatrix<float> y(x.rows, x.cols);
    int32_t position = 0;
    for (const Step& step : steps) {
      const DeviceMatrix in = DeviceMatrix::Activations(x.Rows(position, step.rows), stream_, extra_stride);
      const DeviceMatrix out =
          DeviceMatrix::Output(step.rows, x.cols, DType::kBf16, stream_, 2 * extra_stride);
      DeviceArray<Segment> segments({{1, 0, step.rows, position}}, stream_);
      DeviceArray<int32_t> counts({step.accepted}, stream_);
      EXPECT_TRUE(
          CausalConv(in.view(), weight.view(), {segments.data(), 1}, state, out.view(), stream_).ok());
      EXPECT_TRUE(AdvanceConvState(in.view(), {segments.data(), 1},
                                   step.accepted == step.rows ? nullptr : counts.data(), state, stream_)
                      .ok());
      EXPECT_TRUE(out.GuardsIntact());
      const HostMatrix<float> rows = out.ToHost();
      std::copy(rows.values.begin(), rows.values.end(), y.Row(position));
      position += step.accepted;
    }
    EXPECT_EQ(position, x.rows);
    return y;
  }
  template <typename W>
  static HostMatrix<double> Oracle(const HostMatrix<float>& x, const HostMatrix<W>& w) {
    const HostMatrix<float> wide = Converted<float>(w);
    HostMatrix<double> y(x.rows, x.cols);
    CausalConvRef<double>(x.values.data(), wide.values.data(), x.rows, x.cols, w.cols, y.values.data());
    return y;
  }

  Stream stream_ = *Stream::Create({});
};

TEST_F(CausalConvCudaTest, MatchesDoubleReference) {
  for (int64_t taps : {4, 7}) {
    for (int64_t channels : {203, 640, 10240}) {
      for (int32_t rows : {21, 150}) {  // on both sides of the change of block shape
        if (channels == 10240 && rows == 150 && taps != 4) continue;
        SCOPED_TRACE(testing::Message() << taps << " taps, " << channels << " channels, " << rows << " rows");
        const HostMatrix<float> x = Inputs(rows, channels, 1);
        const HostMatrix<float> w = RandomMatrix<float>(channels, taps, 2);
        const HostMatrix<bf16> narrow = Converted<bf16>(w);
        EXPECT_TRUE(Near(RunSteps(x, w, {{rows, rows}}, 0), Oracle(x, w), Tolerance::Bf16Reduction(taps, 3)));
        EXPECT_TRUE(Near(RunSteps(x, narrow, {{rows, rows}}, 1), Oracle(x, narrow),
                         Tolerance::Bf16Reduction(taps, 3)));
      }
    }
  }
}

// Any cut into steps and any accepted part of them, none and fewer than the state included; any alignment.
TEST_F(CausalConvCudaTest, BitsDoNotDependOnWhereStepsAreCut) {
  for (int64_t taps : {1, 2, 4, 7}) {
    const HostMatrix<float> x = Inputs(224, 40, 3);
    const HostMatrix<bf16> w = RandomMatrix<bf16>(40, taps, 4);
    const HostMatrix<float> whole = RunSteps(x, w, {{224, 224}}, 0);
    EXPECT_TRUE(BitEqual(RunSteps(x, w, {{200, 200}, {24, 24}}, 8), whole));
    EXPECT_TRUE(BitEqual(
        RunSteps(x, w, {{5, 2}, {16, 0}, {16, 1}, {3, 3}, {1, 1}, {17, 7}, {10, 10}, {200, 200}}, 1), whole));
  }
}

// A captured step reads segments and accepted counts from device memory.
TEST_F(CausalConvCudaTest, ReplaysWithOtherSegments) {
  const int64_t channels = 640;
  const HostMatrix<bf16> w = RandomMatrix<bf16>(channels, 4, 1);
  const HostMatrix<float> x = Inputs(32, channels, 2);
  const DeviceMatrix weight = DeviceMatrix::Input(w, stream_);
  DeviceArray<Segment> list({{0, 0, 0, 0}}, stream_);
  DeviceArray<int32_t> accepted({0}, stream_);
  const DeviceMatrix in = DeviceMatrix::Activations(x.Rows(0, 16), stream_);
  const DeviceMatrix out = DeviceMatrix::Output(16, channels, DType::kBf16, stream_);
  ConvState state = {nullptr, 1, 4, channels};
  Buffer memory = Buffer::Allocate(state.Bytes(), stream_).value();
  state.data = memory.data();
  auto graph = Graph::Capture(stream_, [&] {
    const absl::Status status =
        CausalConv(in.view(), weight.view(), {list.data(), 1}, state, out.view(), stream_);
    return status.ok() ? AdvanceConvState(in.view(), {list.data(), 1}, accepted.data(), state, stream_)
                       : status;
  });
  ASSERT_TRUE(graph.ok()) << graph.status();
  const HostMatrix<float> whole = RunSteps(x, w, {{32, 32}}, 0);
  int32_t position = 0;
  for (const Step step : {Step{16, 5}, Step{3, 3}, Step{16, 1}}) {
    SCOPED_TRACE(position);
    const Segment segment = {0, 0, step.rows, position};
    const DeviceMatrix rows = DeviceMatrix::Activations(x.Rows(position, step.rows), stream_);
    ASSERT_TRUE(CopyToDevice(list.data(), &segment, sizeof(segment), stream_).ok());
    ASSERT_TRUE(CopyToDevice(accepted.data(), &step.accepted, sizeof(int32_t), stream_).ok());
    ASSERT_TRUE(CopyRows(rows.view(), in.view().Rows(0, step.rows), stream_).ok());
    ASSERT_TRUE(graph->Launch(stream_).ok());
    EXPECT_TRUE(BitEqual(out.ToHost().Rows(0, step.rows), whole.Rows(position, step.rows)));
    position += step.accepted;
  }
}

}  // namespace
}  // namespace dflash
