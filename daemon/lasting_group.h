// A worker group as the dispatcher sees it: one object through all its connections, each a GroupClient of its
// own. What makes and ends connections derives from it (local_group.h, remote_group.h).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/metrics/exporter.h"
#include "daemon/routing/dispatcher.h"
#include "daemon/routing/model_agreement.h"
#include "daemon/rpc/group_client.h"

namespace dflash {

class LastingGroup : public Group, public GroupEvents {
 public:
  const std::string& name() const override { return name_; }
  // To the present connection; without one nothing happens: the dispatcher has been told of the loss.
  void Submit(const std::string& key, const GroupRequest& request) override;
  void Cancel(const std::string& key, const absl::Status& reason) override;
  absl::Duration HeartbeatAge() const override;

  // What the present connection reports, to the dispatcher. OnLost is the derived class's.
  void OnReady(Group* connection, const GroupInfo& info) override;
  void OnCredits(Group* connection, uint64_t granted_total) override;
  void OnStarted(Group* connection, const std::string& key, const StartedOutput& started) override;
  void OnTokens(Group* connection, const std::string& key, StepOutput output) override;
  void OnFinished(Group* connection, const std::string& key, const FinishedOutput& finished) override;
  void OnFailed(Group* connection, const std::string& key, const absl::Status& status) override;

 protected:
  // `agreement` says whether a connection's group is admitted. It, dispatcher and exporter are not owned and
  // outlive the object.
  LastingGroup(std::string name, GroupPlace place, ModelAgreement* agreement, Dispatcher* dispatcher,
               Exporter* exporter);

  // A connection whose events come here and whose metrics go to the exporter; not yet started.
  std::unique_ptr<GroupClient> MakeClient(GroupClient::Options options);
  // How long the present connection has been ready; nullopt: never.
  std::optional<absl::Duration> ReadyFor() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Dispatcher* const dispatcher_;
  mutable absl::Mutex mutex_;
  std::unique_ptr<GroupClient> client_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Time> ready_since_ ABSL_GUARDED_BY(mutex_);

 private:
  const std::string name_;
  const GroupPlace place_;
  ModelAgreement* const agreement_;
  Exporter* const exporter_;
};

}  // namespace dflash
