#include "daemon/supervise/child_process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dflash {

std::string ExitReport::ToString() const {
  return by_signal ? absl::StrCat("was killed by signal ", code, " (", strsignal(code), ")")
                   : absl::StrCat("exited with code ", code);
}

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(
    const std::vector<std::string>& arguments, std::function<void(const ExitReport&)> on_exit) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
  // Listening sockets must not outlive us in a child.
  posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);

  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  sigset_t defaults;
  sigemptyset(&defaults);
  for (int signal : {SIGINT, SIGTERM, SIGPIPE, SIGCHLD}) sigaddset(&defaults, signal);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &defaults);
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes,
                           POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);

  std::vector<char*> argv;
  argv.reserve(arguments.size() + 1);
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);

  pid_t pid = -1;
  const int error = posix_spawn(&pid, argv[0], &actions, &attributes, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) {
    return absl::ErrnoToStatus(error, absl::StrCat("cannot start ", arguments[0]));
  }
  return std::unique_ptr<ChildProcess>(new ChildProcess(pid, std::move(on_exit)));
}

ChildProcess::ChildProcess(int pid, std::function<void(const ExitReport&)> on_exit)
    : pid_(pid), on_exit_(std::move(on_exit)), watcher_([this] { Watch(); }) {}

void ChildProcess::Watch() {
  siginfo_t info{};
  // Waiting and reaping are two steps, so that nobody signals a pid that the system has given away in
  // between.
  while (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT) != 0 && errno == EINTR) {
  }
  {
    absl::MutexLock lock(&mutex_);
    // Grandchildren go with the child: the group's name is ours as long as the child is not reaped.
    kill(-pid_, SIGKILL);
    int status = 0;
    while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    exited_ = true;
  }
  ExitReport report;
  report.by_signal = info.si_code != CLD_EXITED;
  report.code = info.si_status;
  on_exit_(report);
  absl::MutexLock lock(&mutex_);
  reported_ = true;
}

void ChildProcess::Signal(int signal) {
  absl::MutexLock lock(&mutex_);
  if (!exited_) kill(-pid_, signal);
}

bool ChildProcess::WaitExit(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  return mutex_.AwaitWithTimeout(absl::Condition(&reported_), timeout);
}

ChildProcess::~ChildProcess() {
  Signal(SIGKILL);
  watcher_.join();
}

absl::StatusOr<PrivateDirectory> PrivateDirectory::Create() {
  const char* base = std::getenv("XDG_RUNTIME_DIR");
  if (base == nullptr || *base == 0) base = std::getenv("TMPDIR");
  if (base == nullptr || *base == 0) base = "/tmp";
  std::string pattern = absl::StrCat(base, "/dflashd-XXXXXX");
  if (mkdtemp(pattern.data()) == nullptr) {  // 0700
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot make a directory under ", base));
  }
  return PrivateDirectory(pattern);
}

PrivateDirectory::PrivateDirectory(PrivateDirectory&& other) noexcept
    : path_(std::exchange(other.path_, std::string())) {}

PrivateDirectory::~PrivateDirectory() {
  if (path_.empty()) return;
  std::error_code ignored;  // a leftover in the runtime directory is no reason to fail
  for (const auto& entry : std::filesystem::directory_iterator(path_, ignored)) {
    std::filesystem::remove(entry.path(), ignored);
  }
  std::filesystem::remove(path_, ignored);
}

}  // namespace dflash
