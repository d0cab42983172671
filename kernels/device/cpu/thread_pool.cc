#include "kernels/device/cpu/thread_pool.h"

#include <algorithm>

namespace dflash {
namespace {

constexpr int kSpins = 4000;  // about 50 us: longer than the gap between two operations of one step

inline void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) : shares_(static_cast<size_t>(threads)) {
  for (size_t i = 1; i < shares_.size(); ++i) workers_.emplace_back([this, i] { WorkerMain(i); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  for (Share& share : shares_) {
    share.ticket.fetch_add(uint64_t{1} << (2 * kPartBits));  // a new epoch without parts wakes everybody
    share.ticket.notify_all();
  }
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::Run(int64_t items, int64_t grain, Body body, const void* context) {
  if (items <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  grain = std::max(grain, (items + kMaxParts - 1) / kMaxParts);
  const int64_t parts = (items + grain - 1) / grain;
  if (parts == 1 || workers_.empty()) {
    body(context, 0, items);
    return;
  }
  parts_done_.store(0, std::memory_order_relaxed);
  epoch_ = (epoch_ + 1) & 0xffffff;
  const auto threads = static_cast<int64_t>(shares_.size());
  for (int64_t i = threads - 1; i >= 0; --i) {  // the caller's own last: others begin earlier
    Share& share = shares_[static_cast<size_t>(i)];
    const auto next = static_cast<uint64_t>(parts * i / threads);
    const auto end = static_cast<uint64_t>(parts * (i + 1) / threads);
    share.loop = {items, grain, body, context};
    share.ticket.store(epoch_ << (2 * kPartBits) | end << kPartBits | next, std::memory_order_release);
    if (i > 0) share.ticket.notify_one();
  }
  TakeParts(epoch_, 0);
  for (int spin = 0; parts_done_.load(std::memory_order_acquire) != parts; ++spin) {
    if (spin < kSpins) {
      CpuRelax();
    } else {
      std::this_thread::yield();
    }
  }
}

void ThreadPool::TakeParts(uint64_t epoch, size_t self) {
  int64_t done = 0;
  for (size_t i = 0; i < shares_.size(); ++i) {
    Share& share = shares_[(self + i) % shares_.size()];
    uint64_t ticket = share.ticket.load(std::memory_order_acquire);
    while (true) {
      const int64_t next = static_cast<int64_t>(ticket) & kMaxParts;
      const int64_t end = static_cast<int64_t>(ticket >> kPartBits) & kMaxParts;
      if (ticket >> (2 * kPartBits) != epoch || next >= end) break;
      if (!share.ticket.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acquire)) continue;
      // This part is ours, so the loop cannot end and its description cannot change before it is counted.
      const Loop& loop = share.loop;
      loop.body(loop.context, next * loop.grain, std::min(loop.items, (next + 1) * loop.grain));
      ++done;
      ticket = share.ticket.load(std::memory_order_acquire);
    }
  }
  if (done > 0) parts_done_.fetch_add(done, std::memory_order_release);
}

void ThreadPool::WorkerMain(size_t self) {
  std::atomic<uint64_t>& share = shares_[self].ticket;
  uint64_t seen = 0;
  while (!stop_.load()) {
    uint64_t ticket = share.load(std::memory_order_acquire);
    for (int spin = 0; ticket >> (2 * kPartBits) == seen && spin < kSpins; ++spin) {
      CpuRelax();
      ticket = share.load(std::memory_order_acquire);
    }
    if (ticket >> (2 * kPartBits) == seen) {
      share.wait(ticket, std::memory_order_acquire);  // parts taken by others also wake us: harmless
      continue;
    }
    seen = ticket >> (2 * kPartBits);
    TakeParts(seen, self);
  }
}

}  // namespace dflash
