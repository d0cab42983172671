// The gRPC port that clients see: the inference service, grpc.health.v1, and reflection for whom it is open.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/rpc/credentials.h"
#include "daemon/rpc/inference_service.h"

namespace dflash {

class PublicServer {
 public:
  // Listens on `address` ("HOST:PORT"; port 0 takes a free one). `service` is not owned and must outlive the
  // server. Health: "" is SERVING from now on, "dflash.v1.InferenceService" after SetServing(true).
  // Unavailable, naming the address: cannot listen there.
  static absl::StatusOr<std::unique_ptr<PublicServer>> Start(
      const std::string& address, InferenceService* service,
      std::shared_ptr<grpc::ServerCredentials> credentials = grpc::InsecureServerCredentials(),
      const ReflectionPolicy& reflection = {});
  // Cancels calls that still run, and waits for their end.
  ~PublicServer();

  int port() const;
  // Any thread.
  void SetServing(bool serving);

 private:
  class Impl;
  explicit PublicServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dflash
