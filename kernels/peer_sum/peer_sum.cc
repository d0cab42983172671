#include "kernels/peer_sum/peer_sum.h"

#include "absl/strings/str_cat.h"
#include "kernels/device/buffer.h"
#include "kernels/device/describe.h"
#include "kernels/peer_sum/peer_area.h"
#include "kernels/peer_sum/peer_sum_backend.h"

namespace dflash {

int64_t PeerAreas::Bytes(int64_t max_rows, int64_t cols) {
  return PeerCounterBytes(max_rows) + 2 * max_rows * cols * SizeOf(ActivationDType());
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
