// What the GPU adds to embedding_test.cc: the large model's table, whose rows lie further away than 32 bits
// of bytes.
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device/buffer.h"
#include "kernels/embedding/embedding.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"
#include "kernels/testing/replay.h"

namespace dflash {
namespace {

TEST(EmbedRowsCudaTest, ReachesTheEndOfALargeTable) {
  constexpr int64_t kVocabulary = 248320, kHidden = 5120;
  const Stream stream = *Stream::Create({});
  const Buffer table = Buffer::Allocate(kVocabulary * kHidden * 2, stream).value();
  const std::vector<int32_t> ids = {0,      248319, 104858,
                                    209716, 209715, 248319};  // 2^30 and 2^31 bytes on the way
  const HostMatrix<bf16> rows = RandomMatrix<bf16>(static_cast<int64_t>(ids.size()), kHidden, 1);
  HostMatrix<float> expected = Converted<float>(rows);
  for (size_t i = 0; i + 1 < ids.size(); ++i) {
    ASSERT_TRUE(CopyToDevice(table.As<bf16>() + ids[i] * kHidden, rows.Row(static_cast<int64_t>(i)),
                             kHidden * 2, stream)
                    .ok());
  }
  std::copy_n(expected.Row(1), kHidden, expected.Row(5));
  DeviceArray<int32_t> device_ids(ids, stream);
  const DeviceMatrix y = DeviceMatrix::Output(expected.rows, kHidden, ActivationDType(), stream);
  const ConstMatrixView view(table.data(), DType::kBf16, kVocabulary, kHidden, kHidden);
  ASSERT_TRUE(
      CaptureAndReplay(stream, [&] { return EmbedRows(device_ids.data(), view, y.view(), stream); }).ok());
  EXPECT_TRUE(BitEqual(y.ToHost(), expected));
  EXPECT_TRUE(y.GuardsIntact());
}

}  // namespace
}  // namespace dflash
