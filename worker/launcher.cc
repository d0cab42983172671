#include "worker/launcher.h"

#include <unistd.h>

#include <csignal>
#include <limits>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/child_process.h"
#include "base/exit_codes.h"
#include "base/restart_policy.h"
#include "base/status.h"
#include "spdlog/spdlog.h"

namespace dflash {
namespace {

constexpr absl::Duration kEndGrace = absl::Seconds(10);  // for ranks that are asked to end

// The lives of this host's ranks. One thread runs it and is the parent of all of them.
class Launcher {
 public:
  Launcher(const LaunchOptions& options, std::optional<PrivateDirectory> directory)
      : options_(options),
        directory_(std::move(directory)),
        // Of a group of several hosts the others may come later, and a coordinator at any time.
        decider_({.max_delay = options.max_delay, .max_failed_starts = std::numeric_limits<int>::max()}),
        // Ranks of an earlier launcher, on other hosts, have another epoch whatever happened to this one.
        epoch_(options.hosts > 1 ? static_cast<uint64_t>(absl::ToUnixMillis(absl::Now())) : 0) {}

  // Ends this life and all later ones. Any thread.
  void End() {
    absl::MutexLock lock(&mutex_);
    ending_ = true;
  }

  absl::StatusOr<int> Run() {
    for (;;) {
      ++epoch_;
      const absl::Time begin = absl::Now();
      if (absl::Status started = Start(); !started.ok()) {
        children_.clear();
        return started;
      }
      const std::optional<int> permanent = AwaitEnd();
      children_.clear();  // kills and reaps what is left
      absl::MutexLock lock(&mutex_);
      if (ending_) return kExitOk;
      const std::optional<absl::Duration> delay = decider_.OnEnd(absl::Now() - begin, permanent.has_value());
      if (permanent.has_value()) return *permanent;
      spdlog::info("launcher: starts again in {}", absl::FormatDuration(*delay));
      mutex_.AwaitWithTimeout(absl::Condition(&ending_), *delay);
      if (ending_) return kExitOk;
    }
  }

 private:
  struct Exit {
    int rank;
    ExitReport report;
  };

  absl::Status Start() {
    {
      absl::MutexLock lock(&mutex_);
      exits_.clear();
    }
    const int here = options_.ranks / options_.hosts;
    const std::string socket = directory_.has_value()
                                   ? absl::StrCat("unix:", directory_->path(), "/ranks.", epoch_, ".sock")
                                   : options_.group_socket;
    for (int i = 0; i < here; ++i) {
      const int rank = options_.host_index * here + i;
      std::vector<std::string> command = options_.command;
      if (rank == 0) command.insert(command.end(), {"--listen", options_.listen});
      if (options_.ranks > 1) {
        // Epochs are the leader's business: ranks of other hosts take what it says.
        const uint64_t epoch = options_.host_index == 0 ? epoch_ : 0;
        command.insert(command.end(),
                       {"--tp", absl::StrCat(options_.ranks), "--rank", absl::StrCat(rank), "--group-socket",
                        socket, "--group-id", "launched", "--epoch", absl::StrCat(epoch)});
      }
      command.insert(command.end(), {"--device", absl::StrCat(options_.share_device ? 0 : i)});
      DFLASH_ASSIGN_OR_RETURN(std::unique_ptr<ChildProcess> child,
                              ChildProcess::Start(command, [this, rank](const ExitReport& report) {
                                absl::MutexLock lock(&mutex_);
                                exits_.push_back({rank, report});
                              }));
      spdlog::info("launcher: epoch {}: started rank {} as process {}", epoch_, rank, child->pid());
      children_.push_back(std::move(child));
    }
    return absl::OkStatus();
  }

  // Waits until a rank ends or the launcher is asked to. The exit code of a rank that is not to be started
  // again.
  std::optional<int> AwaitEnd() {
    absl::MutexLock lock(&mutex_);
    const auto over = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ending_ || !exits_.empty(); };
    mutex_.Await(absl::Condition(&over));
    // Only the leader has anything to end in order, and ends the whole group so.
    if (ending_ && options_.host_index > 0) return std::nullopt;
    if (ending_) {
      mutex_.Unlock();
      for (const auto& child : children_) child->Signal(SIGTERM);
      mutex_.Lock();
      const auto gone = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return exits_.size() == children_.size();
      };
      if (!mutex_.AwaitWithTimeout(absl::Condition(&gone), kEndGrace))
        spdlog::warn("launcher: ranks that do not end are killed");
      return std::nullopt;
    }
    for (const Exit& exit : exits_) {
      spdlog::error("launcher: rank {} {}", exit.rank, exit.report.ToString());
      // A port of a network may be free again later.
      if (!exit.report.by_signal && IsPermanentExit(exit.report.code) &&
          exit.report.code != kExitCannotListen)
        return exit.report.code;
    }
    return std::nullopt;
  }

  const LaunchOptions options_;
  const std::optional<PrivateDirectory> directory_;  // of the rank channel's socket
  RestartDecider decider_;
  uint64_t epoch_;
  std::vector<std::unique_ptr<ChildProcess>> children_;
  absl::Mutex mutex_;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Exit> exits_ ABSL_GUARDED_BY(mutex_);  // of this life, in order
};

}  // namespace

absl::StatusOr<int> Launch(const LaunchOptions& options) {
  std::optional<PrivateDirectory> directory;
  if (options.ranks > 1 && options.group_socket.empty()) {
    DFLASH_ASSIGN_OR_RETURN(PrivateDirectory created, PrivateDirectory::Create());
    directory.emplace(std::move(created));
  }
  Launcher launcher(options, std::move(directory));
  std::thread signals([&] {
    sigset_t set;
    sigemptyset(&set);
    for (int number : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&set, number);
    int number = 0;
    sigwait(&set, &number);
    if (number == SIGUSR1) return;  // from below: it is over
    spdlog::info("launcher: signal {}: shutting down", number);
    launcher.End();
  });
  const absl::StatusOr<int> code = launcher.Run();
  pthread_kill(signals.native_handle(), SIGUSR1);
  signals.join();
  return code;
}

}  // namespace dflash
