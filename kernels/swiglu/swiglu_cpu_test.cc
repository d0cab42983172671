// The CPU backend gives the same bits on every instruction set and number of threads.
#include "gtest/gtest.h"
#include "kernels/elementary/elementary.h"
#include "kernels/swiglu/swiglu.h"
#include "kernels/testing/cpu_variants.h"
#include "kernels/testing/device_matrix.h"

namespace dflash {
namespace {

TEST(SwiGluCpuTest, SameBitsEverywhereAndAsOneElement) {
  for (int64_t T : {1, 3}) {
    for (int64_t F : {1, 15, 16, 17, 40, 5000}) {
      const HostMatrix<float> gate_up = RandomMatrix<float>(T, 2 * F, 1, -20, 20);
      const HostMatrix<float> y = ExpectEqualOnAllCpuVariants([&](const Stream& stream) {
        const DeviceMatrix in = DeviceMatrix::Input(gate_up, stream, 1);
        const DeviceMatrix out = DeviceMatrix::Output(T, F, DType::kF32, stream, 1);
        EXPECT_TRUE(SwiGlu(in.view(), out.view(), stream).ok());
        EXPECT_TRUE(out.GuardsIntact());
        return out.ToHost();
      });
      const HostMatrix<float> x = ExpectEqualOnAllCpuVariants([&](const Stream& stream) {
        const DeviceMatrix in = DeviceMatrix::Input(gate_up, stream, 1);
        const DeviceMatrix out = DeviceMatrix::InOut(RandomMatrix<float>(T, F, 2), stream, 1);
        EXPECT_TRUE(SigmoidGate(out.view(), in.view().Cols(F, F), stream).ok());
        EXPECT_TRUE(out.GuardsIntact());
        return out.ToHost();
      });
      const HostMatrix<float> before = RandomMatrix<float>(T, F, 2);
      for (int64_t t = 0; t < T; ++t) {
        for (int64_t f = 0; f < F; ++f) {
          ASSERT_EQ(y.At(t, f), SiluF32(gate_up.At(t, f)) * gate_up.At(t, F + f));
          ASSERT_EQ(x.At(t, f), before.At(t, f) * SigmoidF32(gate_up.At(t, F + f)));
        }
      }
    }
  }
}

TEST(SwiGluCpuTest, LinearSwiGluHasTheSameBitsEverywhereAndAlone) {
  constexpr int64_t kF = 96, kK = 70;
  const HostMatrix<bf16> weight = RandomMatrix<bf16>(2 * kF, kK, 1);
  const HostMatrix<float> x = RandomMatrix<float>(17, kK, 2);
  const auto run = [&](const HostMatrix<float>& rows, const Stream& stream) {
    const LinearWeight w = LinearWeight::Pack({weight.view()}, stream).value();
    const DeviceMatrix in = DeviceMatrix::Input(rows, stream, 1);
    const DeviceMatrix gate_up = DeviceMatrix::Output(rows.rows, 2 * kF, DType::kF32, stream, 1);
    const DeviceMatrix y = DeviceMatrix::Output(rows.rows, kF, DType::kF32, stream, 1);
    EXPECT_TRUE(LinearSwiGlu(in.view(), w, Phase::kVerify, gate_up.view(), y.view(), stream).ok());
    EXPECT_TRUE(y.GuardsIntact());
    return y.ToHost();
  };
  const HostMatrix<float> all =
      ExpectEqualOnAllCpuVariants([&](const Stream& stream) { return run(x, stream); });
  const Stream stream = *Stream::Create({});
  for (int64_t row : {0, 5, 16}) EXPECT_TRUE(BitEqual(run(x.Rows(row, 1), stream), all.Rows(row, 1)));
}

}  // namespace
}  // namespace dflash
