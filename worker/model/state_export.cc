#include "worker/model/state_export.h"

#include "base/status.h"
#include "kernels/device/buffer.h"

namespace dflash {

absl::StatusOr<std::vector<float>> ActivationsToHost(ConstMatrixView matrix, const Stream& stream) {
  std::vector<float> values;
  values.reserve(static_cast<size_t>(matrix.rows * matrix.cols));
  for (int64_t row = 0; row < matrix.rows; ++row) {
    const ConstMatrixView line = matrix.Rows(row, 1);
    if (matrix.dtype == DType::kF32) {
      values.resize(values.size() + static_cast<size_t>(matrix.cols));
      DFLASH_RETURN_IF_ERROR(CopyToHost(values.data() + values.size() - matrix.cols, line.data,
                                        matrix.cols * int64_t{sizeof(float)}, stream));
      continue;
    }
    std::vector<bf16> narrow(static_cast<size_t>(matrix.cols));
    DFLASH_RETURN_IF_ERROR(CopyToHost(narrow.data(), line.data, matrix.cols * int64_t{sizeof(bf16)}, stream));
    for (bf16 value : narrow) values.push_back(static_cast<float>(value));
  }
  return values;
}

absl::StatusOr<std::vector<std::vector<float>>> ExportKeyValue(const KeyValuePool& pool, PageTable table,
                                                               int32_t slot, int64_t length,
                                                               const Stream& stream) {
  const int64_t cols = pool.kv_heads * pool.head_dim;
  DFLASH_ASSIGN_OR_RETURN(Matrix keys, Matrix::Allocate(length, cols, ActivationDType(), stream));
  DFLASH_ASSIGN_OR_RETURN(Matrix values, Matrix::Allocate(length, cols, ActivationDType(), stream));
  DFLASH_RETURN_IF_ERROR(LoadKeyValue(pool, table, slot, 0, keys.view(), values.view(), stream));
  std::vector<std::vector<float>> stores(2);
  DFLASH_ASSIGN_OR_RETURN(stores[0], ActivationsToHost(keys.view(), stream));
  DFLASH_ASSIGN_OR_RETURN(stores[1], ActivationsToHost(values.view(), stream));
  return stores;
}

absl::Status FillKeyValue(const KeyValuePool& pool, const std::vector<int32_t>& pages, float value,
                          const Stream& stream) {
  const int64_t bytes = pool.PageBytes();
  const auto count = static_cast<size_t>(bytes / SizeOf(ActivationDType()));
  const std::vector<float> wide(count, value);
  const std::vector<bf16> narrow(count, bf16(value));
  const void* values =
      ActivationDType() == DType::kF32 ? static_cast<const void*>(wide.data()) : narrow.data();
  for (int32_t page : pages) {
    DFLASH_RETURN_IF_ERROR(CopyToDevice(static_cast<char*>(pool.data) + page * bytes, values, bytes, stream));
  }
  return absl::OkStatus();
}

}  // namespace dflash
