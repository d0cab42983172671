// The CPU backend gives the same bits on every instruction set and number of threads.
#include <string>

#include "gtest/gtest.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/testing/cpu_variants.h"
#include "kernels/testing/device_matrix.h"

namespace dflash {
namespace {

constexpr float kEps = 1e-6f;

template <typename W>
void ExpectEqualEverywhere(int64_t T, int64_t H, int64_t D) {
  SCOPED_TRACE(std::to_string(T) + " rows of " + std::to_string(H) + " x " + std::to_string(D));
  const HostMatrix<float> x = RandomMatrix<float>(T, H * D, 1, -3, 3);
  const HostMatrix<float> z = RandomMatrix<float>(T, H * D, 2, -9, 9);
  const HostMatrix<W> w = RandomMatrix<W>(1, D, 3);
  for (NormWeight weight : {NormWeight::kPlain, NormWeight::kOnePlus}) {
    ExpectEqualOnAllCpuVariants([&](const Stream& stream) {
      const DeviceMatrix in = DeviceMatrix::Input(x, stream), factor = DeviceMatrix::Input(w, stream);
      const DeviceMatrix y = DeviceMatrix::Output(T, H * D, DType::kF32, stream);
      EXPECT_TRUE(RmsNorm(in.view(), factor.view(), weight, kEps, y.view(), stream).ok());
      EXPECT_TRUE(y.GuardsIntact());
      return y.ToHost();
    });
  }
  for (GateActivation gate : {GateActivation::kSilu, GateActivation::kSigmoid}) {
    ExpectEqualOnAllCpuVariants([&](const Stream& stream) {
      const DeviceMatrix in = DeviceMatrix::Input(x, stream), factor = DeviceMatrix::Input(w, stream);
      const DeviceMatrix gates = DeviceMatrix::Input(z, stream);
      const DeviceMatrix y = DeviceMatrix::Output(T, H * D, DType::kF32, stream);
      EXPECT_TRUE(GatedRmsNorm(in.view(), factor.view(), gates.view(), gate, kEps, y.view(), stream).ok());
      EXPECT_TRUE(y.GuardsIntact());
      return y.ToHost();
    });
  }
  if (H > 1) return;
  const HostMatrix<float> y_of_add = ExpectEqualOnAllCpuVariants([&](const Stream& stream) {
    const DeviceMatrix residual = DeviceMatrix::InOut(x, stream), factor = DeviceMatrix::Input(w, stream);
    const DeviceMatrix delta = DeviceMatrix::Input(z, stream);
    const DeviceMatrix y = DeviceMatrix::Output(T, D, DType::kF32, stream);
    EXPECT_TRUE(
        AddRmsNorm(residual.view(), delta.view(), factor.view(), NormWeight::kOnePlus, kEps, y.view(), stream)
            .ok());
    EXPECT_TRUE(residual.GuardsIntact());
    return y.ToHost();
  });
  // The sum that AddRmsNorm leaves behind, normalized alone, has the same bits.
  HostMatrix<float> sum = x;
  for (size_t i = 0; i < sum.values.size(); ++i) sum.values[i] += z.values[i];
  const Stream stream = *Stream::Create({});
  const DeviceMatrix in = DeviceMatrix::Input(sum, stream), factor = DeviceMatrix::Input(w, stream);
  const DeviceMatrix y = DeviceMatrix::Output(T, D, DType::kF32, stream);
  EXPECT_TRUE(RmsNorm(in.view(), factor.view(), NormWeight::kOnePlus, kEps, y.view(), stream).ok());
  EXPECT_TRUE(BitEqual(y.ToHost(), y_of_add));
}

TEST(RmsNormCpuTest, SameBitsEverywhere) {
  for (int64_t D : {1, 15, 16, 17, 33, 64, 79, 128, 300}) {
    ExpectEqualEverywhere<bf16>(3, 1, D);
    ExpectEqualEverywhere<float>(2, 5, D);
  }
  ExpectEqualEverywhere<bf16>(100, 1, 512);
}

}  // namespace
}  // namespace dflash
