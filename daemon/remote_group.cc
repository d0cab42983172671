#include "daemon/remote_group.h"

#include <limits>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/restart_policy.h"
#include "daemon/rpc/group_client.h"
#include "spdlog/spdlog.h"

namespace dflash {

// The dispatcher sees one group through all its connections: this object.
class RemoteGroup::Impl final : public Group, public GroupEvents {
 public:
  Impl(const Options& options, Dispatcher* dispatcher, Exporter* exporter)
      : options_(options),
        dispatcher_(dispatcher),
        exporter_(exporter),
        decider_({.max_delay = options.max_delay, .max_failed_starts = std::numeric_limits<int>::max()}) {
    dispatcher_->AddGroup(this);
    connector_ = std::thread([this] { Connect(); });
  }
  ~Impl() override {
    {
      absl::MutexLock lock(&mutex_);
      ending_ = true;
    }
    connector_.join();
  }

  const std::string& name() const override { return options_.name; }
  void Submit(const std::string& key, const GroupRequest& request) override {
    absl::MutexLock lock(&mutex_);
    if (client_ != nullptr) client_->Submit(key, request);
  }
  void Cancel(const std::string& key, const absl::Status& reason) override {
    absl::MutexLock lock(&mutex_);
    if (client_ != nullptr) client_->Cancel(key, reason);
  }
  absl::Duration HeartbeatAge() const override {
    absl::MutexLock lock(&mutex_);
    return client_ == nullptr ? absl::ZeroDuration() : client_->HeartbeatAge();
  }

  void OnReady(Group*, const GroupInfo& info) override {
    {
      absl::MutexLock lock(&mutex_);
      ready_since_ = absl::Now();
    }
    spdlog::info("group {}: connected to {}", options_.name, options_.address);
    dispatcher_->OnReady(this, info);
  }
  void OnCredits(Group*, uint64_t granted_total) override { dispatcher_->OnCredits(this, granted_total); }
  void OnStarted(Group*, const std::string& key, const StartedOutput& started) override {
    dispatcher_->OnStarted(this, key, started);
  }
  void OnTokens(Group*, const std::string& key, StepOutput output) override {
    dispatcher_->OnTokens(this, key, std::move(output));
  }
  void OnFinished(Group*, const std::string& key, const FinishedOutput& finished) override {
    dispatcher_->OnFinished(this, key, finished);
  }
  void OnFailed(Group*, const std::string& key, const absl::Status& status) override {
    dispatcher_->OnFailed(this, key, status);
  }
  void OnLost(Group*, const std::string& why) override {
    dispatcher_->OnLost(this, why);
    absl::MutexLock lock(&mutex_);
    lost_ = true;
    if (!ending_) spdlog::error("group {} is lost: {}", options_.name, why);
  }

 private:
  void Connect() {
    for (bool first = true;; first = false) {
      if (!first) dispatcher_->Revive(this);
      auto client = std::make_unique<GroupClient>(
          GroupClient::Options{.name = options_.name,
                               .address = options_.address,
                               .build = options_.build,
                               .secret = options_.secret,
                               .silence_limit = options_.silence_limit},
          this, [this](std::vector<prometheus::MetricFamily> families) {
            const std::string dropped = exporter_->SetSnapshot(options_.name, std::move(families));
            if (!dropped.empty()) spdlog::warn("group {}: dropped the metric {}", options_.name, dropped);
          });
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
        delay = decider_.OnEnd(
            ready_since_.has_value() ? std::optional(absl::Now() - *ready_since_) : std::nullopt,
            /*permanent=*/false);
      }
      client.reset();  // waits for its last report
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithTimeout(absl::Condition(&ending_), *delay);
      if (ending_) return;
    }
  }

  const Options options_;
  Dispatcher* const dispatcher_;
  Exporter* const exporter_;
  RestartDecider decider_;  // connector only
  mutable absl::Mutex mutex_;
  std::unique_ptr<GroupClient> client_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Time> ready_since_ ABSL_GUARDED_BY(mutex_);
  bool lost_ ABSL_GUARDED_BY(mutex_) = false;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread connector_;
};

RemoteGroup::RemoteGroup(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RemoteGroup::~RemoteGroup() = default;

std::unique_ptr<RemoteGroup> RemoteGroup::Start(const Options& options, Dispatcher* dispatcher,
                                                Exporter* exporter) {
  return std::unique_ptr<RemoteGroup>(new RemoteGroup(std::make_unique<Impl>(options, dispatcher, exporter)));
}

}  // namespace dflash
