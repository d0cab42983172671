#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "kernels/device/cpu/thread_pool.h"
#include "kernels/peer_sum/peer_area.h"
#include "kernels/peer_sum/peer_sum_backend.h"

namespace dflash::backend {
namespace {

// One rank's area: ranks are threads of this process.
struct Area {
  uint32_t* counters;
  float* rows;

  Area(const PeerAreas& areas, int rank)
      : counters(static_cast<uint32_t*>(areas.area[rank])),
        rows(reinterpret_cast<float*>(static_cast<std::byte*>(areas.area[rank]) +
                                      PeerCounterBytes(areas.max_rows))) {}
  std::atomic_ref<uint32_t> Counter(int64_t row) const { return std::atomic_ref<uint32_t>(counters[row]); }
};

}  // namespace

absl::Status PeerSumAddRmsNorm(const PeerAreas& areas, ConstMatrixView product, MatrixView residual,
                               ConstMatrixView w, NormWeight weight, float eps, MatrixView y,
                               absl::Duration timeout, int32_t* late, const Stream& stream) {
  const int64_t rows = product.rows, cols = product.cols;
  const auto place = [&](const Area& area, uint32_t count, int64_t row) {
    return area.rows + ((count & 1) * areas.max_rows + row) * cols;
  };
  const Area own(areas, areas.rank);
  std::vector<uint32_t> counts(static_cast<size_t>(rows));
  for (int64_t row = 0; row < rows; ++row) {
    uint32_t& count = counts[static_cast<size_t>(row)];
    count = own.Counter(row).load(std::memory_order_relaxed) + 1;
    std::copy_n(product.Row<float>(row), cols, place(own, count, row));
    own.Counter(row).store(count, std::memory_order_release);
  }
  std::vector<float> sums(static_cast<size_t>(rows * cols));
  const absl::Time deadline = absl::Now() + timeout;
  for (int64_t row = 0; row < rows; ++row) {
    const uint32_t count = counts[static_cast<size_t>(row)];
    float* sum = &sums[static_cast<size_t>(row * cols)];
    for (int rank = 0; rank < areas.size; ++rank) {
      const Area peer(areas, rank);
      for (int64_t looks = 0;
           static_cast<int32_t>(peer.Counter(row).load(std::memory_order_acquire) - count) < 0; ++looks) {
        std::this_thread::yield();
        if (looks % 256 == 255 && absl::Now() > deadline) {
          *late = 1 + rank;
          return absl::OkStatus();
        }
      }
      const float* term = place(peer, count, row);
      for (int64_t c = 0; c < cols; ++c) sum[c] = rank == 0 ? term[c] : sum[c] + term[c];
    }
  }
  return dflash::AddRmsNorm(residual, ConstMatrixView(sums.data(), rows, cols), w, weight, eps, y, stream);
}

}  // namespace dflash::backend
