// What the CPU backend promises beyond gated_delta_net.h: the same bits for every instruction set and thread
// count, and an error for what it can see in segments and pending records.
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/elementary/elementary.h"
#include "kernels/gated_delta_net/gated_delta_net.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/cpu_variants.h"
#include "kernels/testing/gated_delta_net_layer.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

TEST(GatedDeltaNetCpuTest, SameBitsForEveryInstructionSetAndThreadCount) {
  for (const GatedDeltaNetShape& shape :
       {GatedDeltaNetShape{2, 2, 16, 16}, {1, 3, 7, 21}, {2, 6, 32, 32}, {1, 2, 20, 70}}) {
    ExpectEqualOnAllCpuVariants([&](const Stream& stream) {
      const GatedDeltaNetSequence s(shape, 120, 5, stream);
      GatedDeltaNetLayer layer(shape, 1, 16, stream);
      std::vector<float> all = layer.Prefill(s, 0, 0, 90).values;
      const auto append = [&](const HostMatrix<float>& more) {
        all.insert(all.end(), more.values.begin(), more.values.end());
      };
      append(layer.Verify(s, 0, 90, 16, 9));
      append(layer.Verify(s, 0, 99, 9, 9));
      append(layer.Verify(s, 0, 108, 12, 12));
      layer.Fold(0);
      append(layer.State(0));
      const auto count = static_cast<int64_t>(all.size());
      return HostMatrix<float>(1, count, std::move(all));
    });
  }
}

// The order of every sum and the place of every fma, worked out with scalars: what the design calls "the same
// bits" must also stay the same from one version of the kernels to the next.
TEST(GatedDeltaNetCpuTest, VerifyFollowsTheFixedOrder) {
  constexpr int64_t kRows = 5, kKeys = 6, kValues = 19;
  const Stream stream = Stream::Create({.threads = 1}).value();
  const GatedDeltaNetShape shape = {1, 1, kKeys, kValues};
  const GatedDeltaNetSequence s(shape, kRows, 3, stream);
  GatedDeltaNetLayer layer(shape, 1, kRows, stream);
  const HostMatrix<float> o = layer.Verify(s, 0, 0, kRows, kRows);
  layer.Fold(0);
  HostMatrix<float> S(kKeys, kValues), want(kRows, kValues);
  const auto dot = [](const float* a, const float* b) {
    float sum = 0;
    for (int64_t d = 0; d < kKeys; ++d) sum = std::fma(a[d], b[d], sum);
    return sum;
  };
  for (int64_t t = 0; t < kRows; ++t) {
    const float* row = s.qkv.Row(t);
    const float q_factor = (1 / std::sqrt(static_cast<float>(kKeys))) / std::sqrt(dot(row, row) + 1e-6f);
    const float k_factor = 1 / std::sqrt(dot(row + kKeys, row + kKeys) + 1e-6f);
    float q[kKeys], k[kKeys];
    for (int64_t d = 0; d < kKeys; ++d) q[d] = row[d] * q_factor, k[d] = row[kKeys + d] * k_factor;
    const float g = -ExpF32(s.a_log.At(0, 0)) * SoftplusF32(s.decay.At(t, 0) + s.dt_bias.At(0, 0));
    const float decay = ExpF32(g), beta = SigmoidF32(s.beta.At(t, 0));
    for (int64_t e = 0; e < kValues; ++e) {
      float seen = 0, read = 0;
      for (int64_t d = 0; d < kKeys; ++d) {
        seen = std::fma(k[d], S.At(d, e), seen);
        read = std::fma(q[d], S.At(d, e), read);
      }
      const float c = beta * std::fma(-decay, seen, row[2 * kKeys + e]);
      want.At(t, e) = std::fma(dot(k, q), c, decay * read);
      for (int64_t d = 0; d < kKeys; ++d) S.At(d, e) = std::fma(k[d], c, decay * S.At(d, e));
    }
  }
  EXPECT_TRUE(BitEqual(o, want));
  EXPECT_TRUE(BitEqual(layer.State(0), HostMatrix<float>(1, kKeys * kValues, S.values)));
}

TEST(GatedDeltaNetCpuTest, RefusesSegmentsAndRecordsThatLeadNowhere) {
  constexpr auto kBad = absl::StatusCode::kInvalidArgument;
  const Stream stream = Stream::Create({.threads = 1}).value();
  const GatedDeltaNetShape shape = {1, 2, 4, 3};
  const GatedDeltaNetSequence s(shape, 4, 1, stream);
  std::vector<float> states(static_cast<size_t>(shape.StateFloats()));
  std::vector<float> records(static_cast<size_t>(4 * shape.RecordFloats()));
  const GatedDeltaNetState state = {states.data(), records.data(), 1, 2};
  const GatedDeltaNetInput in = {s.qkv.view(), s.beta.view(), s.decay.view(), s.a_log.Row(0),
                                 s.dt_bias.Row(0)};
  HostMatrix<float> o(4, 6);
  const MatrixView out(o.values.data(), 4, 6);
  int32_t buffer = 0, count = 0;
  const auto verify = [&](Segment segment) {
    return GatedDeltaNetVerify(shape, in, {&segment, 1}, {&buffer, &count}, state, out, stream).code();
  };
  const auto fold = [&](int32_t slot) {
    return GatedDeltaNetFold(shape, &slot, 1, {&buffer, &count}, state, stream).code();
  };
  EXPECT_EQ(verify({0, 0, 2, 0}), absl::StatusCode::kOk);
  EXPECT_EQ(verify({1, 0, 2, 0}), kBad);
  EXPECT_EQ(verify({0, 3, 2, 0}), kBad);
  EXPECT_EQ(verify({0, 0, 3, 0}), kBad);  // more rows than records
  EXPECT_EQ(fold(0), absl::StatusCode::kOk);
  EXPECT_EQ(fold(1), kBad);
  EXPECT_EQ(fold(-1), kBad);
  count = 3;
  EXPECT_EQ(verify({0, 0, 2, 0}), kBad);
  EXPECT_EQ(fold(0), kBad);
  count = 0;
  buffer = 2;
  EXPECT_EQ(verify({0, 0, 2, 0}), kBad);
  EXPECT_EQ(fold(0), kBad);
  const Segment outside = {0, 3, 2, 0};
  EXPECT_EQ(GatedDeltaNetPrefill(shape, in, {&outside, 1}, state, out, stream).code(), kBad);
}

}  // namespace
}  // namespace dflash
