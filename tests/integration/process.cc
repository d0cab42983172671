#include "tests/integration/process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>

#include "base/check.h"

namespace dflash::integration {

bool PollUntil(const std::function<bool()>& done, absl::Duration patience) {
  const absl::Time end = absl::Now() + patience;
  while (!done()) {
    if (absl::Now() >= end) return false;
    // Only so that asking does not take the processor from whoever is asked.
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

Process::Process(const std::vector<std::string>& arguments, const std::string& input,
                 const std::string& error_file) {
  int out[2], in[2];
  const int errors = error_file.empty() ? -1 : open(error_file.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  DFLASH_CHECK(error_file.empty() || errors >= 0, error_file.c_str());
  DFLASH_CHECK(pipe2(out, O_CLOEXEC) == 0);
  DFLASH_CHECK(pipe2(in, O_CLOEXEC) == 0);
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const int parent = getpid();
  pid_ = fork();
  DFLASH_CHECK(pid_ >= 0);
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    dup2(in[0], STDIN_FILENO);
    dup2(out[1], STDOUT_FILENO);
    dup2(errors >= 0 ? errors : out[1], STDERR_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  if (errors >= 0) close(errors);
  close(out[1]);
  close(in[0]);
  // Inputs here are shorter than a pipe holds.
  DFLASH_CHECK(write(in[1], input.data(), input.size()) == static_cast<ssize_t>(input.size()));
  close(in[1]);
  output_fd_ = out[0];
  reader_ = std::thread([this] { ReadOutput(); });
}

Process::~Process() {
  Signal(SIGKILL);
  reader_.join();
  close(output_fd_);
}

void Process::ReadOutput() {
  char buffer[4096];
  for (;;) {
    const ssize_t count = read(output_fd_, buffer, sizeof(buffer));
    if (count < 0 && errno == EINTR) continue;
    std::lock_guard lock(mutex_);
    if (count <= 0) break;
    output_.append(buffer, static_cast<size_t>(count));
    changed_.notify_all();
  }
  {
    std::lock_guard lock(mutex_);
    output_ended_ = true;
    changed_.notify_all();
  }
  siginfo_t info = {};
  while (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT) != 0) DFLASH_CHECK(errno == EINTR);
  // Reaped under the lock, so that Signal never meets somebody else's process of the same number.
  std::lock_guard lock(mutex_);
  waitpid(pid_, nullptr, 0);
  exit_ = info.si_code == CLD_EXITED ? info.si_status : 128 + info.si_status;
  changed_.notify_all();
}

std::optional<std::string> Process::WaitForLine(const std::string& text, absl::Duration patience,
                                                size_t from) {
  std::unique_lock lock(mutex_);
  std::optional<std::string> found;
  changed_.wait_for(lock, absl::ToChronoNanoseconds(patience), [&] {
    const size_t at = output_.find(text, from);
    if (at == std::string::npos) return output_ended_;
    const size_t end = output_.find('\n', at);
    if (end == std::string::npos) return output_ended_;
    const size_t before = output_.rfind('\n', at);
    const size_t begin = before == std::string::npos ? 0 : before + 1;
    found = output_.substr(begin, end - begin);
    return true;
  });
  return found;
}

std::optional<int> Process::WaitForExit(absl::Duration patience) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, absl::ToChronoNanoseconds(patience), [&] { return exit_.has_value(); });
  return exit_;
}

void Process::Signal(int signal) {
  std::lock_guard lock(mutex_);
  if (!exit_) kill(pid_, signal);
}

std::string Process::output() const {
  std::lock_guard lock(mutex_);
  return output_;
}

Ran RunProgram(const std::vector<std::string>& arguments, const std::string& input) {
  Process process(arguments, input);
  Ran ran;
  ran.exit_code = process.WaitForExit().value_or(-1);
  ran.output = process.output();
  return ran;
}

}  // namespace dflash::integration
