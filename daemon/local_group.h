// A worker group on this host: its rank processes, their private sockets, the connection to the leader, and
// its lives: when one of the ranks or the connection is lost, all ranks are killed and the group is started
// again with the next epoch.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/restart_policy.h"
#include "daemon/group_lives.h"
#include "daemon/metrics/exporter.h"
#include "daemon/routing/dispatcher.h"
#include "daemon/routing/model_agreement.h"

namespace dflash {

class LocalGroup {
 public:
  struct Options {
    std::string name;
    // Of the worker processes, one a rank. Rank 0 gets "--listen ADDRESS", and in a group of several ranks
    // all get "--tp", "--rank", "--group-socket", "--group-id" and "--epoch".
    std::vector<std::vector<std::string>> commands;
    std::string build;
    RestartPolicy restart;
    // A life that is not ready so long after its start is over.
    absl::Duration load_timeout = absl::Seconds(600);
    absl::Duration silence_limit = absl::Seconds(5);  // a leader that says nothing for so long is lost
  };

  // Starts the ranks, registers the group with the dispatcher and connects to it. `on_give_up` is called once
  // when the group has ended and is not started again, with the exit code of the rank that explains it (128 +
  // signal when killed by one), after the dispatcher knows; from a thread of this object. A group with
  // another model than `agreement` wants is not admitted. Agreement, dispatcher and exporter must outlive it.
  // Errors: those of ChildProcess::Start and PrivateDirectory::Create.
  static absl::StatusOr<std::unique_ptr<LocalGroup>> Start(const Options& options, ModelAgreement* agreement,
                                                           Dispatcher* dispatcher, Exporter* exporter,
                                                           std::function<void(int)> on_give_up);
  // Kills what is left.
  ~LocalGroup();

  // Asks the group to end and waits for it, kills it after `timeout`. Nothing of it is left then.
  void Shutdown(absl::Duration timeout);

  GroupLives Lives() const;

 private:
  class Impl;
  explicit LocalGroup(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dflash
