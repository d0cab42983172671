#include "base/child_process.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <set>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::HasSubstr;

// A shell script as a child, with the promise of its exit report.
struct Child {
  explicit Child(const std::string& script) {
    auto started = ChildProcess::Start({"/bin/sh", "-c", script},
                                       [this](const ExitReport& report) { exit.set_value(report); });
    EXPECT_TRUE(started.ok()) << started.status();
    if (started.ok()) process = *std::move(started);
  }
  ExitReport WaitReport() {
    auto future = exit.get_future();
    EXPECT_EQ(future.wait_for(std::chrono::seconds(60)), std::future_status::ready);
    return future.get();
  }
  std::promise<ExitReport> exit;
  std::unique_ptr<ChildProcess> process;
};

TEST(ChildProcess, ReportsItsExitCode) {
  Child child("exit 65");
  const ExitReport report = child.WaitReport();
  EXPECT_FALSE(report.by_signal);
  EXPECT_EQ(report.pid, child.process->pid());
  EXPECT_EQ(report.code, 65);
  EXPECT_EQ(report.ToString(), "exited with code 65");
  EXPECT_TRUE(child.process->WaitExit(absl::Seconds(60)));
}

TEST(ChildProcess, ReportsAKillFromOutside) {
  Child child("exec sleep 600");
  EXPECT_FALSE(child.process->WaitExit(absl::ZeroDuration()));
  ASSERT_EQ(kill(child.process->pid(), SIGKILL), 0);
  const ExitReport report = child.WaitReport();
  EXPECT_TRUE(report.by_signal);
  EXPECT_EQ(report.code, SIGKILL);
  EXPECT_THAT(report.ToString(), HasSubstr("signal 9"));
}

TEST(ChildProcess, SignalsAreNotBlockedInTheChild) {
  sigset_t blocked;
  sigset_t before;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &blocked, &before);
  Child child("exec sleep 600");
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  child.process->Signal(SIGTERM);
  EXPECT_EQ(child.WaitReport().code, SIGTERM);
  child.process->Signal(SIGTERM);  // after the end: nothing happens
}

TEST(ChildProcess, TakesItsDescendantsAlong) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const std::string path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(ends[1]);
  {
    // The grandchild holds the write end; when it dies too, the read end reports end of file.
    Child child("sleep 600 > " + path + " & echo ready > " + path + "; wait");
    char buffer[16];
    ASSERT_GT(read(ends[0], buffer, sizeof(buffer)), 0);
    close(ends[1]);
    child.process.reset();
  }
  char byte;
  EXPECT_EQ(read(ends[0], &byte, 1), 0);
  close(ends[0]);
}

TEST(ChildProcess, InheritsNoDescriptors) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ASSERT_EQ(dup2(ends[0], 100), 100);
  Child child("if [ -e /proc/self/fd/100 ]; then exit 1; fi; read line && exit 2; exit 0");
  EXPECT_EQ(child.WaitReport().code, 0);
  for (int descriptor : {ends[0], ends[1], 100}) close(descriptor);
}

TEST(ChildProcess, NamesAProgramThatIsNotThere) {
  auto started = ChildProcess::Start({"/nonexistent/dflash-worker"}, [](const ExitReport&) {});
  EXPECT_EQ(started.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(started.status().message()), HasSubstr("/nonexistent/dflash-worker"));
}

TEST(PrivateDirectory, IsPrivateAndGoesAway) {
  std::string path;
  {
    auto directory = PrivateDirectory::Create();
    ASSERT_TRUE(directory.ok());
    path = directory->path();
    struct stat info;
    ASSERT_EQ(stat(path.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0700u);
    std::ofstream(path + "/leader.sock") << "x";
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

// A folder for $XDG_RUNTIME_DIR.
class RuntimeFolder {
 public:
  RuntimeFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "runtime-XXXXXX").string();
    path = mkdtemp(pattern.data());
    setenv("XDG_RUNTIME_DIR", path.c_str(), 1);
  }
  ~RuntimeFolder() {
    unsetenv("XDG_RUNTIME_DIR");
    std::filesystem::remove_all(path);
  }
  std::set<std::string> Names() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path)) names.insert(entry.path().filename());
    return names;
  }
  std::filesystem::path path;
};

// A socket that nobody listens on.
bool LeaveSocket(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return false;
  path.copy(address.sun_path, path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  const bool bound = bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  close(fd);
  return bound;
}

TEST(PrivateDirectory, LeftoversOfTheDeadAreRemovedAndNothingElse) {
  const RuntimeFolder runtime;
  // A process that is killed with a directory of its own.
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    auto directory = PrivateDirectory::Create();
    if (!directory.ok()) _exit(1);
    if (!LeaveSocket(directory->path() + "/leader.sock")) _exit(1);
    if (write(ends[1], "x", 1) != 1) _exit(1);
    for (;;) pause();
  }
  char byte;
  ASSERT_EQ(read(ends[0], &byte, 1), 1);
  close(ends[0]);
  close(ends[1]);
  ASSERT_EQ(runtime.Names().size(), 1u);
  const std::string other = *runtime.Names().begin();

  // Names like ours, of things that are not: a link, what others may enter, a file, and folders as private as
  // ours with files in them.
  const std::string links_to = "dflashd-sockets-precio", precious = "precious",
                    open = "dflashd-sockets-public", file = "dflashd-sockets-a_file",
                    files = "dflashd-sockets-folder", test = "dflashd-test-abcdef";
  for (const std::string& name : {precious, files, test}) {
    std::filesystem::create_directory(runtime.path / name);
    std::filesystem::permissions(runtime.path / name, std::filesystem::perms::owner_all);
    std::ofstream(runtime.path / name / "file") << "x";
  }
  std::filesystem::create_directory_symlink(runtime.path / precious, runtime.path / links_to);
  std::filesystem::create_directory(runtime.path / open);
  std::ofstream(runtime.path / file) << "x";

  auto first = PrivateDirectory::Create();
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(runtime.Names().count(other)) << "its owner lives";
  ASSERT_EQ(kill(pid, SIGKILL), 0);
  ASSERT_EQ(waitpid(pid, nullptr, 0), pid);
  auto second = PrivateDirectory::Create();
  ASSERT_TRUE(second.ok()) << second.status();
  const auto name = [](const PrivateDirectory& directory) {
    return std::filesystem::path(directory.path()).filename().string();
  };
  EXPECT_EQ(runtime.Names(), (std::set<std::string>{links_to, precious, open, file, files, test, name(*first),
                                                    name(*second)}));
  for (const std::string& folder : {precious, files, test})
    EXPECT_TRUE(std::filesystem::exists(runtime.path / folder / "file")) << folder;
}

// Processes that start at the same time do not take each other's new directories away.
TEST(PrivateDirectory, ManyAtOnce) {
  const RuntimeFolder runtime;
  std::vector<std::thread> threads;
  std::atomic<int> kept = 0;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        auto directory = PrivateDirectory::Create();
        ASSERT_TRUE(directory.ok()) << directory.status();
        std::ofstream(directory->path() + "/x") << "x";
        kept += std::filesystem::exists(directory->path() + "/x") ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(kept, 8 * 50);
  EXPECT_TRUE(runtime.Names().empty());
}

}  // namespace
}  // namespace dflash
