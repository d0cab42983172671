// The contract of gated_delta_net.h against a double reference, for the linked backend.
#include "kernels/gated_delta_net/gated_delta_net.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "base/status.h"
#include "gtest/gtest.h"
#include "kernels/gated_delta_net/gated_delta_net_ref.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/gated_delta_net_layer.h"
#include "kernels/testing/host_matrix.h"
#include "kernels/testing/replay.h"

namespace dflash {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr auto kBad = absl::StatusCode::kInvalidArgument;

using Sequence = GatedDeltaNetSequence;
using Layer = GatedDeltaNetLayer;

class GatedDeltaNetTest : public ::testing::Test {
 protected:
  Stream stream_ = Stream::Create({.threads = 3}).value();
};

// Outputs and final state of the recurrence in double, from a given state (empty: zero).
struct OracleResult {
  HostMatrix<double> o, state;
};
OracleResult Oracle(const Sequence& s, int64_t first, int64_t rows,
                    const HostMatrix<double>* from = nullptr) {
  OracleResult result = {HostMatrix<double>(rows, s.shape.value_heads * s.shape.value_dim),
                         from != nullptr ? *from : HostMatrix<double>(1, s.shape.StateFloats())};
  GatedDeltaNetRef<double>(s.shape, s.qkv.Row(first), s.beta.Row(first), s.decay.Row(first), s.a_log.Row(0),
                           s.dt_bias.Row(0), rows, result.state.Row(0), result.o.Row(0));
  return result;
}

struct Step {
  int32_t rows, accepted;
};

struct Outcome {
  HostMatrix<float> o, state;
};

// The whole sequence in verification steps: outputs of the accepted rows, and the state after the last.
Outcome VerifySteps(const Sequence& s, const std::vector<Step>& steps, const Stream& stream,
                    bool fold_always) {
  Layer layer(s.shape, 2, 16, stream);
  Outcome outcome;
  outcome.o = HostMatrix<float>(s.qkv.rows, s.shape.value_heads * s.shape.value_dim);
  int32_t position = 0;
  for (const Step& step : steps) {
    const HostMatrix<float> o = layer.Verify(s, 1, position, step.rows, step.accepted);
    std::copy_n(o.Row(0), step.accepted * o.cols, outcome.o.Row(position));
    position += step.accepted;
    if (fold_always) layer.Fold(1);
  }
  EXPECT_EQ(position, s.qkv.rows);
  layer.Fold(1);
  outcome.state = layer.State(1);
  EXPECT_TRUE(BitEqual(layer.State(0), HostMatrix<float>(1, s.shape.StateFloats())));  // somebody else's
  return outcome;
}

Tolerance StateTolerance() { return {5e-6, 2e-5}; }
Tolerance OutputTolerance() {
  return ActivationDType() == DType::kF32 ? StateTolerance() : Tolerance{1e-3, 8e-3};
}

const GatedDeltaNetShape kShapes[] = {
    {.key_heads = 2, .value_heads = 2, .key_dim = 16, .value_dim = 16},
    {.key_heads = 1, .value_heads = 3, .key_dim = 7, .value_dim = 21},
    {.key_heads = 2, .value_heads = 6, .key_dim = 32, .value_dim = 32},
    {.key_heads = 1, .value_heads = 2, .key_dim = 20, .value_dim = 70},
};

// One key and one value dimension: k and q are signs (up to 1e-6), beta = 1/2, e^g = 1/2.
TEST(GatedDeltaNetReferenceTest, LiteralValues) {
  const GatedDeltaNetShape shape = {1, 1, 1, 1};
  const std::vector<float> qkv = {1e3f, 1e3f, 2, -1e3f, -1e3f, 3}, zeros = {0, 0};
  double state = 4, o[2];
  GatedDeltaNetRef<double>(shape, qkv.data(), zeros.data(), zeros.data(), zeros.data(), zeros.data(), 1,
                           &state, o);
  // S = 2, c = (2 - 2) / 2 = 0, o = 2
  EXPECT_NEAR(state, 2, 1e-9);
  EXPECT_NEAR(o[0], 2, 1e-9);
  GatedDeltaNetRef<double>(shape, qkv.data() + 3, zeros.data(), zeros.data(), zeros.data(), zeros.data(), 1,
                           &state, o);
  // S = 1, c = (3 + 1) / 2 = 2, S = 1 - 2 = -1, o = 1
  EXPECT_NEAR(state, -1, 1e-9);
  EXPECT_NEAR(o[0], 1, 1e-9);
  // a_log = ln 2 doubles the decay's exponent; q is scaled by 1 / sqrt(key_dim), k is not.
  const GatedDeltaNetShape wide = {1, 1, 4, 1};
  const std::vector<float> row = {1e3f, 0, 0, 0, 1e3f, 0, 0, 0, 6}, a_log = {0.6931472f};
  double states[4] = {8, 4, 0, 0};
  GatedDeltaNetRef<double>(wide, row.data(), zeros.data(), zeros.data(), a_log.data(), zeros.data(), 1,
                           states, o);
  // S = (2, 1, 0, 0), c = (6 - 2) / 2 = 2, S = (4, 1, 0, 0), o = 4 / 2
  EXPECT_NEAR(states[0], 4, 1e-6);
  EXPECT_NEAR(states[1], 1, 1e-6);
  EXPECT_NEAR(o[0], 2, 1e-6);
}

TEST_F(GatedDeltaNetTest, VerifyMatchesDoubleReference) {
  uint32_t seed = 0;
  for (const GatedDeltaNetShape& shape : kShapes) {
    SCOPED_TRACE(testing::Message() << shape.key_dim << " x " << shape.value_dim);
    const Sequence s(shape, 48, ++seed, stream_);
    const OracleResult want = Oracle(s, 0, 48);
    const Outcome got = VerifySteps(s, {{16, 16}, {16, 16}, {16, 16}}, stream_, false);
    EXPECT_TRUE(Near(got.o, want.o, OutputTolerance()));
    EXPECT_TRUE(Near(got.state, want.state, StateTolerance()));
  }
}

// The property that speculation rests on: however a text is cut into verifications, whatever was rejected,
// folded at once or lazily, its outputs and its state have the same bits.
TEST_F(GatedDeltaNetTest, VerifyBitsDoNotDependOnAcceptance) {
  std::mt19937 generator(17);
  uint32_t seed = 50;
  for (const GatedDeltaNetShape& shape : kShapes) {
    constexpr int32_t kLength = 40;
    const Sequence s(shape, kLength + 16, ++seed, stream_);  // drafts may run beyond the text
    Sequence text = s;
    for (HostMatrix<float>* m : {&text.qkv, &text.beta, &text.decay}) *m = m->Rows(0, kLength);
    const Outcome plain = VerifySteps(text, std::vector<Step>(kLength, {1, 1}), stream_, true);
    for (int round = 0; round < 30; ++round) {
      std::vector<Step> steps;
      for (int32_t position = 0; position < kLength;) {
        const auto rows = std::min<int32_t>(static_cast<int32_t>(1 + generator() % 16), kLength - position);
        const auto accepted = static_cast<int32_t>(generator() % static_cast<uint32_t>(rows + 1));
        steps.push_back({rows, accepted});
        position += accepted;
      }
      SCOPED_TRACE(round);
      const Outcome cut = VerifySteps(text, steps, stream_, round % 2 == 0);
      ASSERT_TRUE(BitEqual(cut.o, plain.o));
      ASSERT_TRUE(BitEqual(cut.state, plain.state));
    }
  }
}

// Every way to cut and accept a short text, three rows a step at most.
TEST_F(GatedDeltaNetTest, VerifyEveryAcceptancePatternOfAShortText) {
  const Sequence s({1, 2, 4, 3}, 4, 70, stream_);
  const Outcome plain = VerifySteps(s, std::vector<Step>(4, {1, 1}), stream_, true);
  int64_t patterns = 0;
  std::vector<Step> steps;
  const auto extend = [&](const auto& self, int32_t position) -> void {
    if (position == 4) {
      ++patterns;
      const Outcome cut = VerifySteps(s, steps, stream_, false);
      EXPECT_TRUE(BitEqual(cut.o, plain.o));
      EXPECT_TRUE(BitEqual(cut.state, plain.state));
      return;
    }
    for (int32_t rows = 1; rows <= std::min(3, 4 - position); ++rows) {
      for (int32_t accepted = 0; accepted <= rows; ++accepted) {
        if (accepted == 0 && !steps.empty() && steps.back().accepted == 0) continue;  // else there is no end
        steps.push_back({rows, accepted});
        self(self, position + accepted);
        steps.pop_back();
      }
    }
  };
  extend(extend, 0);
  EXPECT_GT(patterns, 300);
}

TEST_F(GatedDeltaNetTest, VerifyLeavesTheCommittedStateAlone) {
  const GatedDeltaNetShape shape = kShapes[2];
  const Sequence s(shape, 32, 4, stream_);
  Layer layer(shape, 1, 16, stream_);
  layer.Prefill(s, 0, 0, 16);
  const HostMatrix<float> before = layer.State(0);
  layer.Verify(s, 0, 16, 16, 16);
  EXPECT_TRUE(BitEqual(layer.State(0), before));
  layer.Fold(0);
  EXPECT_FALSE(BitEqual(layer.State(0), before));
}

TEST_F(GatedDeltaNetTest, PrefillMatchesDoubleReferenceForAnyCut) {
  uint32_t seed = 100;
  for (const GatedDeltaNetShape& shape : kShapes) {
    const Sequence s(shape, 200, ++seed, stream_);
    for (const std::vector<int32_t>& cuts :
         {std::vector<int32_t>{0, 200}, {0, 1, 2, 200}, {0, 63, 64, 65, 199, 200}, {0, 30, 150, 151, 200}}) {
      Layer layer(shape, 1, 1, stream_);
      OracleResult want = Oracle(s, 0, 0);
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        SCOPED_TRACE(testing::Message() << shape.key_dim << " x " << shape.value_dim << ", from " << cuts[i]);
        want = Oracle(s, cuts[i], cuts[i + 1] - cuts[i], &want.state);
        EXPECT_TRUE(Near(layer.Prefill(s, 0, cuts[i], cuts[i + 1] - cuts[i]), want.o, OutputTolerance()));
      }
      EXPECT_TRUE(Near(layer.State(0), want.state, StateTolerance()));
    }
  }
}

TEST_F(GatedDeltaNetTest, PrefillBitsDoNotDependOnCutsOnTheGrid) {
  for (const GatedDeltaNetShape& shape : kShapes) {
    const Sequence s(shape, 300, 7, stream_);
    Layer whole(shape, 1, 1, stream_);
    const HostMatrix<float> o = whole.Prefill(s, 0, 0, 300);
    for (const std::vector<int32_t>& cuts :
         {std::vector<int32_t>{0, 64, 128, 192, 256, 300}, {0, 192, 300}, {0, 256, 300}}) {
      Layer layer(shape, 1, 1, stream_);
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        const int32_t rows = cuts[i + 1] - cuts[i];
        EXPECT_TRUE(BitEqual(layer.Prefill(s, 0, cuts[i], rows), o.Rows(cuts[i], rows)));
      }
      EXPECT_TRUE(BitEqual(layer.State(0), whole.State(0)));
    }
  }
}

// The grid is that of positions, not of segments: a segment from inside a cell ends its first chunk with the
// cell.
TEST_F(GatedDeltaNetTest, PrefillFromInsideACellMeetsTheGrid) {
  const GatedDeltaNetShape shape = kShapes[2];
  const Sequence s(shape, 200, 11, stream_);
  Layer whole(shape, 1, 1, stream_), cut(shape, 1, 1, stream_);
  whole.Prefill(s, 0, 0, 30);
  const HostMatrix<float> o = whole.Prefill(s, 0, 30, 170);
  cut.Prefill(s, 0, 0, 30);
  EXPECT_TRUE(BitEqual(cut.Prefill(s, 0, 30, 34), o.Rows(0, 34)));
  EXPECT_TRUE(BitEqual(cut.Prefill(s, 0, 64, 64), o.Rows(34, 64)));
  EXPECT_TRUE(BitEqual(cut.Prefill(s, 0, 128, 72), o.Rows(98, 72)));
  EXPECT_TRUE(BitEqual(cut.State(0), whole.State(0)));
}

// Decays of all sizes in one chunk: e^(G_i - G_j) is formed for j <= i alone, so nothing overflows.
TEST_F(GatedDeltaNetTest, PrefillStrongAndWeakDecayStayFinite) {
  const GatedDeltaNetShape shape = kShapes[0];
  for (float scale : {-60.0f, 60.0f}) {
    Sequence s(shape, 130, 8, stream_, std::min(scale, 0.0f), std::max(scale, 0.0f));
    const OracleResult want = Oracle(s, 0, 130);
    Layer layer(shape, 1, 1, stream_);
    EXPECT_TRUE(Near(layer.Prefill(s, 0, 0, 130), want.o, OutputTolerance()));
    EXPECT_TRUE(Near(layer.State(0), want.state, StateTolerance()));
  }
}

// Several sequences in one call, some rows of nobody: everyone as if alone.
TEST_F(GatedDeltaNetTest, SegmentsOfAStepDoNotMeet) {
  const GatedDeltaNetShape shape = kShapes[2];
  const Sequence s(shape, 60, 9, stream_);
  const std::vector<Segment> segments = {{2, 30, 16, 30}, {0, 3, 5, 3}, {1, 9, 0, 9}, {3, 10, 1, 10}};
  for (bool prefill : {false, true}) {
    DeviceArray<float> states(std::vector<float>(static_cast<size_t>(4 * shape.StateFloats()), 0.25f),
                              stream_);
    DeviceArray<float> records(
        std::vector<float>(static_cast<size_t>(4 * 2 * 16 * shape.RecordFloats()), kNan), stream_);
    const GatedDeltaNetState state = {states.data(), records.data(), 4, 16};
    DeviceArray<int32_t> buffer({0, 1, 1, 0}, stream_), count(std::vector<int32_t>(4), stream_);
    DeviceArray<float> a_log(s.a_log.values, stream_), dt_bias(s.dt_bias.values, stream_);
    const DeviceMatrix qkv = DeviceMatrix::Activations(s.qkv, stream_),
                       beta = DeviceMatrix::Activations(s.beta, stream_);
    const DeviceMatrix decay = DeviceMatrix::Activations(s.decay, stream_);
    const GatedDeltaNetInput in = {qkv.view(), beta.view(), decay.view(), a_log.data(), dt_bias.data()};
    const auto run = [&](std::vector<Segment> list) {
      DeviceArray<Segment> device(list, stream_);
      const DeviceMatrix o =
          DeviceMatrix::Output(60, shape.value_heads * shape.value_dim, ActivationDType(), stream_);
      const SegmentList all = {device.data(), device.size()};
      EXPECT_TRUE((prefill ? GatedDeltaNetPrefill(shape, in, all, state, o.view(), stream_)
                           : GatedDeltaNetVerify(shape, in, all, {buffer.data(), count.data()}, state,
                                                 o.view(), stream_))
                      .ok());
      return o.ToHost();
    };
    const std::vector<float> before = states.ToHost();
    const HostMatrix<float> together = run(segments);
    const std::vector<float> after = states.ToHost();
    ASSERT_TRUE(CopyToDevice(states.data(), before.data(), 4 * shape.StateFloats() * 4, stream_).ok());
    ASSERT_TRUE(stream_.Synchronize().ok());
    for (const Segment& segment : segments) {
      const HostMatrix<float> alone = run({segment});
      EXPECT_TRUE(BitEqual(together.Rows(segment.first_row, segment.row_count),
                           alone.Rows(segment.first_row, segment.row_count)));
    }
    EXPECT_EQ(states.ToHost(), after);
    EXPECT_TRUE(std::isnan(together.At(0, 0)));
    EXPECT_TRUE(std::isnan(together.At(9, 0)));
  }
}

// One operation for what stands around the recurrence, or four: the same bits, for any cut, with rows of
// nobody and records to fold.
TEST_F(GatedDeltaNetTest, MixerVerifyEqualsItsParts) {
  for (const GatedDeltaNetShape& shape :
       {kShapes[0], kShapes[2], GatedDeltaNetShape{2, 6, 128, 128}, GatedDeltaNetShape{16, 48, 128, 128}}) {
    for (int64_t taps : {4, 3}) {
      for (int64_t extra_stride : {0, 1}) {
        SCOPED_TRACE(testing::Message() << shape.key_dim << " x " << shape.value_dim << ", " << taps
                                        << " taps, stride +" << extra_stride);
        constexpr int64_t kSlots = 4, kRows = 44, kMaxRows = 20;
        const Sequence s(shape, kRows, 12, stream_);
        const int64_t channels = shape.QkvCols(), cols = shape.value_heads * shape.value_dim;
        const auto activations = [&](int64_t rows, int64_t columns, uint32_t seed) {
          return DeviceMatrix::Activations(RandomMatrix<float>(rows, columns, seed, -1, 1), stream_,
                                           extra_stride);
        };
        const DeviceMatrix qkv = DeviceMatrix::Activations(s.qkv, stream_, extra_stride),
                           beta = DeviceMatrix::Activations(s.beta, stream_, extra_stride),
                           decay = DeviceMatrix::Activations(s.decay, stream_, extra_stride);
        const DeviceMatrix conv_weight = activations(channels, taps, 60), z = activations(kRows, cols, 61);
        const DeviceMatrix norm_weight = activations(1, shape.value_dim, 62);
        const DeviceMatrix history =
            DeviceMatrix::Activations(RandomMatrix<float>(kSlots * (taps - 1), channels, 63, -1, 1), stream_);
        DeviceArray<float> a_log(s.a_log.values, stream_), dt_bias(s.dt_bias.values, stream_);
        // Before: slot 0 has nothing pending, slot 1 all, slots 2 and 3 some.
        DeviceArray<int32_t> buffer({0, 1, 0, 1}, stream_), count({0, kMaxRows, 5, 3}, stream_);
        DeviceArray<Segment> segments({{1, 2, 16, 100}, {3, 18, 0, 7}, {0, 20, 1, 3}, {2, 22, 20, 9}},
                                      stream_);
        const SegmentList list = {segments.data(), segments.size()};
        const ConvState conv = {history.view().data, kSlots, taps, channels};
        const GatedDeltaNetInput raw = {qkv.view(), beta.view(), decay.view(), a_log.data(), dt_bias.data()};
        HostMatrix<float> o[2];
        std::vector<float> states_after[2], records_after[2];
        for (bool together : {false, true}) {
          const std::vector<float> states_before =
              RandomMatrix<float>(1, kSlots * shape.StateFloats(), 64, -1, 1).values;
          const std::vector<float> records_before =
              RandomMatrix<float>(1, kSlots * 2 * kMaxRows * shape.RecordFloats(), 65, -0.25f, 0.25f).values;
          DeviceArray<float> states(states_before, stream_), records(records_before, stream_);
          const GatedDeltaNetState state = {states.data(), records.data(), kSlots, kMaxRows};
          const PendingRecords pending = {buffer.data(), count.data()};
          const DeviceMatrix convolved =
              DeviceMatrix::Output(kRows, channels, ActivationDType(), stream_, extra_stride);
          const DeviceMatrix out =
              DeviceMatrix::Output(kRows, cols, ActivationDType(), stream_, extra_stride);
          if (together) {
            const auto mixer = [&] {
              return GatedDeltaNetMixerVerify(
                  shape, raw,
                  {conv_weight.view(), conv, norm_weight.view(), z.view(), GateActivation::kSilu, 1e-6f},
                  list, pending, state, convolved.view(), out.view(), stream_);
            };
            const auto put_back = [&]() -> absl::Status {
              DFLASH_RETURN_IF_ERROR(CopyToDevice(states.data(), states_before.data(),
                                                  static_cast<int64_t>(states_before.size() * sizeof(float)),
                                                  stream_));
              DFLASH_RETURN_IF_ERROR(CopyToDevice(records.data(), records_before.data(),
                                                  static_cast<int64_t>(records_before.size() * sizeof(float)),
                                                  stream_));
              return stream_.Synchronize();
            };
            ASSERT_TRUE(CaptureAndReplay(stream_, mixer, put_back).ok());
          } else {
            ASSERT_TRUE(
                CausalConv(qkv.view(), conv_weight.view(), list, conv, convolved.view(), stream_).ok());
            GatedDeltaNetInput input = raw;
            input.qkv = convolved.view();
            ASSERT_TRUE(GatedDeltaNetVerify(shape, input, list, pending, state, out.view(), stream_).ok());
            ASSERT_TRUE(GatedRmsNorm(out.view(), norm_weight.view(), z.view(), GateActivation::kSilu, 1e-6f,
                                     out.view(), stream_)
                            .ok());
          }
          EXPECT_TRUE(out.GuardsIntact());
          EXPECT_TRUE(convolved.GuardsIntact());
          o[together] = out.ToHost();
          states_after[together] = states.ToHost();
          records_after[together] = records.ToHost();
        }
        for (const auto& [first, rows] : {std::pair(2, 16), {20, 1}, {22, 20}}) {
          EXPECT_TRUE(BitEqual(o[1].Rows(first, rows), o[0].Rows(first, rows)));
        }
        EXPECT_EQ(states_after[1], states_after[0]);
        EXPECT_EQ(records_after[1], records_after[0]);
      }
    }
  }
}

TEST_F(GatedDeltaNetTest, RefusesShapesThatDisagree) {
  const GatedDeltaNetShape good = {1, 2, 4, 3};
  DeviceArray<float> states(std::vector<float>(static_cast<size_t>(good.StateFloats())), stream_);
  DeviceArray<float> records(std::vector<float>(static_cast<size_t>(4 * good.RecordFloats())), stream_);
  DeviceArray<float> per_head({0, 0}, stream_);
  DeviceArray<int32_t> zero({0}, stream_);
  DeviceArray<Segment> segment({{0, 0, 2, 0}}, stream_);
  const GatedDeltaNetState state = {states.data(), records.data(), 1, 2};
  const PendingRecords pending = {zero.data(), zero.data()};
  const auto activations = [&](int64_t rows, int64_t cols) {
    return DeviceMatrix::Activations(HostMatrix<float>(rows, cols), stream_);
  };
  const DeviceMatrix qkv = activations(4, good.QkvCols()), gates = activations(4, 2), o = activations(4, 6);
  const DeviceMatrix short_gates = activations(3, 2), wide = activations(4, 7);
  const auto run = [&](const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                       const DeviceMatrix& out, SegmentList list) {
    const absl::StatusCode code =
        GatedDeltaNetVerify(shape, input, list, pending, state, out.view(), stream_).code();
    EXPECT_EQ(GatedDeltaNetPrefill(shape, input, list, state, out.view(), stream_).code(), code);
    return code;
  };
  const SegmentList list = {segment.data(), 1};
  const GatedDeltaNetInput in = {qkv.view(), gates.view(), gates.view(), per_head.data(), per_head.data()};
  EXPECT_EQ(run(good, in, o, list), absl::StatusCode::kOk);
  EXPECT_EQ(run({2, 3, 4, 3}, in, o, list), kBad);
  EXPECT_EQ(run({1, 2, 4, 0}, in, o, list), kBad);
  EXPECT_EQ(run({1, 2, 5, 3}, in, o, list), kBad);
  EXPECT_EQ(run(good, in, wide, list), kBad);
  EXPECT_EQ(run(good, in, o, {nullptr, 1}), kBad);
  GatedDeltaNetInput other = in;
  other.beta = short_gates.view();
  EXPECT_EQ(run(good, other, o, list), kBad);
  other = in;
  other.decay = wide.view();
  EXPECT_EQ(run(good, other, o, list), kBad);
  other = in;
  other.a_log = nullptr;
  EXPECT_EQ(run(good, other, o, list), kBad);
  EXPECT_EQ(GatedDeltaNetFold(good, zero.data(), 1, pending, state, stream_).code(), absl::StatusCode::kOk);
  EXPECT_EQ(GatedDeltaNetFold(good, nullptr, 1, pending, state, stream_).code(), kBad);
  EXPECT_EQ(GatedDeltaNetFold({1, 2, 0, 3}, zero.data(), 1, pending, state, stream_).code(), kBad);
  EXPECT_TRUE(stream_.Synchronize().ok());
}

}  // namespace
}  // namespace dflash
