// A child process of the coordinator or of a launcher: started, watched, killed.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace dflash {

// How a process ended.
struct ExitReport {
  int pid = 0;
  bool by_signal = false;
  int code = 0;  // exit code or signal number

  // "exited with code 65", "was killed by signal 9 (Killed)".
  std::string ToString() const;
};

// Owns one child in its own process group. Its standard input is empty, its standard output goes to our
// standard error, every other descriptor of ours is closed in it, and no signal is blocked in it.
class ChildProcess {
 public:
  // Starts arguments[0] with these arguments and our environment. `on_exit` is called once, from a thread of
  // this object, as soon as the child has ended, whatever ended it. A child that asks for a signal at its
  // parent's death (PR_SET_PDEATHSIG) gets it when the *thread* ends that called Start: call it from a thread
  // that lives as long as the process. Errors: NotFound or another code for what the system says, naming the
  // program.
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(const std::vector<std::string>& arguments,
                                                             std::function<void(const ExitReport&)> on_exit);
  // Kills what is left of the group and waits for the child.
  ~ChildProcess();

  int pid() const { return pid_; }
  // Sends a signal to the child's process group; nothing when the child has been reaped.
  void Signal(int signal);
  // Waits until the child has ended; false when it has not by then.
  bool WaitExit(absl::Duration timeout);

 private:
  ChildProcess(int pid, std::function<void(const ExitReport&)> on_exit);
  void Watch();

  const int pid_;
  const std::function<void(const ExitReport&)> on_exit_;
  absl::Mutex mutex_;
  bool exited_ ABSL_GUARDED_BY(mutex_) = false;  // reaped: the pid may belong to another process
  bool reported_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread watcher_;
};

// Makes a new directory that only this user can enter, under $XDG_RUNTIME_DIR, else $TMPDIR, else /tmp; for
// the sockets of worker groups. Owns it: removes it with the files directly in it. A process that is killed
// leaves its directory behind: its owner holds a lock (flock) on the directory while it lives, and Create()
// removes the directories of this user, with names as it makes them, that nobody holds and in which there is
// nothing but sockets. Links, other files and other users' directories are left alone.
class PrivateDirectory {
 public:
  static absl::StatusOr<PrivateDirectory> Create();
  PrivateDirectory(PrivateDirectory&& other) noexcept;
  PrivateDirectory& operator=(PrivateDirectory&&) = delete;
  ~PrivateDirectory();

  const std::string& path() const { return path_; }

 private:
  PrivateDirectory(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}
  std::string path_;
  int descriptor_ = -1;  // holds the lock
};

}  // namespace dflash
