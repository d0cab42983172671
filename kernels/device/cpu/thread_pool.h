// The CPU backend's threads: a parallel loop over outputs, started thousands of times a second.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "kernels/device/stream.h"

namespace dflash {

// Runs one loop at a time, for one calling thread. Idle workers spin for some tens of microseconds, then
// sleep.
class ThreadPool {
 public:
  using Body = void (*)(const void* context, int64_t begin, int64_t end);

  explicit ThreadPool(int threads);  // the caller is one of them
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body on disjoint parts [begin, end) that cover [0, items), each of about `grain` items, and returns
  // when all are done.
  void Run(int64_t items, int64_t grain, Body body, const void* context);

 private:
  // The ticket of the current loop: epoch (24 bits), number of parts (20), next part to take (20). Taking a
  // part is one compare-and-swap on it, so a worker that wakes late can never take a part of a loop that has
  // ended.
  static constexpr int kPartBits = 20;
  static constexpr int64_t kMaxParts = (int64_t{1} << kPartBits) - 1;

  void WorkerMain();
  void TakeParts(uint64_t epoch);

  std::vector<std::thread> workers_;
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> parts_done_{0};
  std::atomic<bool> stop_{false};
  int64_t items_ = 0;
  int64_t grain_ = 1;
  Body body_ = nullptr;
  const void* context_ = nullptr;
};

// The pool behind a CPU stream.
ThreadPool& ThreadsOf(const Stream& stream);

// Splits [0, items) over the stream's threads: fn(begin, end). Parts hold at least `grain` items (except the
// last), so that a part is worth its hand-over; results must not depend on where the parts are cut.
template <typename Fn>
void ParallelFor(const Stream& stream, int64_t items, int64_t grain, const Fn& fn) {
  ThreadsOf(stream).Run(
      items, grain,
      [](const void* context, int64_t begin, int64_t end) { (*static_cast<const Fn*>(context))(begin, end); },
      &fn);
}

}  // namespace dflash
