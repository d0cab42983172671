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
  // when all are done. The first parts go to the first thread and so on, the same every time unless a thread
  // is late: what a thread wrote in one loop is in its caches in the next.
  void Run(int64_t items, int64_t grain, Body body, const void* context);

 private:
  struct Loop {
    int64_t items = 0;
    int64_t grain = 1;
    Body body = nullptr;
    const void* context = nullptr;
  };
  // A thread's share of the current loop: epoch (24 bits), end of its parts (20), next part to take (20).
  // Taking a part is one compare-and-swap on it, so a thread that wakes late can never take a part of a loop
  // that has ended. Each has a cache line of its own: as long as nobody has to help out, taking costs little,
  // and what the loop is comes along with the news that there is one.
  struct alignas(64) Share {
    std::atomic<uint64_t> ticket{0};
    Loop loop;  // whoever has taken a part may read it until the part is counted
  };
  static constexpr int kPartBits = 20;
  static constexpr int64_t kMaxParts = (int64_t{1} << kPartBits) - 1;

  void WorkerMain(size_t self);
  // Runs parts of that loop, the thread's own ones first, then those that others have not got to.
  void TakeParts(uint64_t epoch, size_t self);

  std::vector<std::thread> workers_;
  std::vector<Share> shares_;  // the caller's, then one per worker
  uint64_t epoch_ = 0;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<int64_t> parts_done_{0};
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
