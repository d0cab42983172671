#include "base/log_writer.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dflash {

LogWriter* LogWriter::Create(int descriptor, std::function<std::string(int64_t)> lost_line) {
  auto* writer = new LogWriter(descriptor, std::move(lost_line));
  // Signals are for those who wait for them.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([writer] { writer->WriteWaiting(); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return writer;
}

LogWriter::LogWriter(int descriptor, std::function<std::string(int64_t)> lost_line)
    : descriptor_(descriptor), lost_line_(std::move(lost_line)) {
  struct stat info;
  if (fstat(descriptor, &info) != 0 || S_ISREG(info.st_mode)) {
    never_waits_ = true;
    return;
  }
  // O_NONBLOCK belongs to what was opened, which is shared with whoever else has the descriptor; so a pipe or
  // terminal is opened once more. That fails for sockets, and where the user has changed since.
  without_waiting_ =
      open(absl::StrCat("/proc/self/fd/", descriptor).c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
}

size_t LogWriter::WriteAtOnce(std::string_view text) const {
  ssize_t written = -1;
  do {
    if (without_waiting_ >= 0) {
      written = write(without_waiting_, text.data(), text.size());
    } else {
      iovec bytes = {.iov_base = const_cast<char*>(text.data()), .iov_len = text.size()};
      written = pwritev2(descriptor_, &bytes, 1, -1, never_waits_ ? 0 : RWF_NOWAIT);
    }
  } while (written < 0 && errno == EINTR);
  if (written >= 0) return static_cast<size_t>(written);
  // Not every system can do that for everything: then it is the thread's.
  return errno == EAGAIN || errno == EOPNOTSUPP ? 0 : text.size();
}

void LogWriter::Write(std::string_view line) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (waiting_.empty()) {
    line.remove_prefix(WriteAtOnce(line));
    if (line.empty()) return;
  }
  if (waiting_bytes_ + line.size() > kMaxWaitingBytes) {
    ++lost_;
    return;
  }
  if (lost_ > 0) waiting_bytes_ += waiting_.emplace_back(lost_line_(std::exchange(lost_, 0))).size();
  waiting_bytes_ += waiting_.emplace_back(line).size();
  changed_.notify_all();
}

void LogWriter::WriteWaiting() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !waiting_.empty(); });
    const std::string& line = waiting_.front();  // others only add behind it, which moves no element
    lock.unlock();
    for (std::string_view rest = line; !rest.empty();) {
      const ssize_t written = write(descriptor_, rest.data(), rest.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0 && errno == EAGAIN) {  // whoever gave us the descriptor never waits either
        pollfd room = {.fd = descriptor_, .events = POLLOUT, .revents = 0};
        poll(&room, 1, -1);
        continue;
      }
      rest.remove_prefix(written < 0 ? rest.size() : static_cast<size_t>(written));
    }
    lock.lock();
    waiting_bytes_ -= line.size();
    waiting_.pop_front();
    ++written_;
    is_stuck_ = false;
    if (waiting_.empty() && lost_ > 0)
      waiting_bytes_ += waiting_.emplace_back(lost_line_(std::exchange(lost_, 0))).size();
    changed_.notify_all();
  }
}

void LogWriter::Drain(absl::Duration patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!waiting_.empty() && !is_stuck_) {
    const int64_t before = written_;
    is_stuck_ = !changed_.wait_for(lock, absl::ToChronoMilliseconds(patience),
                                   [&] { return waiting_.empty() || written_ > before; });
  }
}

}  // namespace dflash
