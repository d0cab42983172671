// Writes lines to a descriptor, as a rule standard error, without ever making those wait who write them: a
// reader that is slow or has stopped must not stop what is logged about.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>

#include "absl/time/time.h"

namespace dflash {

// A line is written at once, on the caller's thread, as long as the descriptor takes it. What it does not
// take waits for a thread of the writer's own, up to kMaxWaitingBytes; what does not fit there either is lost
// and counted, and a line says how many were lost where they would have been. Lines that cannot be written at
// all (the reader is gone, the disk is full) are dropped. The flags of the descriptor, which other processes
// may share, stay as they are. Any thread may call anything. Lives as long as the process: there is no
// destructor.
class LogWriter {
 public:
  static constexpr size_t kMaxWaitingBytes = size_t{1} << 20;

  // `lost_line` makes the line about lines that were lost, from their number.
  static LogWriter* Create(int descriptor, std::function<std::string(int64_t)> lost_line);

  // `line` ends with its newline.
  void Write(std::string_view line);

  // Waits until all lines are written, or none was for `patience`. Where that has happened and still none was
  // written, it does not wait again.
  void Drain(absl::Duration patience);

 private:
  LogWriter(int descriptor, std::function<std::string(int64_t)> lost_line);
  // Bytes of `text` that were written without waiting.
  size_t WriteAtOnce(std::string_view text) const;
  void WriteWaiting();

  const int descriptor_;
  const std::function<std::string(int64_t)> lost_line_;
  bool never_waits_ = false;  // a file
  int without_waiting_ = -1;  // the same pipe or terminal, opened so that it never waits; -1: could not be

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::string> waiting_;  // the first is being written
  size_t waiting_bytes_ = 0;
  int64_t lost_ = 0;
  int64_t written_ = 0;    // of those that have waited
  bool is_stuck_ = false;  // nothing was written since somebody waited in vain
};

}  // namespace dflash
