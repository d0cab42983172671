#include <algorithm>

#include "kernels/device/cpu/thread_pool.h"
#include "kernels/random_weights/random_weights_backend.h"

namespace dflash::backend {

absl::Status FillRandom(const RandomTensor& tensor, int64_t tensor_cols, int64_t first_row, int64_t first_col,
                        MatrixView y, const Stream& stream) {
  const int64_t grain = std::max<int64_t>(1, 65536 / y.cols);
  ParallelFor(stream, y.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto first = static_cast<uint64_t>((first_row + row) * tensor_cols + first_col);
      for (int64_t col = 0; col < y.cols; ++col) {
        const float value = RandomElement(tensor, first + static_cast<uint64_t>(col));
        if (y.dtype == DType::kF32) {
          y.Row<float>(row)[col] = value;
        } else {
          y.Row<bf16>(row)[col] = bf16(value);
        }
      }
    }
  });
  return absl::OkStatus();
}

}  // namespace dflash::backend
