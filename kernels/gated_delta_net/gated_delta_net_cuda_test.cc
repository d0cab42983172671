// What the GPU adds to gated_delta_net_test.cc: the models' shapes, aligned rows, segments longer than what a
// block stages at once, prefills longer than the workspace, captured launches.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device/graph.h"
#include "kernels/gated_delta_net/gated_delta_net.h"
#include "kernels/gated_delta_net/gated_delta_net_ref.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/gated_delta_net_layer.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

using Layer = GatedDeltaNetLayer;
using Sequence = GatedDeltaNetSequence;

constexpr GatedDeltaNetShape kTarget = {16, 48, 128, 128}, kTiny = {4, 12, 32, 32}, kOdd = {2, 4, 100, 67};
constexpr Tolerance kStateTolerance = {5e-6, 2e-5}, kOutputTolerance = {1e-4, 4e-3};

class GatedDeltaNetCudaTest : public ::testing::Test {
 protected:
  struct Result {
    HostMatrix<double> o, state;
  };
  static Result Oracle(const Sequence& s, int64_t first, int64_t rows,
                       const HostMatrix<double>* from = nullptr) {
    Result result = {HostMatrix<double>(rows, s.shape.value_heads * s.shape.value_dim),
                     from != nullptr ? *from : HostMatrix<double>(1, s.shape.StateFloats())};
    GatedDeltaNetRef<double>(s.shape, s.qkv.Row(first), s.beta.Row(first), s.decay.Row(first), s.a_log.Row(0),
                             s.dt_bias.Row(0), rows, result.state.Row(0), result.o.Row(0));
    return result;
  }

  Stream stream_ = *Stream::Create({});
};

TEST_F(GatedDeltaNetCudaTest, MatchesDoubleReferenceAtTheModelsShapes) {
  for (const GatedDeltaNetShape& shape : {kTarget, kTiny, kOdd}) {
    for (int64_t extra_stride : {0, 1}) {
      SCOPED_TRACE(testing::Message()
                   << shape.key_dim << " x " << shape.value_dim << ", stride +" << extra_stride);
      const Sequence s(shape, 202, 3, stream_);
      Layer layer(shape, 2, 16, stream_, extra_stride);
      const Result prefix = Oracle(s, 0, 170);
      EXPECT_TRUE(Near(layer.Prefill(s, 1, 0, 170), prefix.o, kOutputTolerance));
      EXPECT_TRUE(Near(layer.State(1), prefix.state, kStateTolerance));
      const Result rest = Oracle(s, 170, 32, &prefix.state);
      HostMatrix<float> o(32, rest.o.cols);
      const auto place = [&](const HostMatrix<float>& rows, int64_t count, int64_t at) {
        std::copy_n(rows.Row(0), count * o.cols, o.Row(at));
      };
      place(layer.Verify(s, 1, 170, 16, 7), 7, 0);
      place(layer.Verify(s, 1, 177, 1, 1), 1, 7);
      place(layer.Verify(s, 1, 178, 16, 16), 16, 8);
      place(layer.Verify(s, 1, 194, 8, 8), 8, 24);
      layer.Fold(1);
      EXPECT_TRUE(Near(o, rest.o, kOutputTolerance));
      EXPECT_TRUE(Near(layer.State(1), rest.state, kStateTolerance));
    }
  }
}

TEST_F(GatedDeltaNetCudaTest, BitsDoNotDependOnAlignment) {
  for (const GatedDeltaNetShape& shape : {kTarget, kTiny}) {
    const Sequence s(shape, 110, 4, stream_);
    Layer aligned(shape, 1, 16, stream_, 0), shifted(shape, 1, 16, stream_, 1);
    EXPECT_TRUE(BitEqual(aligned.Prefill(s, 0, 0, 90), shifted.Prefill(s, 0, 0, 90)));
    EXPECT_TRUE(BitEqual(aligned.Verify(s, 0, 90, 16, 16), shifted.Verify(s, 0, 90, 16, 16)));
    aligned.Fold(0);
    shifted.Fold(0);
    EXPECT_TRUE(BitEqual(aligned.State(0), shifted.State(0)));
  }
}

TEST_F(GatedDeltaNetCudaTest, BitsDoNotDependOnTheNumberOfRows) {
  for (const GatedDeltaNetShape& shape : {kTarget, kTiny, kOdd}) {
    SCOPED_TRACE(shape.key_dim);
    const Sequence s(shape, 80, 5, stream_);
    Layer at_once(shape, 1, 40, stream_, 0), one_by_one(shape, 1, 40, stream_, 0);
    HostMatrix<float> o = at_once.Verify(s, 0, 0, 40, 40), rest = at_once.Verify(s, 0, 40, 40, 33);
    at_once.Fold(0);
    for (int32_t t = 0; t < 73; ++t) {
      ASSERT_TRUE(BitEqual(one_by_one.Verify(s, 0, t, 1, 1), t < 40 ? o.Rows(t, 1) : rest.Rows(t - 40, 1)))
          << t;
    }
    one_by_one.Fold(0);
    EXPECT_TRUE(BitEqual(at_once.State(0), one_by_one.State(0)));
  }
}

// More rows than the workspace holds chunks for at a time.
TEST_F(GatedDeltaNetCudaTest, PrefillInSeveralPassesEqualsItsParts) {
  const GatedDeltaNetShape shape = {16, 48, 128, 128};
  constexpr int32_t kRows = 9100, kFirst = 4544;
  const Sequence s(shape, kRows, 6, stream_);
  Layer whole(shape, 1, 1, stream_, 0), parts(shape, 1, 1, stream_, 0);
  const HostMatrix<float> o = whole.Prefill(s, 0, 0, kRows);
  EXPECT_TRUE(BitEqual(parts.Prefill(s, 0, 0, kFirst), o.Rows(0, kFirst)));
  EXPECT_TRUE(BitEqual(parts.Prefill(s, 0, kFirst, kRows - kFirst), o.Rows(kFirst, kRows - kFirst)));
  EXPECT_TRUE(BitEqual(parts.State(0), whole.State(0)));
}

TEST_F(GatedDeltaNetCudaTest, LongPrefillEqualsItsParts) {
  const GatedDeltaNetShape shape = {16, 48, 128, 16};
  const Sequence s(shape, 3000, 6, stream_);
  Layer whole(shape, 1, 1, stream_, 0), parts(shape, 1, 1, stream_, 0);
  const HostMatrix<float> o = whole.Prefill(s, 0, 0, 3000);
  int32_t at = 0;
  for (int32_t rows : {64, 1280, 960, 696}) {
    EXPECT_TRUE(BitEqual(parts.Prefill(s, 0, at, rows), o.Rows(at, rows)));
    at += rows;
  }
  EXPECT_TRUE(BitEqual(parts.State(0), whole.State(0)));
  EXPECT_TRUE(Near(whole.State(0), Oracle(s, 0, 3000).state, kStateTolerance));
}

// Gates may come in float32.
TEST_F(GatedDeltaNetCudaTest, GatesInFloat32) {
  const Sequence s(kTiny, 20, 7, stream_);
  DeviceArray<float> states(std::vector<float>(static_cast<size_t>(2 * kTiny.StateFloats())), stream_);
  DeviceArray<float> records(std::vector<float>(static_cast<size_t>(2 * 2 * 20 * kTiny.RecordFloats())),
                             stream_);
  DeviceArray<float> a_log(s.a_log.values, stream_), dt_bias(s.dt_bias.values, stream_);
  DeviceArray<int32_t> zero({0, 0}, stream_);
  const DeviceMatrix qkv = DeviceMatrix::Activations(s.qkv, stream_);
  const DeviceMatrix beta = DeviceMatrix::Input(s.beta, stream_),
                     decay = DeviceMatrix::Input(s.decay, stream_);
  for (bool prefill : {false, true}) {
    DeviceArray<Segment> segment({{prefill ? 1 : 0, 0, 20, 0}}, stream_);
    const DeviceMatrix o = DeviceMatrix::Output(20, 12 * 32, DType::kBf16, stream_);
    const GatedDeltaNetInput in = {qkv.view(), beta.view(), decay.view(), a_log.data(), dt_bias.data()};
    const GatedDeltaNetState state = {states.data(), records.data(), 2, 20};
    ASSERT_TRUE((prefill ? GatedDeltaNetPrefill(kTiny, in, {segment.data(), 1}, state, o.view(), stream_)
                         : GatedDeltaNetVerify(kTiny, in, {segment.data(), 1}, {zero.data(), zero.data()},
                                               state, o.view(), stream_))
                    .ok());
    EXPECT_TRUE(Near(o.ToHost(), Oracle(s, 0, 20).o, kOutputTolerance));
  }
}

// A captured step reads segments, pending counts and buffers from device memory.
TEST_F(GatedDeltaNetCudaTest, ReplaysWithOtherSegments) {
  const Sequence s(kTarget, 60, 8, stream_);
  constexpr int64_t kSlots = 3;
  DeviceArray<float> states(std::vector<float>(static_cast<size_t>(kSlots * kTarget.StateFloats())), stream_);
  DeviceArray<float> records(
      std::vector<float>(static_cast<size_t>(kSlots * 2 * 16 * kTarget.RecordFloats())), stream_);
  DeviceArray<float> a_log(s.a_log.values, stream_), dt_bias(s.dt_bias.values, stream_);
  DeviceArray<int32_t> buffer({0, 0, 0}, stream_), count({0, 0, 0}, stream_);
  DeviceArray<Segment> list({{0, 0, 0, 0}}, stream_);
  const DeviceMatrix qkv = DeviceMatrix::Activations(s.qkv.Rows(0, 16), stream_);
  const DeviceMatrix beta = DeviceMatrix::Activations(s.beta.Rows(0, 16), stream_);
  const DeviceMatrix decay = DeviceMatrix::Activations(s.decay.Rows(0, 16), stream_);
  const DeviceMatrix o = DeviceMatrix::Output(16, 48 * 128, DType::kBf16, stream_);
  const GatedDeltaNetInput in = {qkv.view(), beta.view(), decay.view(), a_log.data(), dt_bias.data()};
  const GatedDeltaNetState state = {states.data(), records.data(), kSlots, 16};
  auto graph = Graph::Capture(stream_, [&] {
    return GatedDeltaNetVerify(kTarget, in, {list.data(), 1}, {buffer.data(), count.data()}, state, o.view(),
                               stream_);
  });
  ASSERT_TRUE(graph.ok()) << graph.status();
  Layer layer(kTarget, kSlots, 16, stream_, 0);
  int32_t position = 0;
  std::vector<int32_t> buffers = {0, 0, 0}, counts = {0, 0, 0};
  for (const auto& [rows, accepted] : {std::pair(16, 5), {3, 0}, {16, 16}, {1, 1}, {16, 2}}) {
    SCOPED_TRACE(position);
    const Segment segment = {2, 0, rows, position};
    ASSERT_TRUE(CopyToDevice(list.data(), &segment, sizeof(segment), stream_).ok());
    ASSERT_TRUE(CopyToDevice(buffer.data(), buffers.data(), 12, stream_).ok());
    ASSERT_TRUE(CopyToDevice(count.data(), counts.data(), 12, stream_).ok());
    for (auto [from, to] : {std::pair(&s.qkv, &qkv), {&s.beta, &beta}, {&s.decay, &decay}}) {
      const DeviceMatrix rows_of = DeviceMatrix::Activations(from->Rows(position, rows), stream_);
      ASSERT_TRUE(CopyRows(rows_of.view(), to->view().Rows(0, rows), stream_).ok());
      ASSERT_TRUE(stream_.Synchronize().ok());
    }
    ASSERT_TRUE(graph->Launch(stream_).ok());
    // The layer's rejected rows are NaNs, the graph's are not: only accepted ones compare.
    const HostMatrix<float> want = layer.Verify(s, 2, position, rows, accepted);
    EXPECT_TRUE(BitEqual(o.ToHost().Rows(0, accepted), want.Rows(0, accepted)));
    buffers[2] ^= 1;
    counts[2] = accepted;
    position += accepted;
  }
}

// The same of PREFILL rows: chunks of the grid, parts of chunks, one row.
TEST_F(GatedDeltaNetCudaTest, PrefillReplaysWithOtherSegments) {
  const Sequence s(kTarget, 400, 9, stream_);
  constexpr int64_t kSlots = 2, kMostRows = 200;
  DeviceArray<float> states(std::vector<float>(static_cast<size_t>(kSlots * kTarget.StateFloats())), stream_);
  DeviceArray<float> a_log(s.a_log.values, stream_), dt_bias(s.dt_bias.values, stream_);
  DeviceArray<Segment> list({{0, 0, 0, 0}}, stream_);
  const DeviceMatrix qkv = DeviceMatrix::Activations(s.qkv.Rows(0, kMostRows), stream_);
  const DeviceMatrix beta = DeviceMatrix::Activations(s.beta.Rows(0, kMostRows), stream_);
  const DeviceMatrix decay = DeviceMatrix::Activations(s.decay.Rows(0, kMostRows), stream_);
  const DeviceMatrix o = DeviceMatrix::Output(kMostRows, 48 * 128, DType::kBf16, stream_);
  const GatedDeltaNetInput in = {qkv.view(), beta.view(), decay.view(), a_log.data(), dt_bias.data()};
  auto graph = Graph::Capture(stream_, [&] {
    return GatedDeltaNetPrefill(kTarget, in, {list.data(), 1}, {states.data(), nullptr, kSlots, 16}, o.view(),
                                stream_);
  });
  ASSERT_TRUE(graph.ok()) << graph.status();
  Layer layer(kTarget, kSlots, 16, stream_, 0);
  int32_t position = 0;
  for (const int32_t rows : {64, 200, 7, 1, 128}) {
    SCOPED_TRACE(position);
    const Segment segment = {1, 0, rows, position};
    ASSERT_TRUE(CopyToDevice(list.data(), &segment, sizeof(segment), stream_).ok());
    for (auto [from, to] : {std::pair(&s.qkv, &qkv), {&s.beta, &beta}, {&s.decay, &decay}}) {
      const DeviceMatrix rows_of = DeviceMatrix::Activations(from->Rows(position, rows), stream_);
      ASSERT_TRUE(CopyRows(rows_of.view(), to->view().Rows(0, rows), stream_).ok());
      ASSERT_TRUE(stream_.Synchronize().ok());
    }
    ASSERT_TRUE(graph->Launch(stream_).ok());
    EXPECT_TRUE(BitEqual(o.ToHost().Rows(0, rows), layer.Prefill(s, 1, position, rows)));
    position += rows;
  }
  const std::vector<float> after = states.ToHost();
  EXPECT_EQ(std::vector<float>(after.begin() + kTarget.StateFloats(), after.end()), layer.State(1).values);
  EXPECT_TRUE(o.GuardsIntact());
}

// One kernel does a layer's whole mixer for many sequences. A sequence's outputs, state and records are those
// that it has alone, and its first rows those of a shorter segment. One to five heads share a key head; 24
// and 6 are those of a rank of two and of eight.
TEST_F(GatedDeltaNetCudaTest, MixerOfManySequencesEqualsEachAlone) {
  for (const GatedDeltaNetShape& shape :
       {kTarget, GatedDeltaNetShape{8, 24, 128, 128}, GatedDeltaNetShape{2, 6, 128, 128},
        GatedDeltaNetShape{4, 4, 128, 128}, GatedDeltaNetShape{2, 4, 128, 128},
        GatedDeltaNetShape{1, 4, 128, 128}, GatedDeltaNetShape{4, 20, 128, 128}}) {
    SCOPED_TRACE(testing::Message() << shape.value_heads << " heads on " << shape.key_heads);
    constexpr int32_t kSlots = 12, kMaxRows = 20;
    std::vector<Segment> segments;
    std::vector<int32_t> buffer, count;
    int32_t rows = 0;
    for (int32_t i = 0; i < kSlots; ++i) {
      const int32_t row_count = i == 5 ? 0 : 1 + i * 7 % kMaxRows;
      segments.push_back({i * 5 % kSlots, rows, row_count, 100});
      rows += row_count;
      buffer.push_back(i % 2);
      count.push_back(i * 11 % (kMaxRows + 1));
    }
    const Sequence s(shape, rows, 14, stream_);
    const int64_t channels = shape.QkvCols(), cols = shape.value_heads * shape.value_dim;
    const auto activations = [&](int64_t r, int64_t c, uint32_t seed) {
      return DeviceMatrix::Activations(RandomMatrix<float>(r, c, seed, -1, 1), stream_, 0);
    };
    const DeviceMatrix qkv = DeviceMatrix::Activations(s.qkv, stream_, 0),
                       beta = DeviceMatrix::Activations(s.beta, stream_, 0),
                       decay = DeviceMatrix::Activations(s.decay, stream_, 0);
    const DeviceMatrix conv_weight = activations(channels, 4, 80), z = activations(rows, cols, 81);
    const DeviceMatrix norm_weight = activations(1, shape.value_dim, 82),
                       history = activations(kSlots * 3, channels, 83);
    DeviceArray<float> a_log(s.a_log.values, stream_), dt_bias(s.dt_bias.values, stream_);
    DeviceArray<int32_t> buffers(buffer, stream_), counts(count, stream_);
    const std::vector<float> states = RandomMatrix<float>(1, kSlots * shape.StateFloats(), 84, -1, 1).values;
    const std::vector<float> records =
        RandomMatrix<float>(1, kSlots * 2 * kMaxRows * shape.RecordFloats(), 85, -0.25f, 0.25f).values;
    const GatedDeltaNetInput input = {qkv.view(), beta.view(), decay.view(), a_log.data(), dt_bias.data()};
    const GatedDeltaNetSurroundings around = {
        conv_weight.view(),    {history.view().data, kSlots, 4, channels},
        norm_weight.view(),    z.view(),
        GateActivation::kSilu, 1e-6f};
    struct Outcome {
      HostMatrix<float> o;
      std::vector<float> states, records;
    };
    // In as many calls as there are lists. Rows are taken right behind their call: what it leaves in those of
    // nobody is not said.
    const auto run = [&](const std::vector<std::vector<Segment>>& lists) {
      DeviceArray<float> to_states(states, stream_), to_records(records, stream_);
      const DeviceMatrix convolved = DeviceMatrix::Output(rows, channels, DType::kBf16, stream_),
                         out = DeviceMatrix::Output(rows, cols, DType::kBf16, stream_, 0);
      HostMatrix<float> o(rows, cols);
      for (const std::vector<Segment>& list : lists) {
        DeviceArray<Segment> device(list, stream_);
        EXPECT_TRUE(GatedDeltaNetMixerVerify(shape, input, around, {device.data(), device.size()},
                                             {buffers.data(), counts.data()},
                                             {to_states.data(), to_records.data(), kSlots, kMaxRows},
                                             convolved.view(), out.view(), stream_)
                        .ok());
        const HostMatrix<float> after = out.ToHost();
        for (const Segment& segment : list) {
          std::copy_n(after.Row(segment.first_row), segment.row_count * cols, o.Row(segment.first_row));
        }
      }
      return Outcome{o, to_states.ToHost(), to_records.ToHost()};
    };
    const Outcome together = run({segments});
    std::vector<std::vector<Segment>> fours, each, shorter;
    for (Segment segment : segments) {
      if (each.size() % 4 == 0) fours.emplace_back();
      fours.back().push_back(segment);
      each.push_back({segment});
      segment.row_count = (segment.row_count + 1) / 2;
      shorter.push_back({segment});
    }
    const Outcome in_fours = run(fours), alone = run(each), first_rows = run(shorter);
    EXPECT_EQ(together.states, in_fours.states);
    EXPECT_EQ(together.records, in_fours.records);
    EXPECT_EQ(together.states, alone.states);
    EXPECT_EQ(together.states, first_rows.states);
    EXPECT_NE(together.states, states);
    EXPECT_EQ(together.records, alone.records);
    for (size_t i = 0; i < segments.size(); ++i) {
      for (const auto& [outcome, row_count] :
           {std::pair(&in_fours, segments[i].row_count), std::pair(&alone, segments[i].row_count),
            std::pair(&first_rows, shorter[i][0].row_count)}) {
        EXPECT_TRUE(BitEqual(outcome->o.Rows(segments[i].first_row, row_count),
                             together.o.Rows(segments[i].first_row, row_count)))
            << i;
      }
    }
  }
}

// A captured fold reads slots, counts and buffers from device memory.
TEST_F(GatedDeltaNetCudaTest, FoldReplaysWithOtherRecords) {
  constexpr int64_t kSlots = 3, kMostRows = 16;
  const auto floats = static_cast<size_t>(kTarget.StateFloats());
  const std::vector<float> before = RandomMatrix<float>(1, kSlots * kTarget.StateFloats(), 70, -1, 1).values;
  DeviceArray<float> states(before, stream_), folded(before, stream_);
  DeviceArray<float> records(
      RandomMatrix<float>(1, kSlots * 2 * kMostRows * kTarget.RecordFloats(), 71, -0.25f, 0.25f).values,
      stream_);
  DeviceArray<int32_t> slots({0, 0}, stream_), buffer({0, 0, 0}, stream_), count({0, 0, 0}, stream_);
  const PendingRecords pending = {buffer.data(), count.data()};
  const auto fold = [&](DeviceArray<float>& into) {
    return GatedDeltaNetFold(kTarget, slots.data(), 2, pending,
                             {into.data(), records.data(), kSlots, kMostRows}, stream_);
  };
  auto graph = Graph::Capture(stream_, [&] { return fold(states); });
  ASSERT_TRUE(graph.ok()) << graph.status();
  struct Round {
    std::vector<int32_t> slots, buffers, counts;
  };
  for (const Round& round : {Round{{0, 2}, {0, 0, 1}, {16, 3, 5}},
                             {{1, 0}, {1, 1, 1}, {0, 7, 1}},
                             {{2, 1}, {0, 0, 0}, {3, 1, 16}}}) {
    ASSERT_TRUE(CopyToDevice(slots.data(), round.slots.data(), 8, stream_).ok());
    ASSERT_TRUE(CopyToDevice(buffer.data(), round.buffers.data(), 12, stream_).ok());
    ASSERT_TRUE(CopyToDevice(count.data(), round.counts.data(), 12, stream_).ok());
    ASSERT_TRUE(graph->Launch(stream_).ok());
    ASSERT_TRUE(fold(folded).ok());
    EXPECT_EQ(states.ToHost(), folded.ToHost());
  }
  const std::vector<float> after = states.ToHost();
  for (size_t slot = 0; slot < kSlots; ++slot) {
    const auto at = static_cast<std::ptrdiff_t>(slot * floats);
    EXPECT_FALSE(std::equal(after.begin() + at, after.begin() + at + static_cast<std::ptrdiff_t>(floats),
                            before.begin() + at))
        << slot;
  }
}

TEST_F(GatedDeltaNetCudaTest, SaysWhatIsNotThere) {
  const GatedDeltaNetShape wide = {1, 1, 129, 8};
  const DeviceMatrix qkv = DeviceMatrix::Activations(HostMatrix<float>(1, wide.QkvCols()), stream_);
  const DeviceMatrix gate = DeviceMatrix::Activations(HostMatrix<float>(1, 1), stream_);
  const DeviceMatrix o = DeviceMatrix::Output(1, 8, DType::kBf16, stream_);
  DeviceArray<float> per_head({0}, stream_);
  DeviceArray<Segment> segment({{0, 0, 1, 0}}, stream_);
  const GatedDeltaNetInput in = {qkv.view(), gate.view(), gate.view(), per_head.data(), per_head.data()};
  const absl::Status status =
      GatedDeltaNetPrefill(wide, in, {segment.data(), 1}, {nullptr, nullptr, 1, 1}, o.view(), stream_);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(status.message().find("129"), std::string::npos);
}

}  // namespace
}  // namespace dflash
