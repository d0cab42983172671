// A worker group as the dispatcher sees it.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "daemon/request/group_request.h"

namespace dflash {

// Takes requests; any thread. Calls must not block and must not call back into GroupEvents before they
// return. Requests of a lost group go nowhere.
class Group {
 public:
  virtual ~Group() = default;
  virtual const std::string& name() const = 0;
  // `key` is unique among the group's requests.
  virtual void Submit(const std::string& key, const GroupRequest& request) = 0;
  // Ends a request within one step; its OnFailed follows. Unknown keys are ignored.
  virtual void Cancel(const std::string& key, const absl::Status& reason) = 0;
  // Time since the group was last heard of; zero before.
  virtual absl::Duration HeartbeatAge() const = 0;
};

// What a group reports; from any thread, but one call at a time for each group.
class GroupEvents {
 public:
  virtual ~GroupEvents() = default;
  // The group serves. Once, before anything else but OnLost.
  virtual void OnReady(Group* group, const GroupInfo& info) = 0;
  // How many requests it has been willing to take since OnReady; never shrinks.
  virtual void OnCredits(Group* group, uint64_t granted_total) = 0;
  virtual void OnStarted(Group* group, const std::string& key, const StartedOutput& started) = 0;
  virtual void OnTokens(Group* group, const std::string& key, StepOutput output) = 0;
  virtual void OnFinished(Group* group, const std::string& key, const FinishedOutput& finished) = 0;
  virtual void OnFailed(Group* group, const std::string& key, const absl::Status& status) = 0;
  // The group is gone, for the reason given; may come more than once, the first counts.
  virtual void OnLost(Group* group, const std::string& why) = 0;
};

}  // namespace dflash
