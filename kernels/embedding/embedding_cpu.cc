#include <algorithm>

#include "base/check.h"
#include "kernels/device/cpu/thread_pool.h"
#include "kernels/embedding/embedding_backend.h"

namespace dflash::backend {

namespace {

// Calls row_of(id) for the table's row of an id, or -1 for zeros.
template <typename RowOf>
void Embed(const int32_t* ids, const ConstMatrixView& table, const MatrixView& y, const Stream& stream,
           const RowOf& row_of) {
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, y.cols));
  ParallelFor(stream, y.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = row_of(ids[t]);
      float* out = y.Row<float>(t);
      if (row < 0) {
        std::fill_n(out, y.cols, 0.0f);
      } else if (table.dtype == DType::kF32) {
        std::copy_n(table.Row<float>(row), y.cols, out);
      } else {
        const bf16* in = table.Row<bf16>(row);
        for (int64_t d = 0; d < y.cols; ++d) out[d] = static_cast<float>(in[d]);
      }
    }
  });
}

}  // namespace

absl::Status EmbedRows(const int32_t* ids, ConstMatrixView table, MatrixView y, const Stream& stream) {
  Embed(ids, table, y, stream, [&](int32_t id) {
    DFLASH_CHECK(id >= 0 && id < table.rows, "EmbedRows: id out of range");
    return int64_t{id};
  });
  return absl::OkStatus();
}

absl::Status EmbedOwnRows(const int32_t* ids, ConstMatrixView table, int64_t first_id, MatrixView y,
                          const Stream& stream) {
  Embed(ids, table, y, stream, [&](int32_t id) {
    DFLASH_CHECK(id >= 0, "EmbedOwnRows: id out of range");
    return id >= first_id && id < first_id + table.rows ? id - first_id : int64_t{-1};
  });
  return absl::OkStatus();
}

}  // namespace dflash::backend
