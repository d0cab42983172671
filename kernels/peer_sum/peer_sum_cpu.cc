// A rank writes into its own area what the others read: rows, or a message, and then a counter, which those
// who wait for it watch. Two places are used in turn, so a rank may write again while the slowest one still
// reads.
//
// An area: uint32 stop word; uint32 counters [max_rows] of rows; uint32 counters of messages published and
// of those read; rows [2, max_rows, cols]; messages [2, kMaxMessageBytes]; each part aligned.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "absl/time/clock.h"
#include "base/futex.h"
#include "kernels/device/buffer.h"
#include "kernels/peer_sum/peer_sum_backend.h"

namespace dflash::backend {
namespace {

constexpr int kSpins = 200;
// A stop may come just before a rank begins to wait.
constexpr absl::Duration kLookForStop = absl::Milliseconds(20);

constexpr int64_t kAlignment = 256;
constexpr int64_t kPublishedOffset = kAlignment, kReadOffset = 2 * kAlignment;
constexpr int64_t kCountersOffset = 3 * kAlignment;
constexpr int64_t kMessagesOffset = kCountersOffset + PeerAreas::kMaxRows * int64_t{sizeof(uint32_t)};
constexpr int64_t kRowsOffset = kMessagesOffset + 2 * PeerAreas::kMaxMessageBytes;

// One rank's area. Ranks are threads of this process or processes.
struct Area {
  uint32_t* stop;
  uint32_t* published;
  uint32_t* read;
  uint32_t* counters;
  std::byte* messages;
  float* rows;

  Area(const PeerAreas& areas, int rank) {
    auto* bytes = static_cast<std::byte*>(areas.area[rank]);
    stop = reinterpret_cast<uint32_t*>(bytes);
    published = reinterpret_cast<uint32_t*>(bytes + kPublishedOffset);
    read = reinterpret_cast<uint32_t*>(bytes + kReadOffset);
    counters = reinterpret_cast<uint32_t*>(bytes + kCountersOffset);
    messages = bytes + kMessagesOffset;
    rows = reinterpret_cast<float*>(bytes + kRowsOffset);
  }
  std::byte* Message(uint32_t count) const {
    return messages + (count & 1) * static_cast<size_t>(PeerAreas::kMaxMessageBytes);
  }
};

std::atomic_ref<uint32_t> Atomic(uint32_t* word) { return std::atomic_ref<uint32_t>(*word); }

// Waits until a peer's counter has come to `count`; false, and *late says why, when it does not.
class Waiting {
 public:
  Waiting(const Area& own, const PeerPatience& patience)
      : own_(own), late_(patience.late), deadline_(absl::Now() + patience.timeout) {}

  bool Await(uint32_t* counter, uint32_t count, int peer_rank) const {
    for (int spins = 0;; ++spins) {
      const uint32_t now = Atomic(counter).load(std::memory_order_acquire);
      if (static_cast<int32_t>(now - count) >= 0) return true;
      if (spins < kSpins) continue;
      if (Atomic(own_.stop).load(std::memory_order_relaxed) != 0) return Fail(kPeerSumStopped);
      const absl::Time time = absl::Now();
      if (time >= deadline_) return Fail(1 + peer_rank);
      FutexWait(counter, now, std::min(kLookForStop, deadline_ - time));
    }
  }

 private:
  // The first cause stays; nobody waits again.
  bool Fail(int32_t why) const {
    if (*late_ == 0) *late_ = why;
    Atomic(own_.stop).store(1, std::memory_order_relaxed);
    return false;
  }
  const Area& own_;
  int32_t* late_;
  absl::Time deadline_;
};

}  // namespace

int64_t PeerAreaBytes(int, int64_t max_rows, int64_t cols) {
  return kRowsOffset + 2 * max_rows * cols * int64_t{sizeof(float)};
}

int64_t UsefulPeerSumRows() { return 128; }

absl::Status PreparePeerArea(void*, int64_t, int, const Stream&) { return absl::OkStatus(); }

absl::Status PeerSum(const PeerAreas& areas, ConstMatrixView product, const MatrixView* residual,
                     ConstMatrixView w, NormWeight weight, float eps, MatrixView y,
                     const PeerPatience& patience, const Stream& stream) {
  const int64_t rows = product.rows, cols = product.cols;
  const auto place = [&](const Area& area, uint32_t count, int64_t row) {
    return area.rows + ((count & 1) * areas.max_rows + row) * cols;
  };
  const Area own(areas, areas.rank);
  for (int64_t row = 0; row < rows; ++row) {
    const uint32_t count = Atomic(&own.counters[row]).load(std::memory_order_relaxed) + 1;
    std::copy_n(product.Row<float>(row), cols, place(own, count, row));
    Atomic(&own.counters[row]).store(count, std::memory_order_release);
  }
  // Rows are published in order: whoever sees the last one sees all.
  const int64_t last = rows - 1;
  FutexWake(&own.counters[last]);
  const Waiting waiting(own, patience);
  // Only this rank counts here: what it reads now is what it has just written.
  const auto count_of = [&](int64_t row) {
    return Atomic(&own.counters[row]).load(std::memory_order_relaxed);
  };
  const std::unique_ptr<float[]> sums(new float[static_cast<size_t>(rows * cols)]);
  for (int rank = 0; rank < areas.size; ++rank) {
    const Area peer(areas, rank);
    if (!waiting.Await(&peer.counters[last], count_of(last), rank)) return absl::OkStatus();
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
  const ConstMatrixView sum(sums.get(), rows, cols);
  if (residual == nullptr) return CopyRows(sum, y, stream);
  return dflash::AddRmsNorm(*residual, sum, w, weight, eps, y, stream);
}

absl::Status PeerExchange(const PeerAreas& areas, const void* send, void* receive, int64_t bytes, int root,
                          const PeerPatience& patience, const Stream&) {
  const Area own(areas, areas.rank);
  const Waiting waiting(own, patience);
  const auto size = static_cast<size_t>(bytes);
  const uint32_t count = Atomic(own.published).load(std::memory_order_relaxed) + 1;
  const auto sends = [&](int rank) { return root < 0 || rank == root; };
  if (sends(areas.rank)) {
    // Everybody has read what lay in this place.
    for (int rank = 0; rank < areas.size; ++rank) {
      if (!waiting.Await(Area(areas, rank).read, count - 2, rank)) return absl::OkStatus();
    }
    std::memcpy(own.Message(count), send, size);
  }
  Atomic(own.published).store(count, std::memory_order_release);
  FutexWake(own.published);
  for (int rank = 0; rank < areas.size; ++rank) {
    if (!sends(rank)) continue;
    const Area peer(areas, rank);
    if (!waiting.Await(peer.published, count, rank)) return absl::OkStatus();
    std::memcpy(static_cast<std::byte*>(receive) + (root < 0 ? static_cast<size_t>(rank) * size : 0),
                peer.Message(count), size);
  }
  Atomic(own.read).store(count, std::memory_order_release);
  FutexWake(own.read);
  return absl::OkStatus();
}

}  // namespace dflash::backend
