// A worker group on another host: the connection to its leader, made again whenever it is lost. Whoever
// started the group there (dflash-worker --launch) starts its processes again.
#pragma once

#include <memory>
#include <string>

#include "absl/time/time.h"
#include "daemon/group_lives.h"
#include "daemon/metrics/exporter.h"
#include "daemon/routing/dispatcher.h"
#include "daemon/routing/model_agreement.h"

namespace dflash {

class RemoteGroup {
 public:
  struct Options {
    std::string name;
    std::string address;  // "HOST:PORT" of the leader
    std::string build;
    std::string secret;  // of the group; empty: none
    absl::Duration silence_limit = absl::Seconds(5);
    absl::Duration max_delay = absl::Seconds(60);  // between two attempts
  };

  // Registers the group with the dispatcher and begins to connect; it is never given up. A group with another
  // model than `agreement` wants is not admitted. Agreement, dispatcher and exporter must outlive the object.
  static std::unique_ptr<RemoteGroup> Start(const Options& options, ModelAgreement* agreement,
                                            Dispatcher* dispatcher, Exporter* exporter);
  ~RemoteGroup();

  // Drops the connection, for good: the group is not asked to end.
  void Shutdown();

  GroupLives Lives() const;

 private:
  class Impl;
  explicit RemoteGroup(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dflash
