// A real child process in a test: its output line by line, its end, signals.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace dflash::integration {

// How long a test waits for something that ought to happen at once, on a slow and busy machine.
inline constexpr absl::Duration kPatience = absl::Seconds(60);

// Asks `done` again and again until it returns true; false when `patience` runs out first. For conditions
// that nothing announces: what a server answers when asked.
bool PollUntil(const std::function<bool()>& done, absl::Duration patience = kPatience);

class Process {
 public:
  // Starts arguments[0] with an empty standard input (or `input`), standard output and error in one pipe, or
  // standard error in `error_file`. The child dies with the test. Ends the test program when the system
  // cannot do that.
  explicit Process(const std::vector<std::string>& arguments, const std::string& input = "",
                   const std::string& error_file = "");
  // Kills it if it still runs, and waits for it.
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  // The first line of output from byte `from` on, past or to come, that contains `text`; nullopt when the
  // output ends or `patience` runs out first.
  std::optional<std::string> WaitForLine(const std::string& text, absl::Duration patience = kPatience,
                                         size_t from = 0);
  // Exit code, or 128 + signal; nullopt when it still runs after `patience`. The output is complete then.
  std::optional<int> WaitForExit(absl::Duration patience = kPatience);
  void Signal(int signal);

  std::string output() const;  // everything so far
  int pid() const { return pid_; }

 private:
  void ReadOutput();

  int pid_ = -1;
  int output_fd_ = -1;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::string output_;
  bool output_ended_ = false;
  std::optional<int> exit_;
  std::thread reader_;  // reads to the end of output, then waits for the child
};

// Runs a program to its end.
struct Ran {
  int exit_code = -1;  // as WaitForExit; -1: it did not end and was killed
  std::string output;
};
Ran RunProgram(const std::vector<std::string>& arguments, const std::string& input = "");

}  // namespace dflash::integration
