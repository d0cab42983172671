// What the CPU backend promises beyond causal_conv.h: the same bits for every instruction set and thread
// count, and an error for what it can see in segments.
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/causal_conv/causal_conv.h"
#include "kernels/testing/cpu_variants.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

MatrixView Writable(HostMatrix<float>& m) { return MatrixView(m.values.data(), m.rows, m.cols); }

TEST(CausalConvCpuTest, SameBitsForEveryInstructionSetAndThreadCount) {
  const HostMatrix<float> x = RandomMatrix<float>(9, 203, 5, -3, 3);
  const HostMatrix<bf16> w = RandomMatrix<bf16>(203, 4, 6);
  ExpectEqualOnAllCpuVariants([&](const Stream& stream) {
    HostMatrix<float> past = RandomMatrix<float>(3, 203, 7), y(9, 203);
    const Segment segment = {0, 0, 9, 40};
    EXPECT_TRUE(
        CausalConv(x.view(), w.view(), {&segment, 1}, {past.values.data(), 1, 4, 203}, Writable(y), stream)
            .ok());
    return y;
  });
}

TEST(CausalConvCpuTest, RefusesSegmentsThatLeadNowhere) {
  constexpr auto kBad = absl::StatusCode::kInvalidArgument;
  const Stream stream = Stream::Create({.threads = 1}).value();
  HostMatrix<float> past(3, 8), y(2, 8);
  const ConvState state = {past.values.data(), 1, 4, 8};
  const HostMatrix<float> x(2, 8), w(8, 4);
  const auto run = [&](Segment segment, int32_t row_count) {
    const absl::StatusCode code =
        CausalConv(x.view(), w.view(), {&segment, 1}, state, Writable(y), stream).code();
    const absl::StatusCode advance =
        AdvanceConvState(x.view(), {&segment, 1}, &row_count, state, stream).code();
    EXPECT_EQ(advance == kBad, code == kBad || row_count < 0 || row_count > segment.row_count);
    return advance;
  };
  EXPECT_EQ(run({0, 0, 2, 0}, 2), absl::StatusCode::kOk);
  EXPECT_EQ(run({0, 0, 2, 0}, 3), kBad);
  EXPECT_EQ(run({0, 0, 2, 0}, -1), kBad);
  EXPECT_EQ(run({1, 0, 2, 0}, 1), kBad);
  EXPECT_EQ(run({0, 1, 2, 0}, 1), kBad);
}

}  // namespace
}  // namespace dflash
