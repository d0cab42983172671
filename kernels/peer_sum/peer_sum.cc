#include "kernels/peer_sum/peer_sum.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/buffer.h"
#include "kernels/device/describe.h"
#include "kernels/peer_sum/peer_sum_backend.h"

namespace dflash {
namespace {

bool AreFit(const PeerAreas& areas, const PeerPatience& patience) {
  bool fit = areas.size >= 1 && areas.size <= PeerAreas::kMaxRanks && areas.rank >= 0 &&
             areas.rank < areas.size && areas.max_rows <= PeerAreas::kMaxRows && patience.late != nullptr;
  for (int rank = 0; fit && rank < areas.size; ++rank) fit = areas.area[rank] != nullptr;
  return fit;
}

bool AreRows(const PeerAreas& areas, ConstMatrixView view, int64_t rows) {
  return IsWellFormed(view) && view.rows == rows && rows <= areas.max_rows && view.cols == areas.cols &&
         areas.cols >= 1 && view.dtype == ActivationDType();
}

std::string Describe(const PeerAreas& areas) {
  return absl::StrCat("rank ", areas.rank, " of ", areas.size, ", areas of ", areas.max_rows, "x",
                      areas.cols);
}

absl::Status CheckMessage(const char* operation, const PeerAreas& areas, const PeerPatience& patience,
                          const void* send, const void* receive, int64_t bytes) {
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 4 == 0; };
  if (AreFit(areas, patience) && bytes >= 0 && bytes % 4 == 0 && bytes <= PeerAreas::kMaxMessageBytes &&
      aligned(send) && aligned(receive))
    return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(operation, " of ", bytes, " bytes, ", Describe(areas)));
}

}  // namespace

int64_t PeerAreas::Bytes(int size, int64_t max_rows, int64_t cols) {
  return backend::PeerAreaBytes(size, max_rows, cols);
}

int64_t PeerAreas::RowsThatFit(int size, int64_t bytes, int64_t cols) {
  // The size is linear in the rows.
  const int64_t none = Bytes(size, 0, cols);
  const int64_t per_row = Bytes(size, 1, cols) - none;
  return std::clamp<int64_t>((bytes - none) / per_row, 0, kMaxRows);
}

int64_t UsefulPeerSumRows() { return backend::UsefulPeerSumRows(); }

absl::Status PreparePeerArea(void* area, int64_t bytes, int size, const Stream& stream) {
  return backend::PreparePeerArea(area, bytes, size, stream);
}

absl::Status StopPeerSums(const PeerAreas& areas, const Stream& stream) {
  const uint32_t stop = 1;
  for (int rank = 0; rank < areas.size; ++rank)
    DFLASH_RETURN_IF_ERROR(CopyToDevice(areas.area[rank], &stop, sizeof(stop), stream));
  return absl::OkStatus();
}

absl::Status PeerSumAddRmsNorm(const PeerAreas& areas, ConstMatrixView product, MatrixView residual,
                               ConstMatrixView w, NormWeight weight, float eps, MatrixView y,
                               const PeerPatience& patience, const Stream& stream) {
  const auto fits = [&](const ConstMatrixView& view) { return AreRows(areas, view, product.rows); };
  if (!AreFit(areas, patience) || !fits(product) || !fits(residual) || !fits(y) || !IsWellFormed(w) ||
      w.rows != 1 || w.cols != areas.cols || !(eps > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("PeerSumAddRmsNorm: product ", Describe(product), ", residual ", Describe(residual),
                     ", w ", Describe(w), ", y ", Describe(y), ", ", Describe(areas), ", eps ", eps));
  }
  if (product.rows == 0) return absl::OkStatus();
  return backend::PeerSum(areas, product, &residual, w, weight, eps, y, patience, stream);
}

absl::Status PeerSum(const PeerAreas& areas, MatrixView rows, const PeerPatience& patience,
                     const Stream& stream) {
  if (!AreFit(areas, patience) || !AreRows(areas, rows, rows.rows))
    return absl::InvalidArgumentError(absl::StrCat("PeerSum: rows ", Describe(rows), ", ", Describe(areas)));
  if (rows.rows == 0) return absl::OkStatus();
  return backend::PeerSum(areas, rows, nullptr, ConstMatrixView(), NormWeight::kPlain, 1, rows, patience,
                          stream);
}

absl::Status PeerGather(const PeerAreas& areas, const void* send, void* receive, int64_t bytes,
                        const PeerPatience& patience, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckMessage("PeerGather", areas, patience, send, receive, bytes));
  if (bytes == 0) return absl::OkStatus();
  return backend::PeerExchange(areas, send, receive, bytes, /*root=*/-1, patience, stream);
}

absl::Status PeerBroadcast(const PeerAreas& areas, void* data, int64_t bytes, int root,
                           const PeerPatience& patience, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckMessage("PeerBroadcast", areas, patience, data, data, bytes));
  if (root < 0 || root >= areas.size)
    return absl::InvalidArgumentError(absl::StrCat("PeerBroadcast from rank ", root, " of ", areas.size));
  if (bytes == 0) return absl::OkStatus();
  return backend::PeerExchange(areas, data, data, bytes, root, patience, stream);
}

}  // namespace dflash
