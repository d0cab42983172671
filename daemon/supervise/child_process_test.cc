#include "daemon/supervise/child_process.h"

#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <future>

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

}  // namespace
}  // namespace dflash
