// A worker group on this host: the process, its private socket, and the connection to it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/metrics/exporter.h"
#include "daemon/routing/dispatcher.h"

namespace dflash {

class LocalGroup {
 public:
  struct Options {
    std::string name;
    std::vector<std::string> command;  // of the worker; "--listen ADDRESS" is added
    std::string build;
  };

  // Starts the worker, registers the group with the dispatcher and connects to it. `on_exit` is called once
  // when the process has ended, with its exit code (128 + signal when killed by one), after the dispatcher
  // knows; from a thread of this object. Dispatcher and exporter must outlive it. Call from a thread that
  // lives as long as the process (ChildProcess::Start). Errors: those of ChildProcess::Start and
  // PrivateDirectory::Create.
  static absl::StatusOr<std::unique_ptr<LocalGroup>> Start(const Options& options, Dispatcher* dispatcher,
                                                           Exporter* exporter,
                                                           std::function<void(int)> on_exit);
  // Kills what is left.
  ~LocalGroup();

  // Asks the worker to end and waits for it, kills it after `timeout`.
  void Shutdown(absl::Duration timeout);
  absl::Duration HeartbeatAge() const;

 private:
  class Impl;
  explicit LocalGroup(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dflash
