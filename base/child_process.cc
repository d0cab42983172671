#include "base/child_process.h"

#include <dirent.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string_view>
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
  report.pid = pid_;
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

namespace {

constexpr std::string_view kDirectoryPrefix = "dflashd-sockets-";
constexpr std::string_view kDirectorySuffix = "XXXXXX";  // mkdtemp's

// Opens a directory of ours and takes its lock; -1 when it is another user's, others may enter it, or
// somebody holds it.
int OpenAndLock(int base, const char* name) {
  const int directory = openat(base, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (directory < 0) return -1;
  struct stat info;
  const bool ours = fstat(directory, &info) == 0 && info.st_uid == geteuid() && (info.st_mode & 077) == 0;
  if (ours && flock(directory, LOCK_EX | LOCK_NB) == 0) return directory;
  close(directory);
  return -1;
}

// Whether `name` still means the directory that is open.
bool StillThere(int base, const char* name, int directory) {
  struct stat opened, named;
  return fstat(directory, &opened) == 0 && fstatat(base, name, &named, AT_SYMLINK_NOFOLLOW) == 0 &&
         opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
}

// Removes what lies directly in an open directory and `may_go`, then the directory if nothing is left in it.
// Failures leave it for the next time.
void Remove(int base, const char* name, int directory, bool (*may_go)(int directory, const char* entry)) {
  const int listed = dup(directory);
  if (DIR* entries = listed < 0 ? nullptr : fdopendir(listed)) {
    rewinddir(entries);
    while (const dirent* entry = readdir(entries)) {
      if (may_go(directory, entry->d_name)) unlinkat(directory, entry->d_name, 0);
    }
    closedir(entries);
  } else if (listed >= 0) {
    close(listed);
  }
  unlinkat(base, name, AT_REMOVEDIR);
}

bool Anything(int, const char*) { return true; }
// All that we ever put there. Somebody else's directory with a name like ours loses nothing.
bool IsSocket(int directory, const char* entry) {
  struct stat info;
  return fstatat(directory, entry, &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISSOCK(info.st_mode);
}

bool IsNameOfOurs(std::string_view name) {
  return name.size() == kDirectoryPrefix.size() + kDirectorySuffix.size() &&
         name.substr(0, kDirectoryPrefix.size()) == kDirectoryPrefix;
}

void RemoveLeftovers(int base) {
  const int listed = dup(base);
  DIR* entries = listed < 0 ? nullptr : fdopendir(listed);
  if (entries == nullptr) {
    if (listed >= 0) close(listed);
    return;
  }
  while (const dirent* entry = readdir(entries)) {
    if (!IsNameOfOurs(entry->d_name)) continue;
    const int directory = OpenAndLock(base, entry->d_name);
    if (directory < 0) continue;
    if (StillThere(base, entry->d_name, directory)) Remove(base, entry->d_name, directory, IsSocket);
    close(directory);
  }
  closedir(entries);
}

}  // namespace

absl::StatusOr<PrivateDirectory> PrivateDirectory::Create() {
  const char* parent = std::getenv("XDG_RUNTIME_DIR");
  if (parent == nullptr || *parent == 0) parent = std::getenv("TMPDIR");
  if (parent == nullptr || *parent == 0) parent = "/tmp";
  const auto failed = [&] {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot make a directory under ", parent));
  };
  const int base = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (base < 0) return failed();
  RemoveLeftovers(base);
  for (;;) {
    std::string path = absl::StrCat(parent, "/");
    path.append(kDirectoryPrefix).append(kDirectorySuffix);
    if (mkdtemp(path.data()) == nullptr) {  // 0700
      absl::Status status = failed();
      close(base);
      return status;
    }
    // Another process that starts now may have taken the new directory for a leftover: then once more.
    const char* name = path.c_str() + path.rfind('/') + 1;
    const int directory = OpenAndLock(base, name);
    if (directory >= 0 && StillThere(base, name, directory)) {
      close(base);
      return PrivateDirectory(path, directory);
    }
    if (directory >= 0) close(directory);
  }
}

PrivateDirectory::PrivateDirectory(PrivateDirectory&& other) noexcept
    : path_(std::exchange(other.path_, std::string())), descriptor_(std::exchange(other.descriptor_, -1)) {}

PrivateDirectory::~PrivateDirectory() {
  if (path_.empty()) return;
  Remove(AT_FDCWD, path_.c_str(), descriptor_, Anything);
  close(descriptor_);
}

}  // namespace dflash
