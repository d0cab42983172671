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

ThreadPool::ThreadPool(int threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { WorkerMain(); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  ticket_.fetch_add(uint64_t{1} << (2 * kPartBits));  // a new epoch without parts wakes everybody
  ticket_.notify_all();
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
  items_ = items;
  grain_ = grain;
  body_ = body;
  context_ = context;
  parts_done_.store(0, std::memory_order_relaxed);
  const uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> (2 * kPartBits)) + 1;
  ticket_.store(epoch << (2 * kPartBits) | static_cast<uint64_t>(parts) << kPartBits,
                std::memory_order_release);
  ticket_.notify_all();
  TakeParts(epoch & 0xffffff);
  for (int spin = 0; parts_done_.load(std::memory_order_acquire) != parts; ++spin) {
    if (spin < kSpins) {
      CpuRelax();
    } else {
      std::this_thread::yield();
    }
  }
}

void ThreadPool::TakeParts(uint64_t epoch) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (true) {
    const int64_t next = static_cast<int64_t>(ticket) & kMaxParts;
    const int64_t parts = static_cast<int64_t>(ticket >> kPartBits) & kMaxParts;
    if (ticket >> (2 * kPartBits) != epoch || next >= parts) return;
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acquire)) continue;
    // This part is ours, so the loop cannot end and its fields cannot change before it is done.
    body_(context_, next * grain_, std::min(items_, (next + 1) * grain_));
    parts_done_.fetch_add(1, std::memory_order_release);
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void ThreadPool::WorkerMain() {
  uint64_t seen = 0;
  while (!stop_.load()) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    for (int spin = 0; ticket >> (2 * kPartBits) == seen && spin < kSpins; ++spin) {
      CpuRelax();
      ticket = ticket_.load(std::memory_order_acquire);
    }
    if (ticket >> (2 * kPartBits) == seen) {
      ticket_.wait(ticket, std::memory_order_acquire);  // parts taken by others also wake us: harmless
      continue;
    }
    seen = ticket >> (2 * kPartBits);
    TakeParts(seen);
  }
}

}  // namespace dflash
