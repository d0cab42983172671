#include "kernels/embedding/embedding.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"
#include "kernels/testing/replay.h"

namespace dflash {
namespace {

template <typename W>
void ExpectRowsOfTheTable(const std::vector<int32_t>& ids, int64_t V, int64_t D, int threads,
                          int64_t table_extra = 3, int64_t y_extra = 5) {
  SCOPED_TRACE(std::to_string(ids.size()) + " ids, " + std::to_string(D) + " columns");
  const Stream stream = *Stream::Create({.threads = threads});
  const HostMatrix<W> table = RandomMatrix<W>(V, D, 1);
  const int64_t T = static_cast<int64_t>(ids.size());
  DeviceArray<int32_t> device_ids(ids, stream);
  const DeviceMatrix device_table = DeviceMatrix::Input(table, stream, table_extra);
  const DeviceMatrix y = DeviceMatrix::Output(T, D, ActivationDType(), stream, y_extra);
  ASSERT_TRUE(CaptureAndReplay(stream, [&] {
                return EmbedRows(device_ids.data(), device_table.view(), y.view(), stream);
              }).ok());
  HostMatrix<float> expected(T, D);
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t d = 0; d < D; ++d) {
      expected.At(t, d) = static_cast<float>(table.At(ids[static_cast<size_t>(t)], d));
    }
  }
  // Rounded as activations are.
  EXPECT_TRUE(BitEqual(y.ToHost(), DeviceMatrix::Activations(expected, stream).ToHost()));
  EXPECT_TRUE(y.GuardsIntact());
}

TEST(EmbedRowsTest, CopiesTheRowsExactly) {
  const std::vector<std::vector<int32_t>> id_lists = {{}, {0}, {6}, {3, 3, 0, 6, 1}};
  std::vector<int32_t> many;
  for (int32_t i = 0; i < 300; ++i) many.push_back(i * 5 % 7);
  for (int threads : {1, 2, 3}) {
    for (const std::vector<int32_t>& ids : id_lists) {
      for (int64_t D : {1, 15, 16, 17, 64}) {
        ExpectRowsOfTheTable<float>(ids, 7, D, threads);
        ExpectRowsOfTheTable<bf16>(ids, 7, D, threads);
      }
    }
    ExpectRowsOfTheTable<bf16>(many, 7, 300, threads);
    ExpectRowsOfTheTable<bf16>(many, 7, 5120, threads, 0, 0);  // in wide words
  }
}

// Seven ids over four ranks of two rows, the last row of zeros: every id is one rank's, and the others add
// nothing.
TEST(EmbedOwnRowsTest, PartsAddUpToTheLookup) {
  const Stream stream = *Stream::Create({.threads = 2});
  const std::vector<int32_t> ids = {6, 0, 3, 3, 5, 1, 2, 4};
  for (int64_t D : {1, 16, 17, 300}) {
    HostMatrix<bf16> table = RandomMatrix<bf16>(8, D, 1);
    for (int64_t d = 0; d < D; ++d) table.At(7, d) = bf16(0.0f);
    DeviceArray<int32_t> device_ids(ids, stream);
    const auto T = static_cast<int64_t>(ids.size());
    for (int64_t rank = 0; rank < 4; ++rank) {
      HostMatrix<bf16> own(2, D);
      for (int64_t d = 0; d < D; ++d) {
        own.At(0, d) = table.At(2 * rank, d);
        own.At(1, d) = table.At(2 * rank + 1, d);
      }
      const DeviceMatrix device_table = DeviceMatrix::Input(own, stream, 3);
      const DeviceMatrix y = DeviceMatrix::Output(T, D, ActivationDType(), stream, 5);
      ASSERT_TRUE(EmbedOwnRows(device_ids.data(), device_table.view(), 2 * rank, y.view(), stream).ok());
      const HostMatrix<float> part = y.ToHost();
      for (int64_t t = 0; t < T; ++t) {
        for (int64_t d = 0; d < D; ++d) {
          const int32_t id = ids[static_cast<size_t>(t)];
          const float expected = id / 2 == rank ? static_cast<float>(table.At(id, d)) : 0.0f;
          ASSERT_EQ(part.At(t, d), expected) << "rank " << rank << ", id " << id;
        }
      }
      EXPECT_TRUE(y.GuardsIntact());
    }
    EXPECT_EQ(EmbedOwnRows(device_ids.data(), DeviceMatrix::Input(table, stream).view(), -1,
                           DeviceMatrix::Output(T, D, ActivationDType(), stream).view(), stream)
                  .code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST(EmbedRowsTest, RefusesWhatDoesNotFit) {
  const Stream stream = *Stream::Create({.threads = 1});
  DeviceArray<int32_t> ids({0, 1}, stream);
  const DeviceMatrix table = DeviceMatrix::Input(RandomMatrix<bf16>(7, 16, 1), stream);
  const DeviceMatrix narrow = DeviceMatrix::Output(2, 15, ActivationDType(), stream);
  const DeviceMatrix fits = DeviceMatrix::Output(2, 16, ActivationDType(), stream);
  EXPECT_EQ(EmbedRows(ids.data(), table.view(), narrow.view(), stream).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(EmbedRows(nullptr, table.view(), fits.view(), stream).code(), absl::StatusCode::kInvalidArgument);
  const DType wrong = ActivationDType() == DType::kF32 ? DType::kBf16 : DType::kF32;
  const DeviceMatrix other = DeviceMatrix::Output(2, 16, wrong, stream);
  EXPECT_EQ(EmbedRows(ids.data(), table.view(), other.view(), stream).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dflash
