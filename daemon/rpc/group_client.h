// A worker group at the other end of a gRPC connection: asks what it is, then keeps one stream open for as
// long as the group lives (dflash.worker.v1).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "daemon/routing/group.h"
#include "prometheus/metric_family.h"

namespace dflash {

class GroupClient final : public Group {
 public:
  struct Options {
    std::string name;         // label of its metrics
    std::string address;      // "unix:PATH" or "HOST:PORT"
    std::string build;        // of this program; the worker's must be the same
    std::string secret = {};  // of the group; empty: none
    absl::Duration heartbeat_period = absl::Milliseconds(500);
    absl::Duration silence_limit = absl::Seconds(5);  // a group that says nothing for so long is lost
    std::function<void()> on_silence = [] {};         // called when that has happened, before OnLost
    // Asked before OnReady: a group that is not admitted is lost, for the reason given.
    std::function<absl::Status(const GroupInfo&)> admit = [](const GroupInfo&) { return absl::OkStatus(); };
  };

  // `events` is not owned, must outlive the object, and hears OnLost
  // exactly once in the end. `on_metrics` gets each snapshot of the group's metrics, the first
  // before OnReady.
  GroupClient(Options options, GroupEvents* events,
              std::function<void(std::vector<prometheus::MetricFamily>)> on_metrics);
  // Starts to connect and returns at once; once, after whoever hears the events knows this group.
  void Start();
  // Drops the connection and waits until no call to `events` is under way.
  ~GroupClient() override;

  const std::string& name() const override;
  void Submit(const std::string& key, const GroupRequest& request) override;
  void Cancel(const std::string& key, const absl::Status& reason) override;
  absl::Duration HeartbeatAge() const override;

  // Asks the group to end: it drops what runs and exits.
  void Shutdown();
  // Drops the connection to a group that is lost for another reason than the connection could know: OnLost
  // then says this one, behind everything that the group has said, unless the connection has ended already.
  void Disconnect(const std::string& why);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
  bool started_ = false;
};

}  // namespace dflash
