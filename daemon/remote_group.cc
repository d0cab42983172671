#include "daemon/remote_group.h"

#include <limits>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/restart_policy.h"
#include "daemon/lasting_group.h"
#include "spdlog/spdlog.h"

namespace dflash {

class RemoteGroup::Impl final : public LastingGroup {
 public:
  Impl(const Options& options, ModelAgreement* agreement, Dispatcher* dispatcher, Exporter* exporter)
      : LastingGroup(options.name, GroupPlace::kRemote, agreement, dispatcher, exporter),
        options_(options),
        decider_({.max_delay = options.max_delay, .max_failed_starts = std::numeric_limits<int>::max()}) {
    dispatcher_->AddGroup(this);
    connector_ = std::thread([this] { Connect(); });
  }
  ~Impl() override { Shutdown(); }

  void Shutdown() {
    {
      absl::MutexLock lock(&mutex_);
      ending_ = true;
    }
    if (connector_.joinable()) connector_.join();
  }

  void OnReady(Group* connection, const GroupInfo& info) override {
    spdlog::info("group {}: connected to {}", options_.name, options_.address);
    {
      absl::MutexLock lock(&mutex_);
      ++epoch_;
    }
    LastingGroup::OnReady(connection, info);
  }
  void OnLost(Group*, const std::string& why) override {
    dispatcher_->OnLost(this, why);
    absl::MutexLock lock(&mutex_);
    if (!lost_ && !ending_ && ready_since_.has_value()) ++losses_;
    lost_ = true;
    if (!ending_) spdlog::error("group {} is lost: {}", options_.name, why);
  }

  GroupLives Lives() const {
    absl::MutexLock lock(&mutex_);
    return {.epoch = epoch_,
            .reforms = {{"connection", losses_}},
            .heartbeat_age = client_ == nullptr ? absl::ZeroDuration() : client_->HeartbeatAge()};
  }

 private:
  void Connect() {
    for (bool first = true;; first = false) {
      if (!first) dispatcher_->Revive(this);
      auto client = MakeClient({.name = options_.name,
                                .address = options_.address,
                                .build = options_.build,
                                .secret = options_.secret,
                                .silence_limit = options_.silence_limit});
      std::optional<absl::Duration> delay;
      {
        absl::MutexLock lock(&mutex_);
        lost_ = false;
        ready_since_.reset();
        client_ = std::move(client);
        client_->Start();
        const auto over = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return lost_ || ending_; };
        mutex_.Await(absl::Condition(&over));
        client = std::move(client_);
        delay = decider_.OnEnd(ReadyFor(), /*permanent=*/false);
      }
      client.reset();  // waits for its last report
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithTimeout(absl::Condition(&ending_), *delay);
      if (ending_) return;
    }
  }

  const Options options_;
  RestartDecider decider_;  // connector only
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t losses_ ABSL_GUARDED_BY(mutex_) = 0;  // of connections that served
  bool lost_ ABSL_GUARDED_BY(mutex_) = false;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread connector_;
};

RemoteGroup::RemoteGroup(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RemoteGroup::~RemoteGroup() = default;
void RemoteGroup::Shutdown() { impl_->Shutdown(); }
GroupLives RemoteGroup::Lives() const { return impl_->Lives(); }

std::unique_ptr<RemoteGroup> RemoteGroup::Start(const Options& options, ModelAgreement* agreement,
                                                Dispatcher* dispatcher, Exporter* exporter) {
  return std::unique_ptr<RemoteGroup>(
      new RemoteGroup(std::make_unique<Impl>(options, agreement, dispatcher, exporter)));
}

}  // namespace dflash
