// The test support must be able to fail.
#include <cmath>
#include <limits>

#include "gtest/gtest.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/cpu_variants.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

class DeviceMatrixTest : public ::testing::Test {
 protected:
  Stream stream_ = *Stream::Create({.threads = 1});
};

TEST_F(DeviceMatrixTest, RoundTripsWithAStride) {
  const HostMatrix<float> host = RandomMatrix<float>(3, 5, 1);
  const DeviceMatrix device = DeviceMatrix::InOut(host, stream_, 2);
  EXPECT_EQ(device.view().row_stride, 7);
  EXPECT_TRUE(BitEqual(device.ToHost(), host));
  EXPECT_TRUE(device.GuardsIntact());
  const DeviceMatrix narrow = DeviceMatrix::Input(Converted<bf16>(host), stream_);
  EXPECT_TRUE(BitEqual(narrow.ToHost(), Converted<float>(Converted<bf16>(host))));
}

TEST_F(DeviceMatrixTest, NoticesWritesAroundTheElements) {
  for (int64_t offset : {-1, 5, 6, 19}) {  // before, between the rows, after
    SCOPED_TRACE(offset);
    const DeviceMatrix device = DeviceMatrix::Output(3, 5, DType::kF32, stream_, 2);
    EXPECT_TRUE(device.GuardsIntact());
    static_cast<float*>(device.view().data)[offset] = 0;
    EXPECT_FALSE(device.GuardsIntact());
  }
}

TEST_F(DeviceMatrixTest, UnwrittenElementsAreNan) {
  const HostMatrix<float> host = DeviceMatrix::Output(1, 2, DType::kF32, stream_).ToHost();
  EXPECT_TRUE(std::isnan(host.At(0, 1)));
}

TEST(NearTest, HoldsTheTolerance) {
  const HostMatrix<double> expected(1, 2, {1.0, 1000.0});
  EXPECT_TRUE(Near(HostMatrix<float>(1, 2, {1.0f, 1000.0002f}), expected, Tolerance::F32Elementwise()));
  EXPECT_FALSE(Near(HostMatrix<float>(1, 2, {1.0f, 1000.001f}), expected, Tolerance::F32Elementwise()));
  EXPECT_FALSE(Near(HostMatrix<float>(2, 1), expected, Tolerance::F32Elementwise()));
}

TEST(NearTest, NansAndInfinitiesMustMatch) {
  const double inf = HUGE_VAL;
  const Tolerance wide{1e30, 1};
  EXPECT_TRUE(Near(HostMatrix<float>(1, 2, {kNan, -kInf}), HostMatrix<double>(1, 2, {NAN, -inf}), wide));
  EXPECT_FALSE(Near(HostMatrix<float>(1, 1, {kNan}), HostMatrix<double>(1, 1, {0}), wide));
  EXPECT_FALSE(Near(HostMatrix<float>(1, 1, {kInf}), HostMatrix<double>(1, 1, {-inf}), wide));
  EXPECT_FALSE(Near(HostMatrix<float>(1, 1, {1e30f}), HostMatrix<double>(1, 1, {inf}), wide));
}

TEST(BitEqualTest, TellsZerosApartAndNansAlike) {
  EXPECT_TRUE(BitEqual(HostMatrix<float>(1, 1, {kNan}), HostMatrix<float>(1, 1, {-kNan})));
  EXPECT_FALSE(BitEqual(HostMatrix<float>(1, 1, {0.0f}), HostMatrix<float>(1, 1, {-0.0f})));
}

TEST(InstructionSetTest, ScopesEndAndUnsupportedSetsAreRefused) {
  const InstructionSet before = CurrentInstructionSet();
  {
    const ScopedInstructionSet scoped(InstructionSet::kScalar);
    EXPECT_EQ(CurrentInstructionSet(), InstructionSet::kScalar);
  }
  EXPECT_EQ(CurrentInstructionSet(), before);
  for (InstructionSet set : {InstructionSet::kScalar, InstructionSet::kAvx2, InstructionSet::kAvx512}) {
    if (IsSupported(set)) continue;
    EXPECT_EQ(SetInstructionSet(set).code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace dflash
