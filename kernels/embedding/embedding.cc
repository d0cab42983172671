#include "kernels/embedding/embedding.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/buffer.h"
#include "kernels/device/describe.h"
#include "kernels/embedding/embedding_backend.h"

namespace dflash {

namespace {

absl::Status Check(const char* operation, const int32_t* ids, ConstMatrixView table, MatrixView y) {
  if (!IsWellFormed(table) || !IsWellFormed(y) || table.cols != y.cols || y.dtype != ActivationDType()) {
    return absl::InvalidArgumentError(
        absl::StrCat(operation, ": table ", Describe(table), ", y ", Describe(y)));
  }
  if (y.rows > 0 && ids == nullptr) return absl::InvalidArgumentError(absl::StrCat(operation, ": no ids"));
  return absl::OkStatus();
}

}  // namespace

absl::Status EmbedRows(const int32_t* ids, ConstMatrixView table, MatrixView y, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(Check("EmbedRows", ids, table, y));
  if (y.rows == 0) return absl::OkStatus();
  return backend::EmbedRows(ids, table, y, stream);
}

absl::Status EmbedOwnRows(const int32_t* ids, ConstMatrixView table, int64_t first_id, MatrixView y,
                          const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(Check("EmbedOwnRows", ids, table, y));
  if (first_id < 0) return absl::InvalidArgumentError(absl::StrCat("EmbedOwnRows: first id ", first_id));
  if (y.rows == 0) return absl::OkStatus();
  return backend::EmbedOwnRows(ids, table, first_id, y, stream);
}

}  // namespace dflash
