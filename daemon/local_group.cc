#include "daemon/local_group.h"

#include <signal.h>

#include <atomic>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/status.h"
#include "daemon/rpc/group_client.h"
#include "daemon/supervise/child_process.h"
#include "spdlog/spdlog.h"

namespace dflash {

class LocalGroup::Impl {
 public:
  explicit Impl(PrivateDirectory directory) : directory_(std::move(directory)) {}
  ~Impl() { Shutdown(absl::ZeroDuration()); }

  absl::Status Start(const Options& options, Dispatcher* dispatcher, Exporter* exporter,
                     std::function<void(int)> on_exit) {
    const std::string address = absl::StrCat("unix:", directory_.path(), "/leader.sock");
    client_.emplace(GroupClient::Options{.name = options.name,
                                         .address = address,
                                         .build = options.build,
                                         .on_silence = [this] { KillSilent(); }},
                    dispatcher,
                    [exporter, name = options.name](std::vector<prometheus::MetricFamily> families) {
                      const std::string dropped = exporter->SetSnapshot(name, std::move(families));
                      if (!dropped.empty()) spdlog::warn("group {}: dropped the metric {}", name, dropped);
                    });
    dispatcher->AddGroup(&*client_);
    client_->Start();
    std::vector<std::string> command = options.command;
    command.insert(command.end(), {"--listen", address});
    absl::StatusOr<std::unique_ptr<ChildProcess>> child = ChildProcess::Start(
        command, [this, dispatcher, on_exit = std::move(on_exit)](const ExitReport& report) {
          const std::string why = absl::StrCat("its worker process ", report.ToString());
          if (!shutting_down_) spdlog::error("group {} is lost: {}", client_->name(), why);
          if (!silent_) dispatcher->ExplainLoss(&*client_, why);  // else our own kill, which explains nothing
          dispatcher->OnLost(&*client_, why);
          client_->Disconnect();
          on_exit(report.by_signal ? 128 + report.code : report.code);
        });
    if (!child.ok()) return child.status();
    spdlog::info("group {}: started {} as process {}", options.name, command[0], (*child)->pid());
    absl::MutexLock lock(&mutex_);
    child_ = *std::move(child);
    if (silent_) child_->Signal(SIGKILL);
    return absl::OkStatus();
  }

  void Shutdown(absl::Duration timeout) {
    shutting_down_ = true;
    std::unique_ptr<ChildProcess> child;
    {
      absl::MutexLock lock(&mutex_);
      child = std::move(child_);
    }
    if (child != nullptr) {
      client_->Shutdown();
      if (timeout > absl::ZeroDuration() && !child->WaitExit(timeout)) {
        spdlog::warn("group {}: its worker does not end; killed", client_->name());
      }
      child.reset();
    }
    client_->Disconnect();
  }

  absl::Duration HeartbeatAge() const { return client_->HeartbeatAge(); }

 private:
  // A process that hangs does not end by itself.
  void KillSilent() {
    silent_ = true;
    absl::MutexLock lock(&mutex_);
    if (child_ != nullptr) child_->Signal(SIGKILL);
  }

  PrivateDirectory directory_;
  std::atomic<bool> shutting_down_ = false;
  std::atomic<bool> silent_ = false;
  std::optional<GroupClient> client_;
  absl::Mutex mutex_;
  std::unique_ptr<ChildProcess> child_ ABSL_GUARDED_BY(mutex_);
};

LocalGroup::LocalGroup(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
LocalGroup::~LocalGroup() = default;
void LocalGroup::Shutdown(absl::Duration timeout) { impl_->Shutdown(timeout); }
absl::Duration LocalGroup::HeartbeatAge() const { return impl_->HeartbeatAge(); }

absl::StatusOr<std::unique_ptr<LocalGroup>> LocalGroup::Start(const Options& options, Dispatcher* dispatcher,
                                                              Exporter* exporter,
                                                              std::function<void(int)> on_exit) {
  DFLASH_ASSIGN_OR_RETURN(PrivateDirectory directory, PrivateDirectory::Create());
  auto impl = std::make_unique<Impl>(std::move(directory));
  DFLASH_RETURN_IF_ERROR(impl->Start(options, dispatcher, exporter, std::move(on_exit)));
  return std::unique_ptr<LocalGroup>(new LocalGroup(std::move(impl)));
}

}  // namespace dflash
