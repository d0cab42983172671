// Waiting for a word of memory that processes share.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <ctime>

#include "absl/time/time.h"

namespace dflash {

// Wakes everybody who waits for the word. Cheap when nobody does.
inline void FutexWake(uint32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

// Returns at once when the word is not `expected`, otherwise when it may have changed, at the latest after
// `timeout`.
inline void FutexWait(uint32_t* word, uint32_t expected, absl::Duration timeout) {
  const timespec time = absl::ToTimespec(std::max(timeout, absl::Microseconds(1)));
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &time, nullptr, 0);
}

}  // namespace dflash
