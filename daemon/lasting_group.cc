#include "daemon/lasting_group.h"

#include <utility>

#include "absl/time/clock.h"
#include "spdlog/spdlog.h"

namespace dflash {

LastingGroup::LastingGroup(std::string name, GroupPlace place, ModelAgreement* agreement,
                           Dispatcher* dispatcher, Exporter* exporter)
    : dispatcher_(dispatcher),
      name_(std::move(name)),
      place_(place),
      agreement_(agreement),
      exporter_(exporter) {}

void LastingGroup::Submit(const std::string& key, const GroupRequest& request) {
  absl::MutexLock lock(&mutex_);
  if (client_ != nullptr) client_->Submit(key, request);
}

void LastingGroup::Cancel(const std::string& key, const absl::Status& reason) {
  absl::MutexLock lock(&mutex_);
  if (client_ != nullptr) client_->Cancel(key, reason);
}

absl::Duration LastingGroup::HeartbeatAge() const {
  absl::MutexLock lock(&mutex_);
  return client_ == nullptr ? absl::ZeroDuration() : client_->HeartbeatAge();
}

void LastingGroup::OnReady(Group*, const GroupInfo& info) {
  {
    absl::MutexLock lock(&mutex_);
    ready_since_ = absl::Now();
  }
  dispatcher_->OnReady(this, info);
}

void LastingGroup::OnCredits(Group*, uint64_t granted_total) { dispatcher_->OnCredits(this, granted_total); }

void LastingGroup::OnStarted(Group*, const std::string& key, const StartedOutput& started) {
  dispatcher_->OnStarted(this, key, started);
}

void LastingGroup::OnTokens(Group*, const std::string& key, StepOutput output) {
  dispatcher_->OnTokens(this, key, std::move(output));
}

void LastingGroup::OnFinished(Group*, const std::string& key, const FinishedOutput& finished) {
  dispatcher_->OnFinished(this, key, finished);
}

void LastingGroup::OnFailed(Group*, const std::string& key, const absl::Status& status) {
  dispatcher_->OnFailed(this, key, status);
}

std::unique_ptr<GroupClient> LastingGroup::MakeClient(GroupClient::Options options) {
  options.admit = [agreement = agreement_, place = place_](const GroupInfo& info) {
    return agreement->Admit(info.model, place);
  };
  return std::make_unique<GroupClient>(
      std::move(options), this,
      [exporter = exporter_, name = name_](std::vector<prometheus::MetricFamily> families) {
        const std::string dropped = exporter->SetSnapshot(name, std::move(families));
        if (!dropped.empty()) spdlog::warn("group {}: dropped the metric {}", name, dropped);
      });
}

std::optional<absl::Duration> LastingGroup::ReadyFor() const {
  if (!ready_since_.has_value()) return std::nullopt;
  return absl::Now() - *ready_since_;
}

}  // namespace dflash
