#include <algorithm>
#include <atomic>
#include <memory>

#include "absl/time/clock.h"
#include "base/futex.h"
#include "kernels/peer_sum/peer_area.h"
#include "kernels/peer_sum/peer_sum_backend.h"

namespace dflash::backend {
namespace {

constexpr int kSpins = 200;
// A stop may come just before a rank begins to wait.
constexpr absl::Duration kLookForStop = absl::Milliseconds(20);

// One rank's area. Ranks are threads of this process or processes.
struct Area {
  uint32_t* stop;
  uint32_t* counters;
  float* rows;

  Area(const PeerAreas& areas, int rank) {
    auto* bytes = static_cast<std::byte*>(areas.area[rank]);
    stop = reinterpret_cast<uint32_t*>(bytes);
    counters = reinterpret_cast<uint32_t*>(bytes + kPeerCountersOffset);
    rows = reinterpret_cast<float*>(bytes + PeerRowsOffset(areas.max_rows));
  }
  std::atomic_ref<uint32_t> Counter(int64_t row) const { return std::atomic_ref<uint32_t>(counters[row]); }
};

// Waits until `peer` has published its row `row` for the `count`-th time. 0, or what *late becomes.
int32_t Await(const Area& own, const Area& peer, int peer_rank, int64_t row, uint32_t count,
              absl::Time deadline) {
  for (int spins = 0;; ++spins) {
    const uint32_t now = peer.Counter(row).load(std::memory_order_acquire);
    if (static_cast<int32_t>(now - count) >= 0) return 0;
    if (spins < kSpins) continue;
    if (std::atomic_ref<uint32_t>(*own.stop).load(std::memory_order_relaxed) != 0) return kPeerSumStopped;
    const absl::Time time = absl::Now();
    if (time >= deadline) return 1 + peer_rank;
    FutexWait(&peer.counters[row], now, std::min(kLookForStop, deadline - time));
  }
}

}  // namespace

absl::Status PeerSumAddRmsNorm(const PeerAreas& areas, ConstMatrixView product, MatrixView residual,
                               ConstMatrixView w, NormWeight weight, float eps, MatrixView y,
                               absl::Duration timeout, int32_t* late, const Stream& stream) {
  const int64_t rows = product.rows, cols = product.cols;
  const auto place = [&](const Area& area, uint32_t count, int64_t row) {
    return area.rows + ((count & 1) * areas.max_rows + row) * cols;
  };
  const Area own(areas, areas.rank);
  for (int64_t row = 0; row < rows; ++row) {
    const uint32_t count = own.Counter(row).load(std::memory_order_relaxed) + 1;
    std::copy_n(product.Row<float>(row), cols, place(own, count, row));
    own.Counter(row).store(count, std::memory_order_release);
  }
  // Rows are published in order: whoever sees the last one sees all.
  const int64_t last = rows - 1;
  FutexWake(&own.counters[last]);
  const absl::Time deadline = absl::Now() + timeout;
  // Only this rank counts here: what it reads now is what it has just written.
  const auto count_of = [&](int64_t row) { return own.Counter(row).load(std::memory_order_relaxed); };
  const std::unique_ptr<float[]> sums(new float[static_cast<size_t>(rows * cols)]);
  for (int rank = 0; rank < areas.size; ++rank) {
    const Area peer(areas, rank);
    if (const int32_t why = Await(own, peer, rank, last, count_of(last), deadline); why != 0) {
      *late = why;
      return absl::OkStatus();
    }
    for (int64_t row = 0; row < rows; ++row) {
      const float* term = place(peer, count_of(row), row);
      float* sum = sums.get() + row * cols;
      if (rank == 0) {
        std::copy_n(term, cols, sum);
      } else {
        for (int64_t c = 0; c < cols; ++c) sum[c] += term[c];
      }
    }
  }
  return dflash::AddRmsNorm(residual, ConstMatrixView(sums.get(), rows, cols), w, weight, eps, y, stream);
}

}  // namespace dflash::backend
