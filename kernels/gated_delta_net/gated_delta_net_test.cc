#include "kernels/gated_delta_net/gated_delta_net.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/gated_delta_net/gated_delta_net_ref.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/cpu_variants.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr auto kBad = absl::StatusCode::kInvalidArgument;

Stream MakeStream(int threads = 2) { return Stream::Create({.threads = threads}).value(); }

// The inputs of one layer for the positions of one sequence.
struct Sequence {
  Sequence(const GatedDeltaNetShape& shape, int64_t length, uint32_t seed, float decay_low = -3,
           float decay_high = 3)
      : shape(shape),
        qkv(RandomMatrix<float>(length, shape.QkvCols(), 10 * seed, -2, 2)),
        beta(RandomMatrix<float>(length, shape.value_heads, 10 * seed + 1, -3, 3)),
        decay(RandomMatrix<float>(length, shape.value_heads, 10 * seed + 2, decay_low, decay_high)),
        a_log(RandomMatrix<float>(1, shape.value_heads, 10 * seed + 3, -4, 1)),
        dt_bias(RandomMatrix<float>(1, shape.value_heads, 10 * seed + 4, -1, 1)) {}

  GatedDeltaNetShape shape;
  HostMatrix<float> qkv, beta, decay, a_log, dt_bias;
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

// States and records of some slots, driven as an engine drives them.
class Layer {
 public:
  Layer(const GatedDeltaNetShape& shape, int64_t slots, int64_t max_rows, const Stream& stream)
      : shape_(shape),
        stream_(stream),
        states_(std::vector<float>(static_cast<size_t>(slots * shape.StateFloats())), stream),
        records_(std::vector<float>(static_cast<size_t>(slots * 2 * max_rows * shape.RecordFloats()), kNan),
                 stream),
        buffer_(static_cast<size_t>(slots), 0),
        count_(static_cast<size_t>(slots), 0) {
    state_ = {states_.data(), records_.data(), slots, max_rows};
  }

  // Rows [first, first + rows) of the sequence as one verification, of which `accepted` are then committed.
  // Rejected rows hold NaNs: what was no part of the text must not be felt.
  HostMatrix<float> Verify(const Sequence& s, int32_t slot, int32_t first, int32_t rows, int32_t accepted) {
    const HostMatrix<float> o = RunRows(s, slot, first, rows, accepted, /*prefill=*/false);
    buffer_[static_cast<size_t>(slot)] ^= 1;
    count_[static_cast<size_t>(slot)] = accepted;
    return o;
  }

  HostMatrix<float> Prefill(const Sequence& s, int32_t slot, int32_t first, int32_t rows) {
    return RunRows(s, slot, first, rows, rows, /*prefill=*/true);
  }

  void Fold(int32_t slot) {
    DeviceArray<int32_t> buffer(buffer_, stream_), count(count_, stream_), slots({slot}, stream_);
    EXPECT_TRUE(
        GatedDeltaNetFold(shape_, slots.data(), 1, {buffer.data(), count.data()}, state_, stream_).ok());
    count_[static_cast<size_t>(slot)] = 0;
  }

  HostMatrix<float> State(int64_t slot) {
    const std::vector<float> all = states_.ToHost();
    const auto first = all.begin() + slot * shape_.StateFloats();
    return HostMatrix<float>(1, shape_.StateFloats(),
                             std::vector<float>(first, first + shape_.StateFloats()));
  }

 private:
  HostMatrix<float> RunRows(const Sequence& s, int32_t slot, int32_t first, int32_t rows, int32_t accepted,
                            bool prefill) {
    const auto input = [&](const HostMatrix<float>& all) {
      HostMatrix<float> part = all.Rows(first, rows);
      for (int64_t r = accepted; r < rows; ++r) std::fill_n(part.Row(r), part.cols, kNan);
      return DeviceMatrix::Input(part, stream_, 1);
    };
    const DeviceMatrix qkv = input(s.qkv), beta = input(s.beta), decay = input(s.decay);
    DeviceArray<float> a_log(s.a_log.values, stream_), dt_bias(s.dt_bias.values, stream_);
    const DeviceMatrix o =
        DeviceMatrix::Output(rows, shape_.value_heads * shape_.value_dim, ActivationDType(), stream_, 3);
    DeviceArray<Segment> segments({{slot, 0, rows, first}}, stream_);
    DeviceArray<int32_t> buffer(buffer_, stream_), count(count_, stream_);
    const GatedDeltaNetInput in = {qkv.view(), beta.view(), decay.view(), a_log.data(), dt_bias.data()};
    const SegmentList list = {segments.data(), 1};
    const absl::Status status = prefill ? GatedDeltaNetPrefill(shape_, in, list, state_, o.view(), stream_)
                                        : GatedDeltaNetVerify(shape_, in, list, {buffer.data(), count.data()},
                                                              state_, o.view(), stream_);
    EXPECT_TRUE(status.ok()) << status.ToString();
    EXPECT_TRUE(o.GuardsIntact());
    return o.ToHost();
  }

  GatedDeltaNetShape shape_;
  const Stream& stream_;
  DeviceArray<float> states_, records_;
  GatedDeltaNetState state_;
  std::vector<int32_t> buffer_, count_;
};

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

Tolerance RecurrenceTolerance() { return {5e-6, 2e-5}; }

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

TEST(GatedDeltaNetVerifyTest, MatchesDoubleReference) {
  const Stream stream = MakeStream();
  uint32_t seed = 0;
  for (const GatedDeltaNetShape& shape : kShapes) {
    SCOPED_TRACE(testing::Message() << shape.key_dim << " x " << shape.value_dim);
    const Sequence s(shape, 48, ++seed);
    const OracleResult want = Oracle(s, 0, 48);
    const Outcome got = VerifySteps(s, {{16, 16}, {16, 16}, {16, 16}}, stream, false);
    EXPECT_TRUE(Near(got.o, want.o, RecurrenceTolerance()));
    EXPECT_TRUE(Near(got.state, want.state, RecurrenceTolerance()));
  }
}

// The property that speculation rests on: however a text is cut into verifications, whatever was rejected,
// folded at once or lazily, its outputs and its state have the same bits.
TEST(GatedDeltaNetVerifyTest, BitsDoNotDependOnAcceptance) {
  const Stream stream = MakeStream();
  std::mt19937 generator(17);
  uint32_t seed = 50;
  for (const GatedDeltaNetShape& shape : kShapes) {
    constexpr int32_t kLength = 40;
    const Sequence s(shape, kLength + 16, ++seed);  // drafts may run beyond the text
    Sequence text = s;
    for (HostMatrix<float>* m : {&text.qkv, &text.beta, &text.decay}) *m = m->Rows(0, kLength);
    const Outcome plain = VerifySteps(text, std::vector<Step>(kLength, {1, 1}), stream, true);
    for (int round = 0; round < 30; ++round) {
      std::vector<Step> steps;
      for (int32_t position = 0; position < kLength;) {
        const auto rows = std::min<int32_t>(static_cast<int32_t>(1 + generator() % 16), kLength - position);
        const auto accepted = static_cast<int32_t>(generator() % static_cast<uint32_t>(rows + 1));
        steps.push_back({rows, accepted});
        position += accepted;
      }
      SCOPED_TRACE(round);
      const Outcome cut = VerifySteps(text, steps, stream, round % 2 == 0);
      ASSERT_TRUE(BitEqual(cut.o, plain.o));
      ASSERT_TRUE(BitEqual(cut.state, plain.state));
    }
  }
}

// Every way to cut and accept a short text, three rows a step at most.
TEST(GatedDeltaNetVerifyTest, EveryAcceptancePatternOfAShortText) {
  const Stream stream = MakeStream(1);
  const Sequence s({1, 2, 4, 3}, 4, 70);
  const Outcome plain = VerifySteps(s, std::vector<Step>(4, {1, 1}), stream, true);
  int64_t patterns = 0;
  std::vector<Step> steps;
  const auto extend = [&](const auto& self, int32_t position) -> void {
    if (position == 4) {
      ++patterns;
      const Outcome cut = VerifySteps(s, steps, stream, false);
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

TEST(GatedDeltaNetVerifyTest, LeavesTheCommittedStateAlone) {
  const Stream stream = MakeStream();
  const GatedDeltaNetShape shape = kShapes[2];
  const Sequence s(shape, 32, 4);
  Layer layer(shape, 1, 16, stream);
  layer.Prefill(s, 0, 0, 16);
  const HostMatrix<float> before = layer.State(0);
  layer.Verify(s, 0, 16, 16, 16);
  EXPECT_TRUE(BitEqual(layer.State(0), before));
  layer.Fold(0);
  EXPECT_FALSE(BitEqual(layer.State(0), before));
}

TEST(GatedDeltaNetTest, BitsDoNotDependOnThreadsOrInstructions) {
  for (const GatedDeltaNetShape& shape : kShapes) {
    const Sequence s(shape, 120, 5);
    ExpectEqualOnAllCpuVariants([&](const Stream& stream) {
      Layer layer(shape, 1, 16, stream);
      HostMatrix<float> all = layer.Prefill(s, 0, 0, 90);
      for (const HostMatrix<float>& o :
           {layer.Verify(s, 0, 90, 16, 9), layer.Verify(s, 0, 99, 9, 9), layer.Verify(s, 0, 108, 12, 12)}) {
        all.values.insert(all.values.end(), o.values.begin(), o.values.end());
        all.rows += o.rows;
      }
      layer.Fold(0);
      const HostMatrix<float> state = layer.State(0);
      all.values.insert(all.values.end(), state.values.begin(), state.values.end());
      return HostMatrix<float>(1, static_cast<int64_t>(all.values.size()), all.values);
    });
  }
}

TEST(GatedDeltaNetPrefillTest, MatchesDoubleReferenceForAnyCut) {
  const Stream stream = MakeStream();
  uint32_t seed = 100;
  for (const GatedDeltaNetShape& shape : kShapes) {
    const Sequence s(shape, 200, ++seed);
    for (const std::vector<int32_t>& cuts :
         {std::vector<int32_t>{0, 200}, {0, 1, 2, 200}, {0, 63, 64, 65, 199, 200}, {0, 30, 150, 151, 200}}) {
      Layer layer(shape, 1, 1, stream);
      OracleResult want = Oracle(s, 0, 0);
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        SCOPED_TRACE(testing::Message() << shape.key_dim << " x " << shape.value_dim << ", from " << cuts[i]);
        want = Oracle(s, cuts[i], cuts[i + 1] - cuts[i], &want.state);
        EXPECT_TRUE(Near(layer.Prefill(s, 0, cuts[i], cuts[i + 1] - cuts[i]), want.o, RecurrenceTolerance()));
      }
      EXPECT_TRUE(Near(layer.State(0), want.state, RecurrenceTolerance()));
    }
  }
}

TEST(GatedDeltaNetPrefillTest, BitsDoNotDependOnCutsOnTheGrid) {
  const Stream stream = MakeStream();
  for (const GatedDeltaNetShape& shape : kShapes) {
    const Sequence s(shape, 300, 7);
    Layer whole(shape, 1, 1, stream);
    const HostMatrix<float> o = whole.Prefill(s, 0, 0, 300);
    for (const std::vector<int32_t>& cuts :
         {std::vector<int32_t>{0, 64, 128, 192, 256, 300}, {0, 192, 300}, {0, 256, 300}}) {
      Layer layer(shape, 1, 1, stream);
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        const int32_t rows = cuts[i + 1] - cuts[i];
        EXPECT_TRUE(BitEqual(layer.Prefill(s, 0, cuts[i], rows), o.Rows(cuts[i], rows)));
      }
      EXPECT_TRUE(BitEqual(layer.State(0), whole.State(0)));
    }
  }
}

// Decays of all sizes in one chunk: e^(G_i - G_j) is formed for j <= i alone, so nothing overflows.
TEST(GatedDeltaNetPrefillTest, StrongAndWeakDecayStayFinite) {
  const Stream stream = MakeStream();
  const GatedDeltaNetShape shape = kShapes[0];
  for (float scale : {-60.0f, 60.0f}) {
    Sequence s(shape, 130, 8, std::min(scale, 0.0f), std::max(scale, 0.0f));
    const OracleResult want = Oracle(s, 0, 130);
    Layer layer(shape, 1, 1, stream);
    EXPECT_TRUE(Near(layer.Prefill(s, 0, 0, 130), want.o, {2e-5, 2e-4}));
    EXPECT_TRUE(Near(layer.State(0), want.state, {2e-5, 2e-4}));
  }
}

// Several sequences in one call, some rows of nobody: everyone as if alone.
TEST(GatedDeltaNetTest, SegmentsOfAStepDoNotMeet) {
  const Stream stream = MakeStream(3);
  const GatedDeltaNetShape shape = kShapes[2];
  const Sequence s(shape, 60, 9);
  const std::vector<Segment> segments = {{2, 30, 16, 30}, {0, 3, 5, 3}, {1, 9, 0, 9}, {3, 10, 1, 10}};
  for (bool prefill : {false, true}) {
    DeviceArray<float> states(std::vector<float>(static_cast<size_t>(4 * shape.StateFloats()), 0.25f),
                              stream);
    DeviceArray<float> records(
        std::vector<float>(static_cast<size_t>(4 * 2 * 16 * shape.RecordFloats()), kNan), stream);
    const GatedDeltaNetState state = {states.data(), records.data(), 4, 16};
    DeviceArray<int32_t> buffer({0, 1, 1, 0}, stream), count(std::vector<int32_t>(4), stream);
    DeviceArray<float> a_log(s.a_log.values, stream), dt_bias(s.dt_bias.values, stream);
    const DeviceMatrix qkv = DeviceMatrix::Input(s.qkv, stream), beta = DeviceMatrix::Input(s.beta, stream);
    const DeviceMatrix decay = DeviceMatrix::Input(s.decay, stream);
    const GatedDeltaNetInput in = {qkv.view(), beta.view(), decay.view(), a_log.data(), dt_bias.data()};
    const auto run = [&](std::vector<Segment> list) {
      DeviceArray<Segment> device(list, stream);
      const DeviceMatrix o =
          DeviceMatrix::Output(60, shape.value_heads * shape.value_dim, ActivationDType(), stream);
      const SegmentList all = {device.data(), device.size()};
      EXPECT_TRUE((prefill ? GatedDeltaNetPrefill(shape, in, all, state, o.view(), stream)
                           : GatedDeltaNetVerify(shape, in, all, {buffer.data(), count.data()}, state,
                                                 o.view(), stream))
                      .ok());
      return o.ToHost();
    };
    const HostMatrix<float> together = run(segments);
    const std::vector<float> after = states.ToHost();
    std::fill_n(states.data(), states.size(), 0.25f);
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

TEST(GatedDeltaNetTest, RefusesShapesThatDisagree) {
  const Stream stream = MakeStream(1);
  const GatedDeltaNetShape good = {1, 2, 4, 3};
  const Sequence s(good, 4, 1);
  std::vector<float> states(static_cast<size_t>(good.StateFloats())),
      records(static_cast<size_t>(4 * good.RecordFloats()));
  const GatedDeltaNetState state = {states.data(), records.data(), 1, 2};
  int32_t buffer = 0, count = 0;
  HostMatrix<float> o(4, 6);
  GatedDeltaNetInput in = {s.qkv.view(), s.beta.view(), s.decay.view(), s.a_log.Row(0), s.dt_bias.Row(0)};
  const auto verify = [&](const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input, Segment segment) {
    const MatrixView out(o.values.data(), 4, 6);
    const absl::StatusCode code =
        GatedDeltaNetVerify(shape, input, {&segment, 1}, {&buffer, &count}, state, out, stream).code();
    if (segment.row_count <= 2 && (buffer & ~1) == 0 && count <= 2) {
      EXPECT_EQ(GatedDeltaNetPrefill(shape, input, {&segment, 1}, state, out, stream).code(), code);
    }
    return code;
  };
  const Segment segment = {0, 0, 2, 0};
  EXPECT_EQ(verify(good, in, segment), absl::StatusCode::kOk);
  EXPECT_EQ(verify({2, 3, 4, 3}, in, segment), kBad);
  EXPECT_EQ(verify({1, 2, 4, 0}, in, segment), kBad);
  EXPECT_EQ(verify({1, 2, 5, 3}, in, segment), kBad);
  EXPECT_EQ(verify(good, in, {1, 0, 2, 0}), kBad);
  EXPECT_EQ(verify(good, in, {0, 3, 2, 0}), kBad);
  EXPECT_EQ(verify(good, in, {0, 0, 3, 0}), kBad);  // more rows than records
  GatedDeltaNetInput other = in;
  other.decay = ConstMatrixView(s.decay.values.data(), 3, 2);
  EXPECT_EQ(verify(good, other, segment), kBad);
  other = in;
  other.a_log = nullptr;
  EXPECT_EQ(verify(good, other, segment), kBad);
  count = 3;
  EXPECT_EQ(verify(good, in, segment), kBad);
  const int32_t slots[] = {0, 1};
  EXPECT_EQ(GatedDeltaNetFold(good, slots, 1, {&buffer, &count}, state, stream).code(), kBad);
  count = 0;
  EXPECT_EQ(GatedDeltaNetFold(good, slots, 1, {&buffer, &count}, state, stream).code(),
            absl::StatusCode::kOk);
  EXPECT_EQ(GatedDeltaNetFold(good, slots, 2, {&buffer, &count}, state, stream).code(), kBad);
  buffer = 2;
  EXPECT_EQ(verify(good, in, segment), kBad);
}

}  // namespace
}  // namespace dflash
