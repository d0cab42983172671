#include "kernels/peer_sum/peer_sum.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/buffer.h"
#include "kernels/device/describe.h"
#include "kernels/peer_sum/peer_area.h"
#include "kernels/peer_sum/peer_sum_backend.h"

namespace dflash {

int64_t PeerAreas::Bytes(int64_t max_rows, int64_t cols) {
  return PeerRowsOffset(max_rows) + 2 * max_rows * cols * SizeOf(ActivationDType());
}

int64_t PeerAreas::RowsThatFit(int64_t bytes, int64_t cols) {
  int64_t rows = (bytes - kPeerCountersOffset) / (2 * cols * SizeOf(ActivationDType()));
  while (rows > 0 && Bytes(rows, cols) > bytes) --rows;
  return std::max<int64_t>(rows, 0);
}

absl::Status StopPeerSums(const PeerAreas& areas, const Stream& stream) {
  const uint32_t stop = 1;
  for (int rank = 0; rank < areas.size; ++rank)
    DFLASH_RETURN_IF_ERROR(CopyToDevice(areas.area[rank], &stop, sizeof(stop), stream));
  return absl::OkStatus();
}

absl::Status PeerSumAddRmsNorm(const PeerAreas& areas, ConstMatrixView product, MatrixView residual,
                               ConstMatrixView w, NormWeight weight, float eps, MatrixView y,
                               absl::Duration timeout, int32_t* late, const Stream& stream) {
  const auto fits = [&](const ConstMatrixView& view) {
    return IsWellFormed(view) && view.rows == product.rows && view.cols == areas.cols &&
           view.dtype == ActivationDType();
  };
  bool areas_fit = areas.size >= 1 && areas.size <= PeerAreas::kMaxRanks && areas.rank >= 0 &&
                   areas.rank < areas.size && product.rows <= areas.max_rows;
  for (int rank = 0; areas_fit && rank < areas.size; ++rank) areas_fit = areas.area[rank] != nullptr;
  if (!areas_fit || !fits(product) || !fits(residual) || !fits(y) || !IsWellFormed(w) || w.rows != 1 ||
      w.cols != areas.cols || areas.cols < 1 || !(eps > 0) || late == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("PeerSumAddRmsNorm: product ", Describe(product), ", residual ", Describe(residual),
                     ", w ", Describe(w), ", y ", Describe(y), ", rank ", areas.rank, " of ", areas.size,
                     ", areas of ", areas.max_rows, "x", areas.cols, ", eps ", eps));
  }
  if (product.rows == 0) return absl::OkStatus();
  return backend::PeerSumAddRmsNorm(areas, product, residual, w, weight, eps, y, timeout, late, stream);
}

}  // namespace dflash
