// The operators' gRPC port: dflash.v1.AdminService, grpc.health.v1, and reflection for whom it is open.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/metrics/exporter.h"
#include "daemon/routing/dispatcher.h"
#include "daemon/rpc/credentials.h"
#include "daemon/rpc/inference_service.h"

namespace dflash {

class AdminServer {
 public:
  struct Options {
    std::string address;  // "HOST:PORT" (port 0 takes a free one) or "unix:PATH" (a socket for this user
                          // only, without TLS)
    Access access;
    ReflectionPolicy reflection;
    absl::Duration drain_timeout = absl::Seconds(120);  // of a Drain that names none
    std::function<void(absl::Duration)> exit;           // drains with this timeout, and ends the process
  };

  // Dispatcher, service and exporter are not owned and must outlive the server. Unavailable, naming the
  // address: cannot listen there.
  static absl::StatusOr<std::unique_ptr<AdminServer>> Start(const Options& options, Dispatcher* dispatcher,
                                                            InferenceService* service,
                                                            const Exporter* exporter);
  ~AdminServer();  // ends all calls

  // Where it listens, the port filled in.
  const std::string& address() const;

 private:
  class Impl;
  explicit AdminServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dflash
