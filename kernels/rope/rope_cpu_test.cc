// The CPU backend gives the same bits on every instruction set and number of threads, and a row does not
// depend on its company.
#include "gtest/gtest.h"
#include "kernels/rope/rope.h"
#include "kernels/testing/cpu_variants.h"
#include "kernels/testing/device_matrix.h"

namespace dflash {
namespace {

TEST(RopeCpuTest, SameBitsEverywhereAndAlone) {
  for (const RopeShape& shape : {RopeShape{7, 6, 1e4}, RopeShape{64, 64, 1e7}, RopeShape{96, 40, 1e7}}) {
    const HostMatrix<float> x = RandomMatrix<float>(17, 3 * shape.head_dim, 1);
    const auto rotate = [&](const HostMatrix<float>& rows, int32_t position, const Stream& stream) {
      const DeviceMatrix device = DeviceMatrix::InOut(rows, stream, 1);
      DeviceArray<Segment> list({{.slot = 0,
                                  .first_row = 0,
                                  .row_count = static_cast<int32_t>(rows.rows),
                                  .start_position = position}},
                                stream);
      EXPECT_TRUE(ApplyRope(device.view(), shape, {list.data(), list.size()}, stream).ok());
      EXPECT_TRUE(device.GuardsIntact());
      return device.ToHost();
    };
    const HostMatrix<float> all =
        ExpectEqualOnAllCpuVariants([&](const Stream& stream) { return rotate(x, 5000, stream); });
    const Stream stream = *Stream::Create({});
    for (int32_t row : {0, 7, 16}) {
      EXPECT_TRUE(BitEqual(rotate(x.Rows(row, 1), 5000 + row, stream), all.Rows(row, 1)));
    }
  }
}

}  // namespace
}  // namespace dflash
