// How many lines of one kind the log gets.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace dflash {

// At most `per_second` lines in a second, counted from its first line on. Any thread. Times are given, not
// read.
class LineBudget {
 public:
  explicit LineBudget(int64_t per_second) : per_second_(per_second) {}

  // May a line be written? Then how many were not since the last one that was.
  std::optional<int64_t> Take(absl::Time now);

 private:
  const int64_t per_second_;
  absl::Mutex mutex_;
  absl::Time second_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();  // when it began
  int64_t written_ ABSL_GUARDED_BY(mutex_) = 0;                       // in it
  int64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace dflash
