#include "kernels/embedding/embedding.h"

#include "absl/strings/str_cat.h"
#include "kernels/device/buffer.h"
#include "kernels/device/describe.h"
#include "kernels/embedding/embedding_backend.h"

namespace dflash {

absl::Status EmbedRows(const int32_t* ids, ConstMatrixView table, MatrixView y, const Stream& stream) {
  if (!IsWellFormed(table) || !IsWellFormed(y) || table.cols != y.cols || y.dtype != ActivationDType()) {
    return absl::InvalidArgumentError(
        absl::StrCat("EmbedRows: table ", Describe(table), ", y ", Describe(y)));
  }
  if (y.rows == 0) return absl::OkStatus();
  if (ids == nullptr) return absl::InvalidArgumentError("EmbedRows: no ids");
  return backend::EmbedRows(ids, table, y, stream);
}

}  // namespace dflash
