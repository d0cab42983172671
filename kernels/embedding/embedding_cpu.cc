#include <algorithm>

#include "base/check.h"
#include "kernels/device/cpu/thread_pool.h"
#include "kernels/embedding/embedding_backend.h"

namespace dflash::backend {

absl::Status EmbedRows(const int32_t* ids, ConstMatrixView table, MatrixView y, const Stream& stream) {
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, y.cols));
  ParallelFor(stream, y.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      DFLASH_CHECK(ids[t] >= 0 && ids[t] < table.rows, "EmbedRows: id out of range");
      float* out = y.Row<float>(t);
      if (table.dtype == DType::kF32) {
        std::copy_n(table.Row<float>(ids[t]), y.cols, out);
      } else {
        const bf16* in = table.Row<bf16>(ids[t]);
        for (int64_t d = 0; d < y.cols; ++d) out[d] = static_cast<float>(in[d]);
      }
    }
  });
  return absl::OkStatus();
}

}  // namespace dflash::backend
