// What the CPU backend promises beyond attention.h: the same bits for every instruction set and thread count,
// and an error for what it can see in segments and page tables.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/attention/attention.h"
#include "kernels/elementary/elementary.h"
#include "kernels/testing/cpu_variants.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

constexpr int64_t kPages = 4, kHeads = 6, kKvHeads = 2;

MatrixView Writable(HostMatrix<float>& m) { return MatrixView(m.values.data(), m.rows, m.cols); }

TEST(AttentionCpuTest, SameBitsForEveryInstructionSetAndThreadCount) {
  for (int64_t dim : {64, 37}) {
    const HostMatrix<float> k = RandomMatrix<float>(160, kKvHeads * dim, 1),
                            v = RandomMatrix<float>(160, k.cols, 2);
    const HostMatrix<float> q = RandomMatrix<float>(160, kHeads * dim, 3, -4, 4);
    for (const AttentionMask& mask : {AttentionMask{true, 0}, {true, 40}, {false, 0}, {false, 65}}) {
      SCOPED_TRACE(testing::Message() << dim << " dimensions, window " << mask.window);
      ExpectEqualOnAllCpuVariants([&](const Stream& stream) {
        KeyValuePool pool = {nullptr, kPages, kKvHeads, dim};
        std::vector<float> memory(static_cast<size_t>(kPages * pool.PageBytes()) / sizeof(float),
                                  std::numeric_limits<float>::quiet_NaN());
        pool.data = memory.data();
        const std::vector<int32_t> pages = {2, 0, 3, 1};
        const PageTable table = {pages.data(), 1, kPages};
        const Segment context = {0, 0, 100, 0}, block = {0, 0, 33, 100};
        EXPECT_TRUE(StoreKeyValue(k.view(), v.view(), {&context, 1}, nullptr, table, pool, stream).ok());
        HostMatrix<float> out(33, q.cols);
        EXPECT_TRUE(Attention(q.Rows(100, 33).view(), k.Rows(100, 33).view(), v.Rows(100, 33).view(),
                              {&block, 1}, nullptr, table, pool, mask, 0.2f, Phase::kVerify, Writable(out),
                              stream)
                        .ok());
        return out;
      });
    }
  }
}

// Bits that follow from the order that the header fixes, worked out with scalar fma and the same exp: one
// head, one dimension, 70 keys, so two blocks.
TEST(AttentionCpuTest, BlocksAreReducedAndMergedInTheFixedOrder) {
  constexpr int32_t kKeys = 70;
  const HostMatrix<float> k = RandomMatrix<float>(kKeys, 1, 4), v = RandomMatrix<float>(kKeys, 1, 5);
  const HostMatrix<float> q = RandomMatrix<float>(kKeys, 1, 6, -3, 3);
  const Stream stream = Stream::Create({.threads = 1}).value();
  const Segment segment = {0, 0, kKeys, 0};
  const int32_t no_page = -1;
  HostMatrix<float> out(kKeys, 1);
  ASSERT_TRUE(Attention(q.view(), k.view(), v.view(), {&segment, 1}, nullptr, {&no_page, 1, 1},
                        {nullptr, 0, 1, 1}, {}, 0.5f, Phase::kVerify, Writable(out), stream)
                  .ok());
  for (int64_t row = 0; row < kKeys; ++row) {
    float maximum = 0, sum = 0, total = 0;
    for (int64_t first = 0; first <= row; first += 64) {
      const int64_t end = std::min<int64_t>(row + 1, first + 64);
      float block_maximum = -std::numeric_limits<float>::infinity(), block_sum = 0, block_total = 0;
      const auto score = [&](int64_t j) { return q.At(row, 0) * k.At(j, 0) * 0.5f; };
      for (int64_t j = first; j < end; ++j) block_maximum = std::max(block_maximum, score(j));
      for (int64_t j = first; j < end; ++j) {
        const float weight = ExpF32(score(j) - block_maximum);
        block_sum += weight;
        block_total = std::fma(weight, v.At(j, 0), block_total);
      }
      if (first == 0) {
        maximum = block_maximum, sum = block_sum, total = block_total;
        continue;
      }
      const float larger = std::max(maximum, block_maximum);
      const float keep = ExpF32(maximum - larger), take = ExpF32(block_maximum - larger);
      sum = std::fma(block_sum, take, sum * keep);
      total = std::fma(block_total, take, total * keep);
      maximum = larger;
    }
    ASSERT_TRUE(SameBits(out.At(row, 0), total / sum)) << row;
  }
}

TEST(AttentionCpuTest, RefusesSegmentsAndPagesThatLeadNowhere) {
  constexpr auto kBad = absl::StatusCode::kInvalidArgument;
  const Stream stream = Stream::Create({.threads = 1}).value();
  KeyValuePool pool = {nullptr, 2, 1, 8};
  std::vector<float> memory(static_cast<size_t>(2 * pool.PageBytes()) / sizeof(float));
  pool.data = memory.data();
  const HostMatrix<float> x(2, 8);
  HostMatrix<float> out(2, 8);
  std::vector<int32_t> pages = {0, -1, 2};
  const auto attend = [&](Segment segment, int32_t context_start = 0) {
    return Attention(x.view(), x.view(), x.view(), {&segment, 1}, &context_start, {pages.data(), 1, 3}, pool,
                     {}, 1, Phase::kVerify, Writable(out), stream)
        .code();
  };
  EXPECT_EQ(attend({0, 0, 2, 64}), absl::StatusCode::kOk);
  EXPECT_EQ(attend({1, 0, 2, 10}), kBad);
  EXPECT_EQ(attend({0, 1, 2, 10}), kBad);
  EXPECT_EQ(attend({0, 0, 2, 65}), kBad);   // page -1
  EXPECT_EQ(attend({0, 0, 2, 130}), kBad);  // page -1, and page 2 of 2
  EXPECT_EQ(attend({0, 0, 2, 130}, 128), kBad);
  EXPECT_EQ(attend({0, 0, 2, 200}, 193), kBad);  // beyond the table
  EXPECT_EQ(attend({0, 0, 2, 10}, -1), kBad);
  const auto store = [&](Segment segment, int32_t row_count) {
    return StoreKeyValue(x.view(), x.view(), {&segment, 1}, &row_count, {pages.data(), 1, 3}, pool, stream)
        .code();
  };
  EXPECT_EQ(store({0, 0, 2, 62}, 2), absl::StatusCode::kOk);
  EXPECT_EQ(store({0, 0, 2, 63}, 2), kBad);  // its second row meets page -1
  EXPECT_EQ(store({0, 0, 2, 63}, 1), absl::StatusCode::kOk);
  EXPECT_EQ(store({0, 0, 2, 63}, 3), kBad);
  EXPECT_EQ(store({0, 0, 2, 63}, -1), kBad);
  HostMatrix<float> k(1, 8), v(1, 8);
  EXPECT_EQ(LoadKeyValue(pool, {pages.data(), 1, 3}, 0, 64, Writable(k), Writable(v), stream).code(), kBad);
}

}  // namespace
}  // namespace dflash
