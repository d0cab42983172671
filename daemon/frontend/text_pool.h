// The threads that tokenize and render. Clients take turns, whatever each has sent, and one thread takes
// small jobs only, so that nobody's small text waits until large ones are done. Large jobs go before small
// ones on all other threads, so that they come to their turn, too.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace dflash {

class TextPool {
 public:
  static constexpr size_t kLargeBytes = 64 << 10;  // a job of more is large
  static constexpr size_t kMaxBytes = 64 << 20;    // of all jobs that wait or run

  // At least two threads.
  explicit TextPool(int threads);
  // Runs what has been posted.
  ~TextPool();

  // Runs `job`, which handles a request of `bytes` bytes of this client, on one of the threads.
  // ResourceExhausted (reason QUEUE_FULL, with a hint when to retry), and the job is not run: it would be
  // more than kMaxBytes. Any thread.
  absl::Status Post(const std::string& client, size_t bytes, std::function<void()> job);

 private:
  struct Job {
    size_t bytes = 0;
    std::function<void()> run;
  };
  // Jobs of one size class. A client's own go by arrival.
  class Line {
   public:
    bool empty() const { return turns_.empty(); }
    void Push(const std::string& client, Job job);
    Job Pop();  // when not empty

   private:
    std::unordered_map<std::string, std::deque<Job>> jobs_;  // of those who have any
    std::deque<std::string> turns_;                          // each of them once
  };
  void Work(bool small_only);

  absl::Mutex mutex_;
  Line small_ ABSL_GUARDED_BY(mutex_);
  Line large_ ABSL_GUARDED_BY(mutex_);
  size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace dflash
