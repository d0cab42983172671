// What only the CPU backend promises: the order of every sum, and so the same bits on every instruction set
// and number of threads.
#include <cmath>
#include <string>

#include "gtest/gtest.h"
#include "kernels/linear/linear.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/cpu_variants.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

template <typename W>
void ExpectFmaChain(int64_t T, int64_t N, int64_t K) {
  SCOPED_TRACE(std::to_string(T) + " rows, " + std::to_string(N) + "x" + std::to_string(K));
  const HostMatrix<W> w = RandomMatrix<W>(N, K, 1);
  const HostMatrix<float> x = RandomMatrix<float>(T, K, 2);
  const HostMatrix<float> y = ExpectEqualOnAllCpuVariants([&](const Stream& stream) {
    auto weight = LinearWeight::Pack({w.view()}, stream);
    DFLASH_CHECK(weight.ok());
    const DeviceMatrix x_device = DeviceMatrix::Input(x, stream, 1);
    const DeviceMatrix y_device = DeviceMatrix::Output(T, N, DType::kF32, stream, 1);
    EXPECT_TRUE(Linear(x_device.view(), *weight, Phase::kVerify, y_device.view(), stream).ok());
    EXPECT_TRUE(y_device.GuardsIntact());
    return y_device.ToHost();
  });
  HostMatrix<float> expected(T, N);
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t n = 0; n < N; ++n) {
      float sum = 0;
      for (int64_t k = 0; k < K; ++k) sum = std::fma(x.At(t, k), static_cast<float>(w.At(n, k)), sum);
      expected.At(t, n) = sum;
    }
  }
  EXPECT_TRUE(BitEqual(y, expected));
}

TEST(LinearCpuTest, OneFmaPerStepKAscendingEverywhere) {
  for (int64_t T : {1, 2, 3, 4, 6, 7, 16, 17, 97}) {
    ExpectFmaChain<bf16>(T, 173, 140);
    ExpectFmaChain<float>(T, 173, 140);
  }
  ExpectFmaChain<bf16>(1, 1, 1);
  ExpectFmaChain<bf16>(16, 33, 300);
  ExpectFmaChain<bf16>(200, 70, 40);
  ExpectFmaChain<bf16>(1, 2500, 64);
  // Several row tiles and more k than one chunk holds.
  for (int64_t K : {1024, 1025, 2100}) {
    ExpectFmaChain<bf16>(17, 70, K);
    ExpectFmaChain<float>(7, 33, K);
  }
}

}  // namespace
}  // namespace dflash
