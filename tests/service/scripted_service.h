// The service in one process: real coordinator parts, a real leader's service, and in place of the engine a
// test.
#pragma once

#include <grpcpp/grpcpp.h>

#include <map>
#include <memory>
#include <string>

#include "absl/synchronization/mutex.h"
#include "daemon/frontend/checkpoint_prompts.h"
#include "daemon/metrics/exporter.h"
#include "daemon/routing/dispatcher.h"
#include "daemon/rpc/group_client.h"
#include "daemon/rpc/inference_service.h"
#include "daemon/rpc/public_server.h"
#include "dflash/v1/inference.grpc.pb.h"
#include "worker/rpc/engine_metrics.h"
#include "worker/rpc/worker_server.h"

namespace dflash {

// Keeps requests until the test moves them on.
class ScriptedEngine final : public GenerationBackend {
 public:
  void Submit(GenerationRequest request, std::unique_ptr<RequestSink> sink) override;
  // Ends the request as an engine would, and remembers why.
  void Cancel(const std::string& id, absl::Status reason) override;
  EngineGauges Gauges() const override;

  // Waits until `count` requests have come in all, and returns the id of the last.
  std::string Await(size_t count);
  GenerationRequest request(const std::string& id);
  // Reports to the request's sink. False when it has been cancelled.
  bool Start(const std::string& id);
  bool Emit(const std::string& id, TokensReport report);
  void Finish(const std::string& id, const FinishedReport& report);
  // Waits until a request has been cancelled, and returns why.
  absl::Status AwaitCancel(const std::string& id);

 private:
  absl::Mutex mutex_;
  std::string last_ ABSL_GUARDED_BY(mutex_);
  size_t count_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, GenerationRequest> requests_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::unique_ptr<RequestSink>> sinks_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, absl::Status> cancelled_ ABSL_GUARDED_BY(mutex_);
};

class ScriptedService {
 public:
  struct Options {
    int64_t max_sequences = 2;
    AdmissionLimits admission = {};
    size_t max_unsent_bytes = 256 << 10;
    absl::Duration stall_limit = absl::Seconds(600);
  };
  explicit ScriptedService(const Options& options);
  ~ScriptedService();

  ScriptedEngine& engine() { return engine_; }
  EngineMetrics& engine_metrics() { return engine_metrics_; }
  Dispatcher& dispatcher() { return dispatcher_; }
  Exporter& exporter() { return exporter_; }
  InferenceService& service() { return service_; }
  v1::InferenceService::Stub& stub() { return *stub_; }
  // Waits until a snapshot of the group's metrics has come that began after this call.
  void AwaitSnapshot();

 private:
  const std::string socket_;
  ScriptedEngine engine_;
  EngineMetrics engine_metrics_;
  std::unique_ptr<WorkerServer> worker_;
  CheckpointPrompts prompts_;
  Exporter exporter_;
  Dispatcher dispatcher_;
  InferenceService service_;
  std::unique_ptr<PublicServer> server_;
  std::unique_ptr<GroupClient> client_;
  std::unique_ptr<v1::InferenceService::Stub> stub_;
  absl::Mutex mutex_;
  int64_t snapshots_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace dflash
