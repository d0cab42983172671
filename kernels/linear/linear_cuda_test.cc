// What linear.h promises beyond the shapes of linear_test.cc: the models' shapes, every kernel,
// equal bits for every number of rows, captured launches.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/device/graph.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/linear_cuda.h"
#include "kernels/linear/linear_ref.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

struct Shape {
  int64_t N, K;
};

// Every kernel that can serve bf16 weights on this device.
enum class Kernel { kVerify, kPrefill, kPortable };
constexpr Kernel kKernels[] = {Kernel::kVerify, Kernel::kPrefill, Kernel::kPortable};

std::string NameOf(Kernel kernel) {
  switch (kernel) {
    case Kernel::kVerify:
      return "verify";
    case Kernel::kPrefill:
      return "prefill";
    case Kernel::kPortable:
      return "portable";
  }
  return "";
}

class LinearCudaTest : public ::testing::Test {
 protected:
  absl::Status Call(Kernel kernel, ConstMatrixView x, const LinearWeight& w, MatrixView y) {
    const PackedWeight packed = PackedWeightOf(w);
    switch (kernel) {
      case Kernel::kVerify:
        return Linear(x, w, Phase::kVerify, y, stream_);
      case Kernel::kPrefill:
        return Linear(x, w, Phase::kPrefill, y, stream_);
      case Kernel::kPortable:
        return CudaStatus(LaunchLinearPortable(x, packed, y, CudaOf(stream_)), "portable");
    }
    return absl::InternalError("no such kernel");
  }
  HostMatrix<float> Run(Kernel kernel, const DeviceMatrix& x, int64_t first_row, int64_t rows,
                        const LinearWeight& w, DType dtype = DType::kF32, int64_t extra_stride = 0) {
    const DeviceMatrix y = DeviceMatrix::Output(rows, w.out_features(), dtype, stream_, extra_stride);
    const absl::Status status = Call(kernel, x.view().Rows(first_row, rows), w, y.view());
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(y.GuardsIntact());
    return y.ToHost();
  }
  // Outputs 0, step, 2 step, ... and the last: the oracle takes too long for all.
  static HostMatrix<double> SampledOracle(const HostMatrix<float>& x, const HostMatrix<bf16>& w,
                                          const std::vector<int64_t>& outputs) {
    HostMatrix<bf16> some(static_cast<int64_t>(outputs.size()), w.cols);
    for (int64_t i = 0; i < some.rows; ++i) {
      std::copy_n(w.Row(outputs[static_cast<size_t>(i)]), w.cols, some.Row(i));
    }
    HostMatrix<double> y(x.rows, some.rows);
    LinearRef<double>(x.values.data(), some.values.data(), x.rows, some.rows, w.cols, y.values.data());
    return y;
  }
  void ExpectMatchesOracle(const Shape& shape, const std::vector<int64_t>& row_counts) {
    const HostMatrix<bf16> w = RandomMatrix<bf16>(shape.N, shape.K, 1);
    auto weight = LinearWeight::Pack({w.view()}, stream_);
    ASSERT_TRUE(weight.ok()) << weight.status();
    std::vector<int64_t> outputs;
    for (int64_t n = 0; n < shape.N; n += std::max<int64_t>(1, shape.N / 61)) outputs.push_back(n);
    outputs.push_back(shape.N - 1);
    for (int64_t rows : row_counts) {
      const DeviceMatrix x = DeviceMatrix::Activations(RandomMatrix<float>(rows, shape.K, 2), stream_);
      const HostMatrix<double> expected = SampledOracle(x.ToHost(), w, outputs);
      for (Kernel kernel : kKernels) {
        SCOPED_TRACE(NameOf(kernel) + ", " + std::to_string(rows) + " rows, " + std::to_string(shape.N) +
                     "x" + std::to_string(shape.K));
        const HostMatrix<float> y = Run(kernel, x, 0, rows, *weight);
        HostMatrix<float> sampled(rows, static_cast<int64_t>(outputs.size()));
        for (int64_t row = 0; row < rows; ++row) {
          for (size_t i = 0; i < outputs.size(); ++i)
            sampled.At(row, static_cast<int64_t>(i)) = y.At(row, outputs[i]);
        }
        EXPECT_TRUE(Near(sampled, expected, Tolerance::F32MatrixUnit(shape.K)));
        for (float value : y.values) ASSERT_TRUE(std::isfinite(value)) << "an output was not written";
        // A bf16 result is the rounded float32 result.
        EXPECT_TRUE(
            BitEqual(Run(kernel, x, 0, rows, *weight, DType::kBf16), Converted<float>(Converted<bf16>(y))));
      }
    }
  }

  Stream stream_ = *Stream::Create({});
};

TEST_F(LinearCudaTest, MatchesTheReferenceAtTheShapesOfTheSmallPair) {
  for (const Shape& shape : {Shape{1048, 256}, Shape{768, 256}, Shape{256, 384}, Shape{1024, 256},
                             Shape{256, 512}, Shape{4096, 256}, Shape{640, 256}, Shape{256, 768}}) {
    ExpectMatchesOracle(shape, {1, 16, 33, 64, 200, 300});
  }
}

TEST_F(LinearCudaTest, MatchesTheReferenceAtTheShapesOfTheLargeModel) {
  for (const Shape& shape : {Shape{16480, 5120}, Shape{14336, 5120}, Shape{5120, 6144}, Shape{34816, 5120},
                             Shape{5120, 17408}, Shape{6144, 5120}, Shape{5120, 4096}, Shape{5120, 25600}}) {
    ExpectMatchesOracle(shape, {1, 16, 64, 129});
  }
}

TEST_F(LinearCudaTest, MatchesTheReferenceAtTheShapeOfTheLargeHead) {
  ExpectMatchesOracle({248320, 5120}, {1, 16});
}

TEST_F(LinearCudaTest, MatchesTheReferenceForOddShapes) {
  for (int64_t N : {1, 7, 8, 9, 127, 128, 129, 161, 255, 500}) {
    for (int64_t K : {8, 56, 64, 72, 200}) ExpectMatchesOracle({N, K}, {1, 17, 65, 129, 257});
  }
}

// Rows of x and y at any address and distance; with a distance that allows wide stores, they must not reach
// past the last output.
TEST_F(LinearCudaTest, AlignmentChangesNoBit) {
  for (int64_t N : {300, 255, 161}) {
    const HostMatrix<bf16> w = RandomMatrix<bf16>(N, 264, 1);
    auto weight = LinearWeight::Pack({w.view()}, stream_);
    ASSERT_TRUE(weight.ok());
    const HostMatrix<float> host = RandomMatrix<float>(200, 264, 2);
    const DeviceMatrix aligned = DeviceMatrix::Activations(host, stream_);
    const DeviceMatrix unaligned = DeviceMatrix::Activations(host, stream_, /*extra_stride=*/1);
    for (Kernel kernel : {Kernel::kVerify, Kernel::kPrefill}) {
      for (DType dtype : {DType::kF32, DType::kBf16}) {
        SCOPED_TRACE(NameOf(kernel) + ", " + std::to_string(N) + " outputs in " + Name(dtype));
        const HostMatrix<float> expected = Run(kernel, aligned, 0, 200, *weight, dtype);
        EXPECT_TRUE(BitEqual(Run(kernel, unaligned, 0, 200, *weight, dtype), expected));
        for (int64_t extra : {1, 2, 3, 7, 8, 20}) {
          EXPECT_TRUE(BitEqual(Run(kernel, aligned, 0, 200, *weight, dtype, extra), expected)) << extra;
        }
      }
    }
  }
}

// The promise behind "same text": a row's bits depend neither on the number of rows, nor on its place among
// them, nor on what the others hold.
TEST_F(LinearCudaTest, RowsHaveTheSameBitsInEveryCompany) {
  constexpr int64_t kRows = 300;
  for (const Shape& shape : {Shape{5120, 6144}, Shape{1048, 256}, Shape{16480, 5120}}) {
    const HostMatrix<bf16> w = RandomMatrix<bf16>(shape.N, shape.K, 1);
    auto weight = LinearWeight::Pack({w.view()}, stream_);
    ASSERT_TRUE(weight.ok());
    HostMatrix<float> host = RandomMatrix<float>(kRows, shape.K, 2);
    host.At(kRows - 1, 3) = std::numeric_limits<float>::quiet_NaN();
    const DeviceMatrix x = DeviceMatrix::Activations(host, stream_);
    for (Kernel kernel : kKernels) {
      const HostMatrix<float> all = Run(kernel, x, 0, kRows, *weight);
      for (int64_t rows : {1,  2,  7,  8,   9,   15,  16,  17,  31,  32,  33,  48,  63, 64,
                           65, 80, 96, 112, 127, 128, 129, 160, 192, 224, 255, 256, 257}) {
        for (int64_t first : {int64_t{0}, int64_t{13}, kRows - rows}) {
          SCOPED_TRACE(NameOf(kernel) + ", " + std::to_string(shape.N) + "x" + std::to_string(shape.K) +
                       ", " + std::to_string(rows) + " rows from " + std::to_string(first));
          ASSERT_TRUE(BitEqual(Run(kernel, x, first, rows, *weight), all.Rows(first, rows)));
        }
      }
    }
  }
}

// The other shapes of the large model, each with its own division of the work.
TEST_F(LinearCudaTest, RowsOfTheLargeModelHaveTheSameBitsInEveryCompany) {
  constexpr int64_t kRows = 129, kFirst = 13;
  for (const Shape& shape : {Shape{14336, 5120}, Shape{34816, 5120}, Shape{5120, 17408}, Shape{6144, 5120},
                             Shape{5120, 4096}, Shape{5120, 25600}, Shape{248320, 5120}}) {
    const HostMatrix<bf16> w = RandomMatrix<bf16>(shape.N, shape.K, 1);
    auto weight = LinearWeight::Pack({w.view()}, stream_);
    ASSERT_TRUE(weight.ok());
    const DeviceMatrix x = DeviceMatrix::Activations(RandomMatrix<float>(kRows, shape.K, 2), stream_);
    for (Kernel kernel : {Kernel::kVerify, Kernel::kPrefill}) {
      const HostMatrix<float> all = Run(kernel, x, 0, kRows, *weight);
      for (int64_t rows : {1, 8, 16, 33, 64, 100}) {
        SCOPED_TRACE(NameOf(kernel) + ", " + std::to_string(shape.N) + "x" + std::to_string(shape.K) + ", " +
                     std::to_string(rows) + " rows");
        ASSERT_TRUE(BitEqual(Run(kernel, x, kFirst, rows, *weight), all.Rows(kFirst, rows)));
      }
    }
  }
}

TEST(FasterLinearPhaseTest, StreamsAWeightOnceOrTilesTheRows) {
  for (int64_t rows : {1, 16, 128, 224}) EXPECT_EQ(FasterLinearPhase(rows), Phase::kVerify) << rows;
  for (int64_t rows : {225, 240, 256, 1024}) EXPECT_EQ(FasterLinearPhase(rows), Phase::kPrefill) << rows;
}

TEST_F(LinearCudaTest, CapturedLaunchesReplay) {
  for (const Shape& shape : {Shape{1048, 256}, Shape{5120, 6144}, Shape{34816, 5120}}) {
    const HostMatrix<bf16> w = RandomMatrix<bf16>(shape.N, shape.K, 1);
    auto weight = LinearWeight::Pack({w.view()}, stream_);
    ASSERT_TRUE(weight.ok());
    for (Phase phase : {Phase::kVerify, Phase::kPrefill}) {
      const DeviceMatrix x = DeviceMatrix::Activations(RandomMatrix<float>(16, shape.K, 2), stream_);
      const DeviceMatrix y = DeviceMatrix::Output(16, shape.N, DType::kF32, stream_);
      const DeviceMatrix again = DeviceMatrix::Output(16, shape.N, DType::kF32, stream_);
      auto graph = Graph::Capture(stream_, [&] {
        const absl::Status status = Linear(x.view(), *weight, phase, y.view(), stream_);
        return status.ok() ? Linear(x.view(), *weight, phase, again.view(), stream_) : status;
      });
      ASSERT_TRUE(graph.ok()) << graph.status();
      for (uint32_t seed : {3u, 4u}) {
        const DeviceMatrix other = DeviceMatrix::Activations(RandomMatrix<float>(16, shape.K, seed), stream_);
        ASSERT_TRUE(CopyRows(other.view(), x.view(), stream_).ok());
        ASSERT_TRUE(graph->Launch(stream_).ok());
        const HostMatrix<float> expected =
            Run(phase == Phase::kVerify ? Kernel::kVerify : Kernel::kPrefill, other, 0, 16, *weight);
        EXPECT_TRUE(BitEqual(y.ToHost(), expected));
        EXPECT_TRUE(BitEqual(again.ToHost(), expected));
      }
    }
  }
}

}  // namespace
}  // namespace dflash
