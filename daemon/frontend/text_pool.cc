#include "daemon/frontend/text_pool.h"

#include <malloc.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "daemon/request/request_error.h"

namespace dflash {

void TextPool::Line::Push(const std::string& client, Job job) {
  std::deque<Job>& own = jobs_[client];
  if (own.empty()) turns_.push_back(client);
  own.push_back(std::move(job));
}

TextPool::Job TextPool::Line::Pop() {
  std::string client = std::move(turns_.front());
  turns_.pop_front();
  const auto own = jobs_.find(client);
  Job job = std::move(own->second.front());
  own->second.pop_front();
  if (own->second.empty()) {
    jobs_.erase(own);
  } else {
    turns_.push_back(std::move(client));
  }
  return job;
}

TextPool::TextPool(int threads) {
  DFLASH_CHECK(threads >= 2, "one thread is kept free of large jobs");
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this, i] { Work(/*small_only=*/i == 0); });
}

TextPool::~TextPool() {
  {
    absl::MutexLock lock(&mutex_);
    ending_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

absl::Status TextPool::Post(const std::string& client, size_t bytes, std::function<void()> job) {
  absl::MutexLock lock(&mutex_);
  if (bytes > kMaxBytes - bytes_) {
    return WithDetails(
        absl::ResourceExhaustedError(absl::StrCat("texts of ", bytes_, " bytes are being prepared, with ",
                                                  bytes, " more it would be over ", kMaxBytes)),
        {.reason = "QUEUE_FULL", .field = "", .retry_after = absl::Seconds(1), .metadata = {}});
  }
  bytes_ += bytes;
  (bytes > kLargeBytes ? large_ : small_).Push(client, {.bytes = bytes, .run = std::move(job)});
  return absl::OkStatus();
}

void TextPool::Work(bool small_only) {
  const auto has_work = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return ending_ || !small_.empty() || (!small_only && !large_.empty());
  };
  while (true) {
    Job job;
    {
      absl::MutexLock lock(&mutex_, absl::Condition(&has_work));
      Line& line = !small_only && !large_.empty() ? large_ : small_;
      if (line.empty()) return;
      job = line.Pop();
    }
    job.run();
    job.run = nullptr;
    // What a large text took lies in this thread's heap, from which nothing goes back by itself.
    if (job.bytes > kLargeBytes) malloc_trim(0);
    absl::MutexLock lock(&mutex_);
    bytes_ -= job.bytes;
  }
}

}  // namespace dflash
