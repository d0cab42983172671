// What the GPU adds to attention_test.cc: the models' shapes, splits of all sizes, tiles done whole and in
// parts, captured launches.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/attention_ref.h"
#include "kernels/attention/attention_splits_cuda.h"
#include "kernels/device/buffer.h"
#include "kernels/device/graph.h"
#include "kernels/rope/rope.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"
#include "kernels/testing/replay.h"

namespace dflash {
namespace {

struct Shape {
  int64_t heads, kv_heads, dim;
  float Scale() const { return 1.0f / std::sqrt(static_cast<float>(dim)); }
};
constexpr Shape kTarget = {24, 4, 256}, kDrafter = {32, 8, 128}, kTiny = {4, 2, 64}, kTinyThree = {6, 2, 64},
                kLargeGroup = {100, 1, 128}, kLargerGroup = {130, 1, 128};

// Weights are rounded to bf16 one by one: relative to the sum of |weight value|.
constexpr Tolerance kTolerance = {4e-3, 8e-3};

HostMatrix<float> RandomActivations(int64_t rows, int64_t cols, uint32_t seed, float limit,
                                    const Stream& stream) {
  return DeviceMatrix::Activations(RandomMatrix<float>(rows, cols, seed, -limit, limit), stream).ToHost();
}

// One sequence, its keys and values also in pages (all positions; the pages' unwritten rest is NaN).
class Sequence {
 public:
  Sequence(const Shape& shape, int64_t length, uint32_t seed, const Stream& stream)
      : shape(shape),
        q(RandomActivations(length, shape.heads * shape.dim, 3 * seed, 4, stream)),
        k(RandomActivations(length, shape.kv_heads * shape.dim, 3 * seed + 1, 1, stream)),
        v(RandomActivations(length, shape.kv_heads * shape.dim, 3 * seed + 2, 1, stream)),
        q_device(DeviceMatrix::Activations(q, stream)),
        k_device(DeviceMatrix::Activations(k, stream)),
        v_device(DeviceMatrix::Activations(v, stream)) {}

  Shape shape;
  HostMatrix<float> q, k, v;
  DeviceMatrix q_device, k_device, v_device;
};

class AttentionCudaTest : public ::testing::Test {
 protected:
  // Pages for several sequences of a length, in shuffled order, written up to their whole length.
  struct Cache {
    KeyValuePool pool;
    Buffer memory;
    DeviceArray<int32_t> pages;
    int64_t slots, pages_per_slot;
    PageTable table() { return {pages.data(), slots, pages_per_slot}; }
  };
  Cache MakeCache(const Shape& shape, int64_t slots, int64_t length) {
    const int64_t pages_per_slot = (length + kPageTokens - 1) / kPageTokens;
    std::vector<int32_t> order(static_cast<size_t>(slots * pages_per_slot));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(7));
    Cache cache = {{.page_count = slots * pages_per_slot, .kv_heads = shape.kv_heads, .head_dim = shape.dim},
                   {},
                   DeviceArray<int32_t>(order, stream_),
                   slots,
                   pages_per_slot};
    cache.memory = Buffer::Allocate(cache.pool.page_count * cache.pool.PageBytes(), stream_).value();
    cache.pool.data = cache.memory.data();
    const std::vector<uint8_t> poison(static_cast<size_t>(cache.memory.bytes()), 0xff);
    EXPECT_TRUE(CopyToDevice(cache.memory.data(), poison.data(), cache.memory.bytes(), stream_).ok());
    EXPECT_TRUE(stream_.Synchronize().ok());
    return cache;
  }
  void Store(Cache& cache, const Sequence& s, int32_t slot, int64_t begin, int64_t end) {
    const auto rows = static_cast<int32_t>(end - begin);
    DeviceArray<Segment> segment({{slot, 0, rows, static_cast<int32_t>(begin)}}, stream_);
    ASSERT_TRUE(StoreKeyValue(s.k_device.view().Rows(begin, rows), s.v_device.view().Rows(begin, rows),
                              {segment.data(), 1}, nullptr, cache.table(), cache.pool, stream_)
                    .ok());
    ASSERT_TRUE(stream_.Synchronize().ok());
  }
  // Rows [start, start + rows) of a sequence whose pages hold at least what is before.
  HostMatrix<float> Run(Cache& cache, const Sequence& s, int32_t slot, int64_t start, int64_t rows,
                        const AttentionMask& mask, Phase phase = Phase::kVerify) {
    DeviceArray<Segment> segment({{slot, 0, static_cast<int32_t>(rows), static_cast<int32_t>(start)}},
                                 stream_);
    const DeviceMatrix out = DeviceMatrix::Output(rows, s.q.cols, DType::kBf16, stream_);
    const absl::Status status =
        Attention(s.q_device.view().Rows(start, rows), s.k_device.view().Rows(start, rows),
                  s.v_device.view().Rows(start, rows), {segment.data(), 1}, nullptr, cache.table(),
                  cache.pool, mask, s.shape.Scale(), phase, out.view(), stream_);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(out.GuardsIntact());
    return out.ToHost();
  }
  // The same rows once for each of the slots, in one step with a row of nobody before every segment; behind a
  // NormAndRope of something else, whose end is not waited for. Without the rows of nobody.
  HostMatrix<float> RunAfter(Cache& cache, const Sequence& s, const std::vector<int32_t>& slots,
                             int64_t start, int64_t rows, const AttentionMask& mask, int32_t context_start) {
    const int64_t step = rows + 1, T = step * static_cast<int64_t>(slots.size());
    HostMatrix<float> q(T, s.q.cols), k(T, s.k.cols), v(T, s.v.cols);
    for (HostMatrix<float>* m : {&q, &k, &v}) {
      std::fill(m->values.begin(), m->values.end(), std::numeric_limits<float>::quiet_NaN());
    }
    std::vector<Segment> segments;
    for (const int32_t slot : slots) {
      const auto row = static_cast<int32_t>(step * static_cast<int64_t>(segments.size()) + 1);
      segments.push_back({slot, row, static_cast<int32_t>(rows), static_cast<int32_t>(start)});
      std::copy_n(s.q.Row(start), rows * q.cols, q.Row(row));
      std::copy_n(s.k.Row(start), rows * k.cols, k.Row(row));
      std::copy_n(s.v.Row(start), rows * v.cols, v.Row(row));
    }
    const DeviceMatrix q_device = DeviceMatrix::Activations(q, stream_),
                       k_device = DeviceMatrix::Activations(k, stream_),
                       v_device = DeviceMatrix::Activations(v, stream_);
    const DeviceMatrix other_q = DeviceMatrix::Activations(q, stream_),
                       other_k = DeviceMatrix::Activations(k, stream_),
                       norm = DeviceMatrix::Activations(HostMatrix<float>(1, s.shape.dim), stream_);
    const DeviceMatrix out = DeviceMatrix::Output(T, s.q.cols, DType::kBf16, stream_);
    DeviceArray<Segment> list(segments, stream_);
    DeviceArray<int32_t> starts(std::vector<int32_t>(static_cast<size_t>(cache.slots), context_start),
                                stream_);
    EXPECT_TRUE(NormAndRope(other_q.view(), norm.view(), other_k.view(), norm.view(), NormWeight::kOnePlus,
                            1e-6f, {s.shape.dim, 64, 1e7}, {list.data(), list.size()}, stream_)
                    .ok());
    EXPECT_TRUE(Attention(q_device.view(), k_device.view(), v_device.view(), {list.data(), list.size()},
                          starts.data(), cache.table(), cache.pool, mask, s.shape.Scale(), Phase::kVerify,
                          out.view(), stream_, ContextWritten::kBeforeLastNormAndRope)
                    .ok());
    EXPECT_TRUE(out.GuardsIntact());
    const HostMatrix<float> all = out.ToHost();
    HostMatrix<float> seen(rows * static_cast<int64_t>(slots.size()), all.cols);
    for (size_t i = 0; i < segments.size(); ++i) {
      EXPECT_TRUE(std::isnan(all.At(segments[i].first_row - 1, 0)));
      std::copy_n(all.Row(segments[i].first_row), rows * all.cols, seen.Row(static_cast<int64_t>(i) * rows));
    }
    return seen;
  }
  static HostMatrix<double> Oracle(const Sequence& s, int64_t start, int64_t rows,
                                   const AttentionMask& mask) {
    return Oracle(s, s.k, s.v, start, rows, mask, 0);
  }
  // With other keys and values, from `first` on.
  static HostMatrix<double> Oracle(const Sequence& s, const HostMatrix<float>& k, const HostMatrix<float>& v,
                                   int64_t start, int64_t rows, const AttentionMask& mask, int64_t first) {
    HostMatrix<double> out(rows, s.q.cols);
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t h = 0; h < s.shape.heads; ++h) {
        const int64_t column = h / (s.shape.heads / s.shape.kv_heads) * s.shape.dim;
        AttentionRef<double>(s.q.Row(start + t) + h * s.shape.dim, start + t, k.Row(first) + column,
                             v.Row(first) + column, k.cols, first, start + rows, s.shape.dim, mask,
                             static_cast<double>(s.shape.Scale()), out.Row(t) + h * s.shape.dim);
      }
    }
    return out;
  }

  Stream stream_ = *Stream::Create({});
};

TEST(SplitScheduleTest, SplitsCoverAllBlocksInOrder) {
  for (SplitKind kind : {SplitKind::kVerify, SplitKind::kWindowed, SplitKind::kPrefill}) {
    const SplitSchedule schedule = {kind};
    for (int32_t block = 0; block < 5000; ++block) {
      const int32_t split = schedule.SplitOf(block);
      ASSERT_LE(schedule.FirstBlock(split), block);
      ASSERT_GT(schedule.FirstBlock(split + 1), block);
      ASSERT_TRUE(block == 0 || split == schedule.SplitOf(block - 1) ||
                  split == schedule.SplitOf(block - 1) + 1);
    }
  }
  const SplitSchedule verify = {SplitKind::kVerify};
  EXPECT_EQ(verify.SplitOf(31), 7);
  EXPECT_EQ(verify.SplitOf(127), 19);
  EXPECT_EQ(verify.SplitOf(255), 35);
  EXPECT_EQ(verify.SplitOf(256), 36);
  EXPECT_EQ(SplitSchedule{SplitKind::kWindowed}.SplitOf(512), 128);
  EXPECT_EQ(SplitSchedule{SplitKind::kPrefill}.SplitOf(512), 8);
}

TEST_F(AttentionCudaTest, MatchesDoubleReferenceAtTheModelsShapes) {
  struct Case {
    Shape shape;
    int64_t start, rows;
    AttentionMask mask;
  };
  for (const Case& c : {Case{kTarget, 0, 1, {}},
                        {kTarget, 37, 16, {}},
                        {kTarget, 1000, 16, {}},
                        {kTarget, 2040, 1, {}},
                        {kTarget, 100, 70, {}},
                        {kTarget, 3000, 7, {}},
                        {kLargeGroup, 70, 3, {}},
                        {kLargerGroup, 70, 3, {}},
                        {kDrafter, 0, 16, {false, 0}},
                        {kDrafter, 700, 16, {false, 0}},
                        {kDrafter, 2500, 16, {true, 2048}},
                        {kDrafter, 2500, 16, {false, 2048}},
                        {kTiny, 5000, 16, {}},
                        {kTinyThree, 900, 33, {true, 64}}}) {
    SCOPED_TRACE(testing::Message() << c.shape.dim << " x " << c.shape.heads << "/" << c.shape.kv_heads
                                    << " at " << c.start << ", rows " << c.rows << ", window "
                                    << c.mask.window);
    const Sequence s(c.shape, c.start + c.rows, 1, stream_);
    Cache cache = MakeCache(c.shape, 1, s.q.rows);
    Store(cache, s, 0, 0, c.start);
    const HostMatrix<double> want = Oracle(s, c.start, c.rows, c.mask);
    for (Phase phase : {Phase::kVerify, Phase::kPrefill}) {
      EXPECT_TRUE(Near(Run(cache, s, 0, c.start, c.rows, c.mask, phase), want, kTolerance))
          << (phase == Phase::kVerify ? "verify" : "prefill");
    }
  }
}

// Rows at odd addresses go through the kernel for every device, with tiles of all three sizes.
TEST_F(AttentionCudaTest, UnalignedRowsMatchDoubleReferenceAtTheModelsShapes) {
  for (const Shape& shape : {kTarget, kDrafter}) {
    for (int64_t rows : {1, 5, 9, 16}) {
      SCOPED_TRACE(testing::Message()
                   << shape.dim << " x " << shape.heads << "/" << shape.kv_heads << ", rows " << rows);
      constexpr int64_t kStart = 700;
      const Sequence s(shape, kStart + rows, 5, stream_);
      Cache cache = MakeCache(shape, 1, s.q.rows);
      Store(cache, s, 0, 0, kStart);
      const auto shifted = [&](const HostMatrix<float>& x) {
        return DeviceMatrix::Activations(x.Rows(kStart, rows), stream_, /*extra_stride=*/1);
      };
      const DeviceMatrix q = shifted(s.q), k = shifted(s.k), v = shifted(s.v);
      DeviceArray<Segment> segment({{0, 0, static_cast<int32_t>(rows), kStart}}, stream_);
      const DeviceMatrix out = DeviceMatrix::Output(rows, s.q.cols, DType::kBf16, stream_, 1);
      ASSERT_TRUE(CaptureAndReplay(stream_, [&] {
                    return Attention(q.view(), k.view(), v.view(), {segment.data(), 1}, nullptr,
                                     cache.table(), cache.pool, {}, shape.Scale(), Phase::kVerify, out.view(),
                                     stream_);
                  }).ok());
      EXPECT_TRUE(Near(out.ToHost(), Oracle(s, kStart, rows, {}), kTolerance));
      EXPECT_TRUE(out.GuardsIntact());
    }
  }
}

// Splits of all sizes.
TEST_F(AttentionCudaTest, MatchesDoubleReferenceFarOut) {
  for (const Shape& shape : {Shape{2, 1, 64}, {2, 1, 128}, {2, 1, 256}}) {
    for (Phase phase : {Phase::kVerify, Phase::kPrefill}) {
      SCOPED_TRACE(testing::Message() << shape.dim << (phase == Phase::kVerify ? " verify" : " prefill"));
      const int32_t start = shape.dim == 256 ? 20000 : 40000;
      const Sequence s(shape, start + 3, 2, stream_);
      Cache cache = MakeCache(s.shape, 1, s.q.rows);
      Store(cache, s, 0, 0, start);
      const HostMatrix<float> out = Run(cache, s, 0, start, 3, {}, phase);
      // So many keys average each other out: outputs are near 0.006, rounding errors of the weights too.
      EXPECT_TRUE(Near(out, Oracle(s, start, 3, {}), Tolerance{3e-4, 8e-3}));
      Store(cache, s, 0, start, start + 1);
      EXPECT_TRUE(BitEqual(Run(cache, s, 0, start + 1, 1, {}, phase), out.Rows(1, 1)));
    }
  }
}

// Blocks of which a page has a part and the segment another, or which nobody sees to their end: own rows on
// both sides of a block's edge, windows and context starts inside the last block, and pages that hold NaN or
// large numbers around what is seen. One segment, and three in a step with NaN in the rows of nobody. The
// page of the second slot's last block is missing: what it would hold reads as zeros.
TEST_F(AttentionCudaTest, PartsOfBlocksMatchDoubleReferenceWhateverLiesBesideThem) {
  for (const Shape& shape : {Shape{4, 2, 256}, Shape{4, 2, 128}}) {
    for (const auto& [start, rows] : {std::pair<int64_t, int64_t>{1, 16},
                                      {50, 16},
                                      {63, 2},
                                      {64, 1},
                                      {120, 70},
                                      {290, 16},
                                      {311, 10},
                                      {319, 1},
                                      {320, 64},
                                      {321, 70}}) {
      const Sequence s(shape, start + rows, 9, stream_);
      Cache cache = MakeCache(shape, 3, start + rows);
      const std::vector<int32_t> pages = cache.pages.ToHost();
      const int64_t last = (start - 1) / kPageTokens;
      std::vector<int32_t> missing = pages;
      missing[static_cast<size_t>(cache.pages_per_slot + last)] = -1;
      for (const auto& [mask, context_start] : {std::pair<AttentionMask, int32_t>{{true, 0}, 0},
                                                {{true, 5}, 0},
                                                {{true, 40}, 0},
                                                {{false, 0}, static_cast<int32_t>(start) / 2},
                                                {{false, 40}, static_cast<int32_t>(start - 1)},
                                                {{true, 100}, static_cast<int32_t>(start)}}) {
        const int64_t first = std::max<int64_t>(context_start, mask.window > 0 ? start - mask.window + 1 : 0);
        HostMatrix<float> zero_k = s.k, zero_v = s.v;
        for (int64_t p = std::max(last * kPageTokens, first); p < start; ++p) {
          std::fill_n(zero_k.Row(p), s.k.cols, 0.0f);
          std::fill_n(zero_v.Row(p), s.v.cols, 0.0f);
        }
        const HostMatrix<double> want = Oracle(s, s.k, s.v, start, rows, mask, context_start),
                                 want_zeros = Oracle(s, zero_k, zero_v, start, rows, mask, context_start);
        for (uint16_t garbage : {uint16_t{0xffff}, uint16_t{0x7f00}}) {  // NaN, 1.7e38
          SCOPED_TRACE(testing::Message() << shape.dim << ", " << rows << " rows at " << start << ", window "
                                          << mask.window << (mask.causal ? ", causal" : "")
                                          << ", context from " << context_start << ", beside it " << garbage);
          const std::vector<uint16_t> fill(static_cast<size_t>(cache.memory.bytes()) / 2, garbage);
          ASSERT_TRUE(CopyToDevice(cache.memory.data(), fill.data(), cache.memory.bytes(), stream_).ok());
          cache.pages = DeviceArray<int32_t>(pages, stream_);
          for (int32_t slot = 0; slot < 3; ++slot) Store(cache, s, slot, first, start);
          cache.pages = DeviceArray<int32_t>(missing, stream_);
          const HostMatrix<float> alone = RunAfter(cache, s, {0}, start, rows, mask, context_start);
          EXPECT_TRUE(Near(alone, want, kTolerance));
          EXPECT_TRUE(
              Near(RunAfter(cache, s, {1}, start, rows, mask, context_start), want_zeros, kTolerance));
          const HostMatrix<float> three = RunAfter(cache, s, {2, 0, 1}, start, rows, mask, context_start);
          EXPECT_TRUE(BitEqual(three.Rows(0, rows), alone));
          EXPECT_TRUE(BitEqual(three.Rows(rows, rows), alone));
          EXPECT_TRUE(Near(three.Rows(2 * rows, rows), want_zeros, kTolerance));
        }
      }
    }
  }
}

// The tiles of many rows go through their splits one after another; a few rows have them spread over the
// machine and merged from the workspace. Rows of the same text have the same bits within a phase.
TEST_F(AttentionCudaTest, BitsDoNotDependOnTheNumberOfRows) {
  for (const Shape& shape : {kTarget, kDrafter, kTiny}) {
    const int64_t start = 1850, rows = shape.dim == 64 ? 2500 : 800;
    const Sequence s(shape, start + rows, 3, stream_);
    for (const auto& [mask, phase] : {std::pair(AttentionMask{true, 0}, Phase::kVerify),
                                      {AttentionMask{true, 300}, Phase::kVerify},
                                      {AttentionMask{true, 0}, Phase::kPrefill}}) {
      SCOPED_TRACE(testing::Message()
                   << shape.dim << ", window " << mask.window << ", phase " << static_cast<int>(phase));
      Cache cache = MakeCache(shape, 1, s.q.rows);
      Store(cache, s, 0, 0, start);
      const HostMatrix<float> together = Run(cache, s, 0, start, rows, mask, phase);
      EXPECT_TRUE(Near(together.Rows(rows - 3, 3), Oracle(s, start + rows - 3, 3, mask), kTolerance));
      int64_t stored = start;
      for (int64_t at :
           {int64_t{0}, int64_t{13}, int64_t{150}, int64_t{197}, int64_t{198}, int64_t{400}, rows - 64}) {
        Store(cache, s, 0, stored, start + at);
        stored = start + at;
        for (int64_t count : {1, 2, 5, 10, 11, 16, 17, 21, 22, 64}) {
          ASSERT_TRUE(BitEqual(Run(cache, s, 0, start + at, count, mask, phase), together.Rows(at, count)))
              << count << " rows from " << at;
        }
      }
    }
  }
}

// So many sequences that their tiles fill the machine, beside few whose splits do.
TEST_F(AttentionCudaTest, BitsDoNotDependOnCompany) {
  const int64_t start = 1500, rows = 16, most = 34;
  const Sequence s(kTarget, start + rows, 4, stream_);
  Cache cache = MakeCache(kTarget, most, s.q.rows);
  for (int32_t slot = 0; slot < most; ++slot) Store(cache, s, slot, 0, start - 100 * (slot % 3));
  const HostMatrix<float> alone = Run(cache, s, 0, start, rows, {});
  for (int64_t sequences : {2, 5, 8, 34}) {
    SCOPED_TRACE(sequences);
    // The first rows of each belong to it, then come rows of nobody.
    const DeviceMatrix out = DeviceMatrix::Output(sequences * 20, s.q.cols, DType::kBf16, stream_);
    HostMatrix<float> q(sequences * 20, s.q.cols), k(q.rows, s.k.cols), v(q.rows, s.k.cols);
    for (HostMatrix<float>* m : {&q, &k, &v}) {
      std::fill(m->values.begin(), m->values.end(), std::numeric_limits<float>::quiet_NaN());
    }
    std::vector<Segment> segments;
    for (int32_t i = 0; i < sequences; ++i) {
      const auto at = static_cast<int32_t>(start) - 100 * (i % 3);
      segments.push_back({i, 20 * i, i % 3 == 0 ? static_cast<int32_t>(rows) : 1 + i % 16, at});
      const Segment& segment = segments.back();
      std::copy_n(s.q.Row(at), segment.row_count * q.cols, q.Row(segment.first_row));
      std::copy_n(s.k.Row(at), segment.row_count * k.cols, k.Row(segment.first_row));
      std::copy_n(s.v.Row(at), segment.row_count * v.cols, v.Row(segment.first_row));
    }
    const DeviceMatrix q_device = DeviceMatrix::Activations(q, stream_);
    const DeviceMatrix k_device = DeviceMatrix::Activations(k, stream_),
                       v_device = DeviceMatrix::Activations(v, stream_);
    DeviceArray<Segment> list(segments, stream_);
    ASSERT_TRUE(Attention(q_device.view(), k_device.view(), v_device.view(), {list.data(), list.size()},
                          nullptr, cache.table(), cache.pool, {}, kTarget.Scale(), Phase::kVerify, out.view(),
                          stream_)
                    .ok());
    const HostMatrix<float> got = out.ToHost();
    EXPECT_TRUE(std::isnan(got.At(19, 0)));
    for (const Segment& segment : segments) {
      const HostMatrix<float> want =
          segment.start_position == start && segment.row_count == rows
              ? alone
              : Run(cache, s, segment.slot, segment.start_position, segment.row_count, {});
      ASSERT_TRUE(BitEqual(got.Rows(segment.first_row, segment.row_count), want)) << segment.slot;
    }
  }
}

// A captured step reads lengths, pages and context starts from device memory.
TEST_F(AttentionCudaTest, ReplaysWithOtherSegments) {
  for (const auto& [phase, most] : {std::pair(Phase::kVerify, 16), {Phase::kPrefill, 128}}) {
    SCOPED_TRACE(phase == Phase::kVerify ? "verify" : "prefill");
    const Sequence s(kTarget, 2300, 5, stream_);
    Cache cache = MakeCache(kTarget, 2, s.q.rows);
    Store(cache, s, 0, 0, 2100);
    Store(cache, s, 1, 0, 600);
    const DeviceMatrix q = DeviceMatrix::Activations(s.q.Rows(0, most), stream_),
                       k = DeviceMatrix::Activations(s.k.Rows(0, most), stream_),
                       v = DeviceMatrix::Activations(s.v.Rows(0, most), stream_);
    const DeviceMatrix out = DeviceMatrix::Output(most, s.q.cols, DType::kBf16, stream_);
    DeviceArray<Segment> list({{0, 0, 0, 0}}, stream_);
    DeviceArray<int32_t> accepted({0}, stream_);
    auto graph = Graph::Capture(stream_, [&, phase = phase] {
      const absl::Status status =
          Attention(q.view(), k.view(), v.view(), {list.data(), 1}, nullptr, cache.table(), cache.pool, {},
                    kTarget.Scale(), phase, out.view(), stream_);
      return status.ok() ? StoreKeyValue(k.view(), v.view(), {list.data(), 1}, accepted.data(), cache.table(),
                                         cache.pool, stream_)
                         : status;
    });
    ASSERT_TRUE(graph.ok()) << graph.status();
    for (const Segment& segment :
         {Segment{0, 0, most, 2100}, {1, 0, most / 3, 600}, {0, 0, 1, 2107}, {0, 0, 0, 2107}}) {
      SCOPED_TRACE(segment.start_position);
      const HostMatrix<float> want =
          segment.row_count == 0
              ? HostMatrix<float>(0, s.q.cols)
              : Run(cache, s, segment.slot, segment.start_position, segment.row_count, {}, phase);
      const int32_t count = std::min(segment.row_count, 7);
      ASSERT_TRUE(CopyToDevice(list.data(), &segment, sizeof(segment), stream_).ok());
      ASSERT_TRUE(CopyToDevice(accepted.data(), &count, sizeof(count), stream_).ok());
      for (auto [from, to] : {std::pair(&s.q_device, &q), {&s.k_device, &k}, {&s.v_device, &v}}) {
        ASSERT_TRUE(CopyRows(from->view().Rows(segment.start_position, segment.row_count),
                             to->view().Rows(0, segment.row_count), stream_)
                        .ok());
      }
      ASSERT_TRUE(graph->Launch(stream_).ok());
      EXPECT_TRUE(BitEqual(out.ToHost().Rows(0, segment.row_count), want));
    }
    EXPECT_TRUE(out.GuardsIntact());
  }
}

// Pages that are asked for while NormAndRope runs hold what was stored right before it: the bits are those of
// a call that waits first.
TEST_F(AttentionCudaTest, ContextWrittenBeforeNormAndRopeGivesTheSameBits) {
  constexpr int64_t kStart = 2000;
  for (const Shape& shape : {kTarget, kDrafter}) {
    for (int64_t rows : {1, 16}) {
      SCOPED_TRACE(testing::Message() << shape.dim << ", rows " << rows);
      const Sequence s(shape, kStart + rows, 8, stream_);
      Cache cache = MakeCache(shape, 1, s.q.rows);
      Store(cache, s, 0, 0, kStart);
      const HostMatrix<float> want = Run(cache, s, 0, kStart, rows, {});
      HostMatrix<float> broken(kStart, s.k.cols);
      std::fill(broken.values.begin(), broken.values.end(), std::numeric_limits<float>::quiet_NaN());
      const DeviceMatrix nothing = DeviceMatrix::Activations(broken, stream_);
      const DeviceMatrix other_q = DeviceMatrix::Activations(s.q.Rows(kStart, rows), stream_),
                         other_k = DeviceMatrix::Activations(s.k.Rows(kStart, rows), stream_),
                         norm = DeviceMatrix::Activations(HostMatrix<float>(1, shape.dim), stream_);
      DeviceArray<Segment> old({{0, 0, kStart, 0}}, stream_);
      DeviceArray<Segment> own({{0, 0, static_cast<int32_t>(rows), kStart}}, stream_);
      std::vector<DeviceMatrix> outs;
      for (int i = 0; i < 8; ++i) {
        outs.push_back(DeviceMatrix::Output(rows, s.q.cols, DType::kBf16, stream_));
      }
      const auto store = [&](const DeviceMatrix& k, const DeviceMatrix& v) {
        return StoreKeyValue(k.view().Rows(0, kStart), v.view().Rows(0, kStart), {old.data(), 1}, nullptr,
                             cache.table(), cache.pool, stream_);
      };
      ASSERT_TRUE(CaptureAndReplay(stream_, [&] {
                    absl::Status status;
                    for (const DeviceMatrix& out : outs) {
                      status.Update(store(nothing, nothing));
                      status.Update(store(s.k_device, s.v_device));
                      status.Update(NormAndRope(other_q.view(), norm.view(), other_k.view(), norm.view(),
                                                NormWeight::kOnePlus, 1e-6f, {shape.dim, 64, 1e7},
                                                {own.data(), 1}, stream_));
                      status.Update(Attention(s.q_device.view().Rows(kStart, rows),
                                              s.k_device.view().Rows(kStart, rows),
                                              s.v_device.view().Rows(kStart, rows), {own.data(), 1}, nullptr,
                                              cache.table(), cache.pool, {}, shape.Scale(), Phase::kVerify,
                                              out.view(), stream_, ContextWritten::kBeforeLastNormAndRope));
                    }
                    return status;
                  }).ok());
      for (const DeviceMatrix& out : outs) EXPECT_TRUE(BitEqual(out.ToHost(), want));
    }
  }
}

// A broken query shows in its own heads' outputs, and nowhere else.
TEST_F(AttentionCudaTest, NanQueryGivesNanOutput) {
  Sequence s(kTarget, 600, 6, stream_);
  Cache cache = MakeCache(kTarget, 1, s.q.rows);
  Store(cache, s, 0, 0, 584);
  const HostMatrix<float> before = Run(cache, s, 0, 584, 16, {});
  s.q.At(586, 3 * 256 + 17) = std::numeric_limits<float>::quiet_NaN();
  s.q_device = DeviceMatrix::Activations(s.q, stream_);
  HostMatrix<float> after = Run(cache, s, 0, 584, 16, {});
  for (int64_t d = 0; d < 256; ++d) {
    ASSERT_TRUE(std::isnan(after.At(2, 3 * 256 + d)));
    after.At(2, 3 * 256 + d) = before.At(2, 3 * 256 + d);
  }
  EXPECT_TRUE(BitEqual(after, before));
}

TEST_F(AttentionCudaTest, SaysWhatIsNotThere) {
  const DeviceMatrix x = DeviceMatrix::Activations(HostMatrix<float>(1, 257), stream_);
  const DeviceMatrix out = DeviceMatrix::Output(1, 257, DType::kBf16, stream_);
  DeviceArray<Segment> segment({{0, 0, 1, 0}}, stream_);
  DeviceArray<int32_t> pages({0}, stream_);
  const absl::Status status =
      Attention(x.view(), x.view(), x.view(), {segment.data(), 1}, nullptr, {pages.data(), 1, 1},
                {nullptr, 0, 1, 257}, {}, 1, Phase::kVerify, out.view(), stream_);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(status.message().find("257"), std::string::npos);
}

}  // namespace
}  // namespace dflash
