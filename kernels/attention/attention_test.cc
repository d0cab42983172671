// The contract of attention.h against a double reference, for the linked backend.
#include "kernels/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/attention/attention_ref.h"
#include "kernels/device/buffer.h"
#include "kernels/swiglu/swiglu.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr auto kBad = absl::StatusCode::kInvalidArgument;

Tolerance OutputTolerance() {
  return ActivationDType() == DType::kF32 ? Tolerance{2e-6, 2e-6} : Tolerance{4e-3, 8e-3};
}

struct Shape {
  int64_t heads, kv_heads, dim;
  int64_t QueryCols() const { return heads * dim; }
  int64_t KeyCols() const { return kv_heads * dim; }
};

HostMatrix<float> RandomActivations(int64_t rows, int64_t cols, uint32_t seed, const Stream& stream) {
  return DeviceMatrix::Activations(RandomMatrix<float>(rows, cols, seed, -2, 2), stream).ToHost();
}

// All positions of a sequence: what a step is cut from.
struct Sequence {
  Sequence(const Shape& shape, int64_t length, uint32_t seed, const Stream& stream)
      : shape(shape),
        q(RandomActivations(length, shape.QueryCols(), 3 * seed, stream)),
        k(RandomActivations(length, shape.KeyCols(), 3 * seed + 1, stream)),
        v(RandomActivations(length, shape.KeyCols(), 3 * seed + 2, stream)) {}

  Shape shape;
  HostMatrix<float> q, k, v;
};

// Pages in shuffled order, all elements `poison` until written.
struct Cache {
  static constexpr int64_t kPagesPerSlot = 6;

  Cache(const Shape& shape, int64_t slots, float poison, const Stream& stream)
      : slots(slots), stream(stream), pages(Shuffled(slots * kPagesPerSlot), stream) {
    pool = {.page_count = slots * kPagesPerSlot, .kv_heads = shape.kv_heads, .head_dim = shape.dim};
    memory = Buffer::Allocate(pool.page_count * pool.PageBytes(), stream).value();
    pool.data = memory.data();
    const HostMatrix<float> fill(1, 1, {poison});
    const DeviceMatrix element = DeviceMatrix::Activations(fill, stream);
    const int64_t width = SizeOf(ActivationDType()), count = memory.bytes() / width;
    std::vector<char> bytes(static_cast<size_t>(memory.bytes())), one(static_cast<size_t>(width));
    EXPECT_TRUE(CopyToHost(one.data(), element.view().data, width, stream).ok());
    for (int64_t i = 0; i < count; ++i) std::copy_n(one.data(), width, bytes.data() + i * width);
    EXPECT_TRUE(CopyToDevice(memory.data(), bytes.data(), memory.bytes(), stream).ok());
    EXPECT_TRUE(stream.Synchronize().ok());
  }
  static std::vector<int32_t> Shuffled(int64_t count) {
    std::vector<int32_t> order(static_cast<size_t>(count));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), std::mt19937(7));
    return order;
  }
  PageTable table() { return {pages.data(), slots, kPagesPerSlot}; }
  // Writes positions [begin, end) of the sequence into the pages of the slot.
  void Store(const Sequence& sequence, int64_t slot, int64_t begin, int64_t end,
             const int32_t* row_counts = nullptr) {
    const DeviceMatrix k = DeviceMatrix::Activations(sequence.k.Rows(begin, end - begin), stream, 3);
    const DeviceMatrix v = DeviceMatrix::Activations(sequence.v.Rows(begin, end - begin), stream, 1);
    DeviceArray<Segment> segments(
        {{static_cast<int32_t>(slot), 0, static_cast<int32_t>(end - begin), static_cast<int32_t>(begin)}},
        stream);
    const absl::Status status =
        StoreKeyValue(k.view(), v.view(), {segments.data(), 1}, row_counts, table(), pool, stream);
    EXPECT_TRUE(status.ok()) << status.ToString();
    EXPECT_TRUE(stream.Synchronize().ok());
  }

  int64_t slots;
  const Stream& stream;
  KeyValuePool pool;
  Buffer memory;
  DeviceArray<int32_t> pages;
};

float ScaleOf(const Shape& shape) { return 1.0f / std::sqrt(static_cast<float>(shape.dim)); }

// One step of one sequence: rows at [start, start + rows) over a cache that holds [0, start).
HostMatrix<float> RunStep(Cache& cache, const Sequence& sequence, int64_t slot, int64_t start, int64_t rows,
                          const AttentionMask& mask, const Stream& stream, int32_t context_start = 0) {
  const Shape& shape = sequence.shape;
  const DeviceMatrix q = DeviceMatrix::Activations(sequence.q.Rows(start, rows), stream, 5);
  const DeviceMatrix k = DeviceMatrix::Activations(sequence.k.Rows(start, rows), stream);
  const DeviceMatrix v = DeviceMatrix::Activations(sequence.v.Rows(start, rows), stream, 2);
  const DeviceMatrix out = DeviceMatrix::Output(rows, shape.QueryCols(), ActivationDType(), stream, 3);
  DeviceArray<Segment> segments(
      {{static_cast<int32_t>(slot), 0, static_cast<int32_t>(rows), static_cast<int32_t>(start)}}, stream);
  DeviceArray<int32_t> starts(std::vector<int32_t>(static_cast<size_t>(cache.slots), context_start), stream);
  const absl::Status status = Attention(q.view(), k.view(), v.view(), {segments.data(), 1},
                                        context_start == 0 ? nullptr : starts.data(), cache.table(),
                                        cache.pool, mask, ScaleOf(shape), Phase::kVerify, out.view(), stream);
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_TRUE(out.GuardsIntact());
  return out.ToHost();
}

HostMatrix<double> Oracle(const Sequence& sequence, int64_t start, int64_t rows, const AttentionMask& mask,
                          int64_t context_start) {
  const Shape& shape = sequence.shape;
  HostMatrix<double> out(rows, shape.QueryCols());
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      const int64_t first_column = h / (shape.heads / shape.kv_heads) * shape.dim;
      AttentionRef<double>(
          sequence.q.Row(start + t) + h * shape.dim, start + t, sequence.k.Row(context_start) + first_column,
          sequence.v.Row(context_start) + first_column, shape.KeyCols(), context_start, start + rows,
          shape.dim, mask, static_cast<double>(ScaleOf(shape)), out.Row(t) + h * shape.dim);
    }
  }
  return out;
}

std::vector<AttentionMask> Masks() {
  std::vector<AttentionMask> masks;
  for (bool causal : {true, false}) {
    for (int64_t window : {0, 1, 2, 17, 63, 64, 65, 128}) masks.push_back({causal, window});
  }
  return masks;
}

std::string Describe(const AttentionMask& mask) {
  return (mask.causal ? "causal, window " : "bidirectional, window ") + std::to_string(mask.window);
}

// Two keys, one dimension, scale 1: weights 1/4 and 3/4 for scores 0 and ln 3.
TEST(AttentionReferenceTest, LiteralValues) {
  const float q = 1, values[2] = {8, 16};
  const float keys[2] = {0, 1.0986123f};
  double out = 0;
  AttentionRef<double>(&q, 5, keys, values, 1, 4, 6, 1, {}, 1.0, &out);
  EXPECT_NEAR(out, 14, 1e-6);
  AttentionRef<double>(&q, 4, keys, values, 1, 4, 6, 1, {}, 1.0, &out);
  EXPECT_EQ(out, 8);
  AttentionRef<double>(&q, 3, keys, values, 1, 4, 6, 1, {}, 1.0, &out);
  EXPECT_EQ(out, 0);
}

// The predicate spelled out around its edges.
TEST(AttentionReferenceTest, Visibility) {
  EXPECT_TRUE(IsVisible({.causal = true, .window = 0}, 9, 0));
  EXPECT_TRUE(IsVisible({.causal = true, .window = 0}, 9, 9));
  EXPECT_FALSE(IsVisible({.causal = true, .window = 0}, 9, 10));
  EXPECT_TRUE(IsVisible({.causal = true, .window = 4}, 9, 6));
  EXPECT_FALSE(IsVisible({.causal = true, .window = 4}, 9, 5));
  EXPECT_TRUE(IsVisible({.causal = false, .window = 4}, 9, 12));
  EXPECT_FALSE(IsVisible({.causal = false, .window = 4}, 9, 13));
  EXPECT_TRUE(IsVisible({.causal = false, .window = 0}, 9, 1000));
}

class AttentionTest : public ::testing::Test {
 protected:
  Stream stream_ = Stream::Create({.threads = 2}).value();
};

TEST_F(AttentionTest, MatchesDoubleReferenceWhateverUnwrittenPagesHold) {
  uint32_t seed = 0;
  for (const Shape& shape : {Shape{2, 2, 64}, Shape{4, 2, 24}, Shape{6, 2, 5}, Shape{6, 1, 32}}) {
    for (float poison : {kNan, 1e30f}) {
      const Sequence sequence(shape, 320, ++seed, stream_);
      for (int64_t start : {0, 1, 63, 64, 65, 190}) {
        Cache cache(shape, 2, poison, stream_);
        cache.Store(sequence, 1, 0, start);
        for (int64_t rows : {0, 1, 16, 70}) {
          for (const AttentionMask& mask : Masks()) {
            SCOPED_TRACE(testing::Message() << shape.heads << "/" << shape.kv_heads << " heads, start "
                                            << start << ", rows " << rows << ", " << Describe(mask));
            ASSERT_TRUE(Near(RunStep(cache, sequence, 1, start, rows, mask, stream_),
                             Oracle(sequence, start, rows, mask, 0), OutputTolerance()));
          }
        }
      }
    }
  }
}

TEST_F(AttentionTest, ContextStartHidesEarlierPositionsAndTheirPages) {
  const Shape shape = {4, 2, 16};
  const Sequence sequence(shape, 320, 11, stream_);
  for (int64_t start : {64, 130, 192, 200}) {
    for (int64_t context_start : {1, 63, 64, 65, 127, 128, 129, 192}) {
      if (context_start > start) continue;
      Cache cache(shape, 1, kNan, stream_);
      cache.Store(sequence, 0, context_start, start);
      std::vector<int32_t> pages = cache.pages.ToHost();
      for (int64_t page = 0; page < context_start / kPageTokens; ++page)
        pages[static_cast<size_t>(page)] = -1;
      cache.pages = DeviceArray<int32_t>(pages, stream_);
      for (const AttentionMask& mask : Masks()) {
        SCOPED_TRACE(testing::Message()
                     << "start " << start << ", context " << context_start << ", " << Describe(mask));
        EXPECT_TRUE(
            Near(RunStep(cache, sequence, 0, start, 16, mask, stream_, static_cast<int32_t>(context_start)),
                 Oracle(sequence, start, 16, mask, context_start), OutputTolerance()));
      }
    }
  }
}

TEST_F(AttentionTest, WindowHidesEarlierPages) {
  const Shape shape = {4, 2, 16};
  const Sequence sequence(shape, 320, 12, stream_);
  for (int64_t start : {64, 130, 192, 200}) {
    for (const AttentionMask& mask : Masks()) {
      if (mask.window == 0) continue;
      const int64_t first_seen = std::max<int64_t>(0, start - mask.window + 1);
      Cache cache(shape, 1, kNan, stream_);
      cache.Store(sequence, 0, first_seen, start);
      std::vector<int32_t> pages = cache.pages.ToHost();
      for (int64_t page = 0; page < first_seen / kPageTokens; ++page) pages[static_cast<size_t>(page)] = -1;
      cache.pages = DeviceArray<int32_t>(pages, stream_);
      SCOPED_TRACE(testing::Message() << "start " << start << ", " << Describe(mask));
      EXPECT_TRUE(Near(RunStep(cache, sequence, 0, start, 16, mask, stream_),
                       Oracle(sequence, start, 16, mask, 0), OutputTolerance()));
    }
  }
}

// The softmax is taken relative to the best key that the row sees: not to hidden ones, and not to zero.
TEST_F(AttentionTest, ScoresFarFromZeroNeitherOverflowNorVanish) {
  const Shape shape = {2, 1, 8};
  for (float magnitude : {-60.0f, 60.0f}) {
    Sequence sequence(shape, 160, 13, stream_);
    for (float& value : sequence.q.values) value = 64;
    for (int64_t p = 0; p < 160; ++p) {
      // From -480 to +480 or back: hidden neighbours score higher than all that a row sees, or lower.
      for (int64_t d = 0; d < shape.dim; ++d)
        sequence.k.At(p, d) = magnitude * static_cast<float>(p - 80) / 80;
    }
    sequence.k = DeviceMatrix::Activations(sequence.k, stream_).ToHost();
    Cache cache(shape, 1, kNan, stream_);
    cache.Store(sequence, 0, 0, 130);
    for (const AttentionMask& mask : Masks()) {
      SCOPED_TRACE(Describe(mask));
      EXPECT_TRUE(Near(RunStep(cache, sequence, 0, 130, 16, mask, stream_),
                       Oracle(sequence, 130, 16, mask, 0), Tolerance{10 * OutputTolerance().absolute, 2e-2}));
    }
  }
}

// The keys that a row sees decide its bits: not where the step was cut, not what lies in pages, not the
// company.
TEST_F(AttentionTest, BitsDoNotDependOnWhereStepsAreCut) {
  for (const Shape& shape : {Shape{4, 2, 32}, Shape{6, 2, 20}}) {
    const Sequence sequence(shape, 320, 5, stream_);
    for (int64_t start : {0, 40, 56, 64, 120}) {
      for (const AttentionMask& mask : Masks()) {
        SCOPED_TRACE(testing::Message() << "start " << start << ", " << Describe(mask));
        const int64_t end = start + 24;
        Cache whole(shape, 1, kNan, stream_);
        whole.Store(sequence, 0, 0, start);
        const HostMatrix<float> together = RunStep(whole, sequence, 0, start, end - start, mask, stream_);
        Cache growing(shape, 1, 1e30f, stream_);
        growing.Store(sequence, 0, 0, start);
        for (int64_t cut = start; cut < end; ++cut) {
          // Predecessors have moved to pages. Causal rows may also be alone, others still see what follows.
          for (int64_t rows : {int64_t{1}, int64_t{3}, end - cut}) {
            if ((!mask.causal && rows != end - cut) || cut + rows > end) continue;
            ASSERT_TRUE(BitEqual(RunStep(growing, sequence, 0, cut, rows, mask, stream_),
                                 together.Rows(cut - start, rows)))
                << "cut " << cut << ", rows " << rows;
          }
          growing.Store(sequence, 0, cut, cut + 1);
        }
      }
    }
  }
}

// Three sequences in one step with rows of nobody between them: every row as if alone, nothing else touched.
TEST_F(AttentionTest, SegmentsOfAStepDoNotMeet) {
  const Shape shape = {4, 2, 24};
  const AttentionMask mask = {.causal = true, .window = 70};
  Cache cache(shape, 3, kNan, stream_);
  const std::vector<Segment> segments = {{2, 20, 5, 100}, {0, 1, 16, 64}, {1, 18, 0, 7}, {1, 27, 1, 0}};
  const int64_t T = 30;
  HostMatrix<float> q(T, shape.QueryCols()), k(T, shape.KeyCols()), v = k, want = q;
  for (HostMatrix<float>* m : {&q, &k, &v, &want}) std::fill(m->values.begin(), m->values.end(), kNan);
  for (const Segment& s : segments) {
    const Sequence sequence(shape, 200, 20 + static_cast<uint32_t>(s.slot), stream_);
    cache.Store(sequence, s.slot, 0, s.start_position);
    const HostMatrix<float> alone =
        RunStep(cache, sequence, s.slot, s.start_position, s.row_count, mask, stream_);
    const auto place = [&](const HostMatrix<float>& from, int64_t first, HostMatrix<float>& to) {
      std::copy_n(from.Row(first), s.row_count * from.cols, to.Row(s.first_row));
    };
    place(sequence.q, s.start_position, q);
    place(sequence.k, s.start_position, k);
    place(sequence.v, s.start_position, v);
    place(alone, 0, want);
  }
  const DeviceMatrix q_device = DeviceMatrix::Activations(q, stream_, 3);
  const DeviceMatrix k_device = DeviceMatrix::Activations(k, stream_, 5);
  const DeviceMatrix v_device = DeviceMatrix::Activations(v, stream_);
  const DeviceMatrix out = DeviceMatrix::Output(T, shape.QueryCols(), ActivationDType(), stream_, 3);
  DeviceArray<Segment> list(segments, stream_);
  ASSERT_TRUE(Attention(q_device.view(), k_device.view(), v_device.view(), {list.data(), list.size()},
                        nullptr, cache.table(), cache.pool, mask, ScaleOf(shape), Phase::kVerify, out.view(),
                        stream_)
                  .ok());
  EXPECT_TRUE(BitEqual(out.ToHost(), want));
  EXPECT_TRUE(out.GuardsIntact());
}

TEST_F(AttentionTest, StoreWritesTheAcceptedRowsAndLoadReadsThemBack) {
  const Shape shape = {2, 2, 5};
  const Sequence sequence(shape, 200, 3, stream_);
  Cache cache(shape, 2, -5, stream_);
  cache.Store(sequence, 1, 0, 60);
  DeviceArray<int32_t> accepted({7}, stream_);
  cache.Store(sequence, 1, 60, 76, accepted.data());
  const auto load = [&](int64_t slot, int64_t first, int64_t rows) {
    const DeviceMatrix k = DeviceMatrix::Output(rows, shape.KeyCols(), ActivationDType(), stream_, 1);
    const DeviceMatrix v = DeviceMatrix::Output(rows, shape.KeyCols(), ActivationDType(), stream_, 2);
    EXPECT_TRUE(LoadKeyValue(cache.pool, cache.table(), slot, first, k.view(), v.view(), stream_).ok());
    EXPECT_TRUE(k.GuardsIntact());
    EXPECT_TRUE(v.GuardsIntact());
    return std::pair(k.ToHost(), v.ToHost());
  };
  const auto [k, v] = load(1, 0, 67);
  EXPECT_TRUE(BitEqual(k, sequence.k.Rows(0, 67)));
  EXPECT_TRUE(BitEqual(v, sequence.v.Rows(0, 67)));
  const HostMatrix<float> unwritten(9, shape.KeyCols(),
                                    std::vector<float>(static_cast<size_t>(9 * shape.KeyCols()), -5));
  EXPECT_TRUE(BitEqual(load(1, 67, 9).first, unwritten));
  EXPECT_TRUE(BitEqual(load(1, 67, 9).second, unwritten));
  EXPECT_TRUE(BitEqual(load(0, 0, 9).first, unwritten));
}

// Several layers in one call, more than a launch takes: each gets its own rows.
TEST_F(AttentionTest, StoresSeveralLayers) {
  const Shape shape = {2, 2, 5};
  std::vector<Sequence> sequences;
  std::vector<Cache> caches;
  std::vector<DeviceMatrix> rows;
  std::vector<KeyValueRows> layers;
  constexpr int64_t kLayers = 19;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    sequences.emplace_back(shape, 16, 10 + layer, stream_);
    caches.emplace_back(shape, 2, -5, stream_);
    rows.push_back(DeviceMatrix::Activations(sequences.back().k, stream_, 1));
    rows.push_back(DeviceMatrix::Activations(sequences.back().v, stream_, 2));
  }
  for (size_t layer = 0; layer < kLayers; ++layer) {
    layers.push_back({rows[2 * layer].view(), rows[2 * layer + 1].view(), caches[layer].pool});
  }
  DeviceArray<Segment> segment({{1, 0, 16, 0}}, stream_);
  DeviceArray<int32_t> accepted({11}, stream_);
  ASSERT_TRUE(StoreKeyValues(layers, {segment.data(), 1}, accepted.data(), caches[0].table(), stream_).ok());
  for (size_t layer = 0; layer < kLayers; ++layer) {
    const DeviceMatrix k = DeviceMatrix::Output(11, shape.KeyCols(), ActivationDType(), stream_);
    const DeviceMatrix v = DeviceMatrix::Output(11, shape.KeyCols(), ActivationDType(), stream_);
    ASSERT_TRUE(LoadKeyValue(caches[layer].pool, caches[0].table(), 1, 0, k.view(), v.view(), stream_).ok());
    ASSERT_TRUE(BitEqual(k.ToHost(), sequences[layer].k.Rows(0, 11))) << layer;
    ASSERT_TRUE(BitEqual(v.ToHost(), sequences[layer].v.Rows(0, 11))) << layer;
  }
}

// With a gate: the bits of Attention and SigmoidGate, whether rows have one split, several or none; odd
// columns and addresses.
TEST_F(AttentionTest, GateHasTheBitsOfSigmoidGate) {
  for (const Shape& shape : {Shape{4, 2, 16}, Shape{6, 2, 5}, Shape{4, 1, 128}, Shape{6, 1, 256}}) {
    for (int64_t unaligned = 0; unaligned < 4; ++unaligned) {  // 1: out, 2: gate
      Cache cache(shape, 3, kNan, stream_);
      // The last segment sees nothing of its context; rows 21 and 22 are nobody's.
      const std::vector<Segment> segments = {{2, 0, 16, 350}, {0, 16, 5, 61}, {1, 23, 2, 0}};
      const int64_t T = 25;
      HostMatrix<float> q(T, shape.QueryCols()), k(T, shape.KeyCols()), v = k;
      for (HostMatrix<float>* m : {&q, &k, &v}) std::fill(m->values.begin(), m->values.end(), kNan);
      for (const Segment& s : segments) {
        const Sequence sequence(shape, 370, 40 + static_cast<uint32_t>(s.slot), stream_);
        cache.Store(sequence, s.slot, 0, s.start_position);
        const auto place = [&](const HostMatrix<float>& from, HostMatrix<float>& to) {
          std::copy_n(from.Row(s.start_position), s.row_count * from.cols, to.Row(s.first_row));
        };
        place(sequence.q, q);
        place(sequence.k, k);
        place(sequence.v, v);
      }
      const DeviceMatrix q_device = DeviceMatrix::Activations(q, stream_, 8),
                         k_device = DeviceMatrix::Activations(k, stream_),
                         v_device = DeviceMatrix::Activations(v, stream_);
      const DeviceMatrix gate = DeviceMatrix::Activations(
          RandomMatrix<float>(T, shape.QueryCols(), 77, -6, 6), stream_, unaligned / 2);
      DeviceArray<Segment> list(segments, stream_);
      for (Phase phase : {Phase::kVerify, Phase::kPrefill}) {
        for (const AttentionMask& mask : {AttentionMask{true, 0}, AttentionMask{true, 70}}) {
          SCOPED_TRACE(testing::Message()
                       << shape.heads << "/" << shape.kv_heads << " x " << shape.dim << ", " << Describe(mask)
                       << ", unaligned " << unaligned << ", phase " << static_cast<int>(phase));
          const auto run = [&](ConstMatrixView with) {
            const DeviceMatrix out =
                DeviceMatrix::Output(T, shape.QueryCols(), ActivationDType(), stream_, unaligned % 2);
            EXPECT_TRUE(Attention(q_device.view(), k_device.view(), v_device.view(),
                                  {list.data(), list.size()}, nullptr, cache.table(), cache.pool, mask,
                                  ScaleOf(shape), phase, out.view(), stream_, ContextWritten::kAnyTime, with)
                            .ok());
            if (with.data == nullptr) {
              EXPECT_TRUE(SigmoidGate(out.view(), gate.view(), stream_).ok());
            }
            EXPECT_TRUE(out.GuardsIntact());
            return out.ToHost();
          };
          const HostMatrix<float> want = run({}), got = run(gate.view());
          for (const Segment& s : segments) {
            EXPECT_TRUE(BitEqual(got.Rows(s.first_row, s.row_count), want.Rows(s.first_row, s.row_count)))
                << "slot " << s.slot;
          }
        }
      }
    }
  }
}

TEST_F(AttentionTest, RefusesShapesThatDisagree) {
  const Shape shape = {4, 2, 8};
  Cache cache(shape, 1, 0, stream_);
  DeviceArray<Segment> segment({{0, 0, 2, 10}}, stream_);
  const auto activations = [&](int64_t rows, int64_t cols) {
    return DeviceMatrix::Activations(HostMatrix<float>(rows, cols), stream_);
  };
  const DeviceMatrix good_k = activations(2, 16), long_k = activations(3, 16), wide_k = activations(2, 24);
  const DeviceMatrix out = activations(2, 32);
  const auto run = [&](const DeviceMatrix& q, const DeviceMatrix& k, AttentionMask mask, float scale,
                       SegmentList list) {
    return Attention(q.view(), k.view(), good_k.view(), list, nullptr, cache.table(), cache.pool, mask, scale,
                     Phase::kVerify, out.view(), stream_)
        .code();
  };
  const SegmentList list = {segment.data(), 1};
  const DeviceMatrix q = activations(2, 32), three_heads = activations(2, 24), long_q = activations(3, 32);
  EXPECT_EQ(run(q, good_k, {}, 1, list), absl::StatusCode::kOk);
  EXPECT_EQ(run(three_heads, good_k, {}, 1, list), kBad);
  EXPECT_EQ(run(long_q, good_k, {}, 1, list), kBad);
  EXPECT_EQ(run(q, long_k, {}, 1, list), kBad);
  EXPECT_EQ(run(q, wide_k, {}, 1, list), kBad);
  EXPECT_EQ(run(q, good_k, {.causal = true, .window = -1}, 1, list), kBad);
  EXPECT_EQ(run(q, good_k, {}, 0, list), kBad);
  EXPECT_EQ(run(q, good_k, {}, 1, {nullptr, 1}), kBad);
  const auto gated = [&](const DeviceMatrix& gate) {
    return Attention(q.view(), good_k.view(), good_k.view(), list, nullptr, cache.table(), cache.pool, {}, 1,
                     Phase::kVerify, out.view(), stream_, ContextWritten::kAnyTime, gate.view())
        .code();
  };
  EXPECT_EQ(gated(q), absl::StatusCode::kOk);
  EXPECT_EQ(gated(three_heads), kBad);
  EXPECT_EQ(gated(long_q), kBad);
  const auto store = [&](const DeviceMatrix& k) {
    return StoreKeyValue(k.view(), good_k.view(), list, nullptr, cache.table(), cache.pool, stream_).code();
  };
  EXPECT_EQ(store(good_k), absl::StatusCode::kOk);
  EXPECT_EQ(store(wide_k), kBad);
  const auto load = [&](int64_t slot, int64_t first) {
    return LoadKeyValue(cache.pool, cache.table(), slot, first, good_k.view(), good_k.view(), stream_).code();
  };
  EXPECT_EQ(load(0, 0), absl::StatusCode::kOk);
  EXPECT_EQ(load(1, 0), kBad);
  EXPECT_EQ(load(0, -1), kBad);
  EXPECT_EQ(load(0, Cache::kPagesPerSlot * kPageTokens - 1), kBad);
  cache.pool.kv_heads = 0;
  EXPECT_EQ(run(q, good_k, {}, 1, list), kBad);
  EXPECT_TRUE(stream_.Synchronize().ok());
}

}  // namespace
}  // namespace dflash
