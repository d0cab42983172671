#include "kernels/attention/attention.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/attention/attention_ref.h"
#include "kernels/device/buffer.h"
#include "kernels/device/cpu/instruction_set.h"

namespace dflash {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Stream MakeStream(int threads) { return Stream::Create({.threads = threads}).value(); }

std::vector<float> Random(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

struct Shape {
  int64_t heads, kv_heads, dim;
  int64_t QueryCols() const { return heads * dim; }
  int64_t KeyCols() const { return kv_heads * dim; }
};

// All positions of a sequence: what a step is cut from.
struct Sequence {
  Sequence(const Shape& shape, int64_t length, uint32_t seed)
      : shape(shape),
        q(Random(length * shape.QueryCols(), 3 * seed)),
        k(Random(length * shape.KeyCols(), 3 * seed + 1)),
        v(Random(length * shape.KeyCols(), 3 * seed + 2)) {}

  Shape shape;
  std::vector<float> q, k, v;
};

// Pages in shuffled order, all bytes `poison` until written.
struct Cache {
  static constexpr int64_t kPagesPerSlot = 6;

  Cache(const Shape& shape, int64_t slots, float poison) : stream(MakeStream(1)) {
    pool = {.page_count = slots * kPagesPerSlot, .kv_heads = shape.kv_heads, .head_dim = shape.dim};
    memory = Buffer::Allocate(pool.page_count * pool.PageBytes(), stream).value();
    pool.data = memory.data();
    std::fill_n(memory.As<float>(), memory.bytes() / 4, poison);
    pages.resize(static_cast<size_t>(pool.page_count));
    for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(i);
    std::shuffle(pages.begin(), pages.end(), std::mt19937(7));
  }
  PageTable table() const {
    return {pages.data(), static_cast<int64_t>(pages.size()) / kPagesPerSlot, kPagesPerSlot};
  }
  // Writes positions [begin, end) of the sequence into the pages of the slot.
  void Store(const Sequence& sequence, int64_t slot, int64_t begin, int64_t end) {
    const int64_t cols = sequence.shape.KeyCols(), rows = end - begin;
    const Segment segment = {static_cast<int32_t>(slot), 0, static_cast<int32_t>(rows),
                             static_cast<int32_t>(begin)};
    ASSERT_TRUE(StoreKeyValue(ConstMatrixView(sequence.k.data() + begin * cols, rows, cols),
                              ConstMatrixView(sequence.v.data() + begin * cols, rows, cols), {&segment, 1},
                              nullptr, table(), pool, stream)
                    .ok());
  }

  Stream stream;
  KeyValuePool pool;
  Buffer memory;
  std::vector<int32_t> pages;
};

float ScaleOf(const Shape& shape) { return 1.0f / std::sqrt(static_cast<float>(shape.dim)); }

// One step of one sequence: rows at [start, start + rows) over a cache that holds [0, start).
std::vector<float> RunStep(const Cache& cache, const Sequence& sequence, int64_t slot, int64_t start,
                           int64_t rows, const AttentionMask& mask, const Stream& stream,
                           int32_t context_start = 0) {
  const Shape& shape = sequence.shape;
  const Segment segment = {static_cast<int32_t>(slot), 0, static_cast<int32_t>(rows),
                           static_cast<int32_t>(start)};
  const std::vector<int32_t> starts(static_cast<size_t>(cache.table().slots), context_start);
  std::vector<float> out(static_cast<size_t>(rows * shape.QueryCols()), kNan);
  const absl::Status status =
      Attention(ConstMatrixView(sequence.q.data() + start * shape.QueryCols(), rows, shape.QueryCols()),
                ConstMatrixView(sequence.k.data() + start * shape.KeyCols(), rows, shape.KeyCols()),
                ConstMatrixView(sequence.v.data() + start * shape.KeyCols(), rows, shape.KeyCols()),
                {&segment, 1}, starts.data(), cache.table(), cache.pool, mask, ScaleOf(shape),
                MatrixView(out.data(), rows, shape.QueryCols()), stream);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return out;
}

std::vector<double> Oracle(const Sequence& sequence, int64_t start, int64_t rows, const AttentionMask& mask,
                           int64_t context_start) {
  const Shape& shape = sequence.shape;
  std::vector<double> out(static_cast<size_t>(rows * shape.QueryCols()));
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      const int64_t kv_head = h / (shape.heads / shape.kv_heads);
      AttentionRef<double>(sequence.q.data() + ((start + t) * shape.heads + h) * shape.dim, start + t,
                           sequence.k.data() + (context_start * shape.kv_heads + kv_head) * shape.dim,
                           sequence.v.data() + (context_start * shape.kv_heads + kv_head) * shape.dim,
                           shape.KeyCols(), context_start, start + rows, shape.dim, mask, ScaleOf(shape),
                           out.data() + (t * shape.heads + h) * shape.dim);
    }
  }
  return out;
}

void ExpectNear(const std::vector<float>& got, const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 2e-6 + 2e-6 * std::abs(want[i])) << i;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
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

TEST(AttentionTest, MatchesDoubleReferenceWhateverUnwrittenPagesHold) {
  const Stream stream = MakeStream(2);
  uint32_t seed = 0;
  for (const Shape& shape : {Shape{2, 2, 64}, Shape{4, 2, 24}, Shape{6, 2, 5}, Shape{6, 1, 32}}) {
    for (float poison : {kNan, 1e30f}) {
      const Sequence sequence(shape, 320, ++seed);
      for (int64_t start : {0, 1, 63, 64, 65, 190}) {
        Cache cache(shape, 2, poison);
        cache.Store(sequence, 1, 0, start);
        for (int64_t rows : {1, 16, 70}) {
          for (const AttentionMask& mask : Masks()) {
            SCOPED_TRACE(testing::Message() << shape.heads << "/" << shape.kv_heads << " heads, start "
                                            << start << ", rows " << rows << ", " << Describe(mask));
            ExpectNear(RunStep(cache, sequence, 1, start, rows, mask, stream),
                       Oracle(sequence, start, rows, mask, 0));
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(AttentionTest, ContextStartHidesEarlierPositionsAndTheirPages) {
  const Shape shape = {4, 2, 16};
  const Stream stream = MakeStream(1);
  const Sequence sequence(shape, 320, 11);
  for (int64_t start : {64, 130, 192, 200}) {
    for (int64_t context_start : {1, 63, 64, 65, 127, 128, 129, 192}) {
      if (context_start > start) continue;
      Cache cache(shape, 1, kNan);
      cache.Store(sequence, 0, context_start, start);
      for (int64_t page = 0; page < context_start / kPageTokens; ++page)
        cache.pages[static_cast<size_t>(page)] = -1;
      for (const AttentionMask& mask : Masks()) {
        SCOPED_TRACE(testing::Message()
                     << "start " << start << ", context " << context_start << ", " << Describe(mask));
        ExpectNear(RunStep(cache, sequence, 0, start, 16, mask, stream, static_cast<int32_t>(context_start)),
                   Oracle(sequence, start, 16, mask, context_start));
      }
    }
  }
}

// The keys that a row sees decide its bits: not where the step was cut, not what lies in pages, not the
// company.
TEST(AttentionTest, BitsDoNotDependOnWhereStepsAreCut) {
  const Stream stream = MakeStream(2);
  for (const Shape& shape : {Shape{4, 2, 32}, Shape{6, 2, 20}}) {
    const Sequence sequence(shape, 320, 5);
    const int64_t row = shape.QueryCols();
    for (int64_t start : {0, 40, 56, 64, 120}) {
      for (const AttentionMask& mask : Masks()) {
        SCOPED_TRACE(testing::Message() << "start " << start << ", " << Describe(mask));
        const int64_t end = start + 24;
        Cache whole(shape, 1, kNan);
        whole.Store(sequence, 0, 0, start);
        const std::vector<float> together = RunStep(whole, sequence, 0, start, end - start, mask, stream);
        Cache growing(shape, 1, 1e30f);
        growing.Store(sequence, 0, 0, start);
        for (int64_t cut = start; cut < end; ++cut) {
          // Predecessors have moved to pages. Causal rows may also be alone, others still see what follows.
          for (int64_t rows : {int64_t{1}, int64_t{3}, end - cut}) {
            if ((!mask.causal && rows != end - cut) || cut + rows > end) continue;
            const std::vector<float> part = RunStep(growing, sequence, 0, cut, rows, mask, stream);
            ASSERT_EQ(std::memcmp(part.data(), together.data() + (cut - start) * row,
                                  static_cast<size_t>(rows * row) * sizeof(float)),
                      0)
                << "cut " << cut << ", rows " << rows;
          }
          growing.Store(sequence, 0, cut, cut + 1);
        }
      }
    }
  }
}

TEST(AttentionTest, BitsDoNotDependOnThreadsOrInstructions) {
  const InstructionSet before = CurrentInstructionSet();
  for (const Shape& shape : {Shape{6, 2, 64}, Shape{3, 1, 37}}) {
    const Sequence sequence(shape, 320, 9);
    Cache cache(shape, 1, kNan);
    cache.Store(sequence, 0, 0, 100);
    for (const AttentionMask& mask : Masks()) {
      std::vector<float> first;
      for (InstructionSet set : {InstructionSet::kScalar, InstructionSet::kAvx2, InstructionSet::kAvx512}) {
        if (!SetInstructionSet(set).ok()) continue;  // not on this machine
        for (int threads : {1, 2, 3}) {
          const std::vector<float> out = RunStep(cache, sequence, 0, 100, 33, mask, MakeStream(threads));
          if (first.empty()) first = out;
          EXPECT_TRUE(SameBits(out, first)) << Name(set) << ", " << threads << " threads, " << Describe(mask);
        }
      }
    }
  }
  ASSERT_TRUE(SetInstructionSet(before).ok());
}

// Three sequences in one step, rows apart and in strided views; every row as if alone, nothing else touched.
TEST(AttentionTest, SegmentsOfAStepDoNotMeet) {
  const Shape shape = {4, 2, 24};
  const Stream stream = MakeStream(3);
  const AttentionMask mask = {.causal = true, .window = 70};
  Cache cache(shape, 3, kNan);
  std::vector<Sequence> sequences;
  const std::vector<Segment> segments = {{2, 20, 5, 100}, {0, 1, 16, 64}, {1, 18, 0, 7}, {1, 27, 1, 0}};
  for (uint32_t i = 0; i < 3; ++i) sequences.emplace_back(shape, 200, 20 + i);
  const int64_t T = 30, q_stride = shape.QueryCols() + 3, k_stride = shape.KeyCols() + 5;
  std::vector<float> q(static_cast<size_t>(T * q_stride), kNan), k(static_cast<size_t>(T * k_stride), kNan),
      v = k;
  constexpr float kGuard = -77;
  std::vector<float> out(static_cast<size_t>(T * q_stride), kGuard), want = out;
  for (const Segment& s : segments) {
    const Sequence& sequence = sequences[static_cast<size_t>(s.slot)];
    if (s.row_count == 0) continue;
    cache.Store(sequence, s.slot, 0, s.start_position);
    const std::vector<float> alone =
        RunStep(cache, sequence, s.slot, s.start_position, s.row_count, mask, stream);
    for (int64_t t = 0; t < s.row_count; ++t) {
      const int64_t p = s.start_position + t, r = s.first_row + t;
      std::copy_n(sequence.q.data() + p * shape.QueryCols(), shape.QueryCols(), q.data() + r * q_stride);
      std::copy_n(sequence.k.data() + p * shape.KeyCols(), shape.KeyCols(), k.data() + r * k_stride);
      std::copy_n(sequence.v.data() + p * shape.KeyCols(), shape.KeyCols(), v.data() + r * k_stride);
      std::copy_n(alone.data() + t * shape.QueryCols(), shape.QueryCols(), want.data() + r * q_stride);
    }
  }
  ASSERT_TRUE(Attention(ConstMatrixView(q.data(), DType::kF32, T, shape.QueryCols(), q_stride),
                        ConstMatrixView(k.data(), DType::kF32, T, shape.KeyCols(), k_stride),
                        ConstMatrixView(v.data(), DType::kF32, T, shape.KeyCols(), k_stride),
                        {segments.data(), static_cast<int64_t>(segments.size())}, nullptr, cache.table(),
                        cache.pool, mask, ScaleOf(shape),
                        MatrixView(out.data(), DType::kF32, T, shape.QueryCols(), q_stride), stream)
                  .ok());
  EXPECT_TRUE(SameBits(out, want));
}

TEST(AttentionTest, StoreWritesTheAcceptedRowsAndLoadReadsThemBack) {
  const Shape shape = {2, 2, 5};
  const Stream stream = MakeStream(2);
  const Sequence sequence(shape, 200, 3);
  Cache cache(shape, 2, -5);
  cache.Store(sequence, 1, 0, 60);
  const Segment segment = {1, 0, 16, 60};
  const int32_t accepted = 7;
  const int64_t cols = shape.KeyCols();
  ASSERT_TRUE(StoreKeyValue(ConstMatrixView(sequence.k.data() + 60 * cols, 16, cols),
                            ConstMatrixView(sequence.v.data() + 60 * cols, 16, cols), {&segment, 1},
                            &accepted, cache.table(), cache.pool, stream)
                  .ok());
  std::vector<float> k(static_cast<size_t>(76 * cols)), v(k.size());
  ASSERT_TRUE(LoadKeyValue(cache.pool, cache.table(), 1, 0, MatrixView(k.data(), 76, cols),
                           MatrixView(v.data(), 76, cols), stream)
                  .ok());
  for (int64_t i = 0; i < 76 * cols; ++i) {
    const auto at = static_cast<size_t>(i);
    ASSERT_EQ(k[at], i < 67 * cols ? sequence.k[at] : -5) << i;
    ASSERT_EQ(v[at], i < 67 * cols ? sequence.v[at] : -5) << i;
  }
  std::vector<float> other(static_cast<size_t>(cols));
  ASSERT_TRUE(LoadKeyValue(cache.pool, cache.table(), 0, 0, MatrixView(other.data(), 1, cols),
                           MatrixView(other.data(), 1, cols), stream)
                  .ok());
  EXPECT_EQ(other[0], -5);
}

TEST(AttentionTest, RefusesShapesThatDisagree) {
  const Shape shape = {4, 2, 8};
  const Stream stream = MakeStream(1);
  const Sequence s(shape, 80, 3);
  Cache cache(shape, 1, 0);
  std::vector<float> out(static_cast<size_t>(80 * shape.QueryCols()));
  const auto run = [&](int64_t q_cols, int64_t k_rows, Segment segment, AttentionMask mask, PageTable table) {
    return Attention(ConstMatrixView(s.q.data(), 2, q_cols), ConstMatrixView(s.k.data(), k_rows, 16),
                     ConstMatrixView(s.v.data(), k_rows, 16), {&segment, 1}, nullptr, table, cache.pool, mask,
                     1.0f, MatrixView(out.data(), 2, q_cols), stream)
        .code();
  };
  constexpr auto kBad = absl::StatusCode::kInvalidArgument;
  const Segment good = {0, 0, 2, 10};
  EXPECT_EQ(run(32, 2, good, {}, cache.table()), absl::StatusCode::kOk);
  EXPECT_EQ(run(24, 2, good, {}, cache.table()), kBad);  // three heads on two
  EXPECT_EQ(run(32, 3, good, {}, cache.table()), kBad);
  EXPECT_EQ(run(32, 2, {1, 0, 2, 10}, {}, cache.table()), kBad);
  EXPECT_EQ(run(32, 2, {0, 1, 2, 10}, {}, cache.table()), kBad);
  EXPECT_EQ(run(32, 2, good, {.causal = true, .window = -1}, cache.table()), kBad);
  EXPECT_EQ(run(32, 2, {0, 0, 2, 64 * Cache::kPagesPerSlot + 1}, {}, cache.table()),
            kBad);  // beyond its pages
  cache.pages[0] = -1;
  EXPECT_EQ(run(32, 2, good, {}, cache.table()), kBad);
  EXPECT_EQ(StoreKeyValue(ConstMatrixView(s.k.data(), 2, 16), ConstMatrixView(s.v.data(), 2, 16), {&good, 1},
                          nullptr, cache.table(), cache.pool, stream)
                .code(),
            kBad);
  EXPECT_EQ(LoadKeyValue(cache.pool, cache.table(), 0, 10, MatrixView(out.data(), 2, 16),
                         MatrixView(out.data(), 2, 16), stream)
                .code(),
            kBad);
}

}  // namespace
}  // namespace dflash
