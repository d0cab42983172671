// Gate and up in the kernel of their product: the bits of product and SwiGlu one after the other, at the
// models' shapes, by every kernel, for every number of rows.
#include <bit>
#include <cstdint>
#include <limits>
#include <string>

#include "gtest/gtest.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/linear/linear_cuda.h"
#include "kernels/swiglu/swiglu.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"
#include "kernels/testing/replay.h"

namespace dflash {
namespace {

class SwiGluCudaTest : public ::testing::Test {
 protected:
  LinearWeight Pack(int64_t F, int64_t K) {
    return LinearWeight::Pack({RandomMatrix<bf16>(2 * F, K, 1).view()}, stream_, LinearUse::kGateUp).value();
  }
  HostMatrix<float> InTwoCalls(ConstMatrixView x, const LinearWeight& w, Phase phase) {
    const DeviceMatrix gate_up = DeviceMatrix::Output(x.rows, w.out_features(), DType::kBf16, stream_);
    const DeviceMatrix y = DeviceMatrix::Output(x.rows, w.out_features() / 2, DType::kBf16, stream_);
    EXPECT_TRUE(Linear(x, w, phase, gate_up.view(), stream_).ok());
    EXPECT_TRUE(SwiGlu(gate_up.view(), y.view(), stream_).ok());
    return y.ToHost();
  }
  HostMatrix<float> InOne(ConstMatrixView x, const LinearWeight& w, Phase phase, int64_t extra_stride = 0) {
    const DeviceMatrix gate_up = DeviceMatrix::Output(x.rows, w.out_features(), DType::kBf16, stream_);
    const DeviceMatrix y =
        DeviceMatrix::Output(x.rows, w.out_features() / 2, DType::kBf16, stream_, extra_stride);
    EXPECT_TRUE(CaptureAndReplay(stream_, [&] {
                  return LinearSwiGlu(x, w, phase, gate_up.view(), y.view(), stream_);
                }).ok());
    EXPECT_TRUE(y.GuardsIntact());
    // No kernel of its own: nobody has written gates.
    uint16_t first = 0;
    EXPECT_TRUE(CopyToHost(&first, gate_up.view().data, sizeof(first), stream_).ok());
    EXPECT_EQ(first, 0xffff);
    return y.ToHost();
  }

  Stream stream_ = *Stream::Create({});
};

TEST_F(SwiGluCudaTest, HasTheBitsOfTwoCallsForEveryNumberOfRows) {
  constexpr int64_t kRows = 300;
  struct Shape {
    int64_t F, K;
  };
  // The large model's, half of it, the small pair's, a last tile that is not full.
  for (const Shape& shape : {Shape{17408, 5120}, Shape{8704, 5120}, Shape{512, 256}, Shape{1000, 264}}) {
    const LinearWeight w = Pack(shape.F, shape.K);
    HostMatrix<float> host = RandomMatrix<float>(kRows, shape.K, 2, -0.1f, 0.1f);
    host.At(kRows - 1, 3) = std::numeric_limits<float>::quiet_NaN();
    const DeviceMatrix x = DeviceMatrix::Activations(host, stream_);
    for (Phase phase : {Phase::kVerify, Phase::kPrefill}) {
      const HostMatrix<float> all = InTwoCalls(x.view(), w, phase);
      for (int64_t rows : {1,  2,   7,   8,   9,   16,  17,  32,  33,  48,  64, 80,
                           96, 112, 128, 129, 160, 192, 224, 255, 256, 257, 300}) {
        for (int64_t first : {int64_t{0}, kRows - rows}) {
          SCOPED_TRACE(testing::Message() << shape.F << "x" << shape.K << ", " << rows << " rows from "
                                          << first << ", phase " << static_cast<int>(phase));
          ASSERT_TRUE(BitEqual(InOne(x.view().Rows(first, rows), w, phase), all.Rows(first, rows)));
        }
      }
    }
  }
}

// Each width of the tiled kernel's tiles is the best one for some of these.
TEST_F(SwiGluCudaTest, HasTheBitsOfTwoCallsForManyRows) {
  for (int64_t F : {1280, 1536, 2048, 4352, 8704}) {
    const LinearWeight w = Pack(F, 128);
    for (int64_t rows : {512, 1024, 2048}) {
      SCOPED_TRACE(std::to_string(F) + " features, " + std::to_string(rows) + " rows");
      const DeviceMatrix x = DeviceMatrix::Activations(RandomMatrix<float>(rows, 128, 2), stream_);
      EXPECT_TRUE(BitEqual(InOne(x.view(), w, Phase::kPrefill), InTwoCalls(x.view(), w, Phase::kPrefill)));
    }
  }
}

TEST_F(SwiGluCudaTest, AlignmentChangesNoBit) {
  for (int64_t F : {8, 64, 168, 1000}) {
    const LinearWeight w = Pack(F, 264);
    const HostMatrix<float> host = RandomMatrix<float>(200, 264, 2);
    const DeviceMatrix aligned = DeviceMatrix::Activations(host, stream_);
    const DeviceMatrix unaligned = DeviceMatrix::Activations(host, stream_, /*extra_stride=*/1);
    for (Phase phase : {Phase::kVerify, Phase::kPrefill}) {
      const HostMatrix<float> expected = InTwoCalls(aligned.view(), w, phase);
      EXPECT_TRUE(BitEqual(InOne(unaligned.view(), w, phase), expected));
      for (int64_t extra : {1, 2, 3, 4, 7, 8, 20}) {
        EXPECT_TRUE(BitEqual(InOne(aligned.view(), w, phase, extra), expected)) << F << ", " << extra;
      }
    }
  }
}

TEST_F(SwiGluCudaTest, ThePortableKernelToo) {
  for (int64_t F : {8, 512, 1000}) {
    const LinearWeight w = Pack(F, 264);
    const DeviceMatrix x = DeviceMatrix::Activations(RandomMatrix<float>(130, 264, 2), stream_);
    const DeviceMatrix gate_up = DeviceMatrix::Output(130, 2 * F, DType::kBf16, stream_);
    const DeviceMatrix y[2] = {DeviceMatrix::Output(130, F, DType::kBf16, stream_, 3),
                               DeviceMatrix::Output(130, F, DType::kBf16, stream_)};
    const PackedWeight packed = PackedWeightOf(w);
    ASSERT_EQ(packed.features, F);
    const CudaContext& context = CudaOf(stream_);
    const auto launch = [&](const DeviceMatrix& to, LinearResult result) {
      return CudaStatus(LaunchLinearPortable(x.view(), packed, to.view(), context, result), "portable");
    };
    ASSERT_TRUE(launch(y[0], LinearResult::kSwiGlu).ok());
    ASSERT_TRUE(launch(gate_up, LinearResult::kSums).ok());
    ASSERT_TRUE(SwiGlu(gate_up.view(), y[1].view(), stream_).ok());
    EXPECT_TRUE(BitEqual(y[0].ToHost(), y[1].ToHost()));
    EXPECT_TRUE(y[0].GuardsIntact());
    // What no kernel can make is refused.
    EXPECT_FALSE(launch(gate_up, LinearResult::kSwiGlu).ok());
    EXPECT_FALSE(launch(y[0], LinearResult::kSums).ok());
  }
}

// All 65,536 of them, each as the only product that is not zero.
TEST_F(SwiGluCudaTest, HasTheBitsOfTwoCallsForEveryGate) {
  constexpr int64_t kF = 65536, kK = 16;
  HostMatrix<bf16> rows(2 * kF, kK);
  for (int64_t f = 0; f < kF; ++f) {
    rows.At(f, 0) = std::bit_cast<bf16>(static_cast<uint16_t>(f));
    rows.At(kF + f, 0) = bf16(1.0f);
  }
  const LinearWeight w = LinearWeight::Pack({rows.view()}, stream_, LinearUse::kGateUp).value();
  HostMatrix<float> host(9, kK);
  for (int64_t t = 0; t < host.rows; ++t) host.At(t, 0) = t == 0 ? 1.0f : 0.37f * static_cast<float>(t);
  const DeviceMatrix x = DeviceMatrix::Activations(host, stream_);
  for (Phase phase : {Phase::kVerify, Phase::kPrefill}) {
    const HostMatrix<float> y = InOne(x.view(), w, phase);
    EXPECT_TRUE(BitEqual(y, InTwoCalls(x.view(), w, phase)));
    EXPECT_EQ(y.At(0, 0x4000),
              Converted<float>(Converted<bf16>(HostMatrix<float>(1, 1, {1.7615942f}))).At(0, 0));
  }
}

}  // namespace
}  // namespace dflash
