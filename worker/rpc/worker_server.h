// The leader's side of dflash.worker.v1.WorkerService: takes requests from the coordinator, hands them to the
// engine, sends back what it reports.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/model_identity.h"
#include "worker/engine/engine.h"
#include "worker/engine/request.h"
#include "worker/rpc/engine_metrics.h"

namespace dflash {

// What the service needs of an engine; Engine's functions of the same names say what they do. Tests put a
// scripted one in its place.
class GenerationBackend {
 public:
  virtual ~GenerationBackend() = default;
  virtual void Submit(GenerationRequest request, std::unique_ptr<RequestSink> sink) = 0;
  virtual void Cancel(const std::string& id, absl::Status reason) = 0;
  virtual EngineGauges Gauges() const = 0;
};

// What GetGroupInfo answers.
struct GroupIdentity {
  std::string build;
  std::string backend;
  int64_t ranks = 1;
  std::string feature_contract;
  ModelIdentity model;
  int64_t vocabulary_size = 0;
  int64_t max_context_tokens = 0;
  int64_t max_sequences = 0;  // the first credits
  int64_t same_text_rows = 0;
  int64_t dflash_block_size = 0;  // 0: no drafter
  bool speculate_by_default = false;
  std::vector<int32_t> eos_token_ids;
  float default_temperature = 0;
  int32_t default_top_k = 0;
  float default_top_p = 1;
  float default_min_p = 0;
  std::string self_test = {};         // how it ended: "passed", "failed", "overridden", "skipped"
  std::string self_test_detail = {};  // what it found
  // Of tensors as they are stored (docs/golden-bundle.md), by "target NAME", "drafter NAME" and "whole
  // drafter NAME".
  std::map<std::string, std::string> fingerprints = {};
};

class WorkerServer {
 public:
  struct Options {
    std::string listen;  // "unix:PATH" (made with mode 0600) or "HOST:PORT"
    GroupIdentity identity;
    std::string secret = {};  // of the group: who does not know it is refused. Empty: everybody may call
    absl::Duration heartbeat_period = absl::Milliseconds(500);
    absl::Duration metrics_period = absl::Seconds(1);
    absl::Duration silence_limit = absl::Seconds(5);  // the coordinator counts as lost after it
  };

  // Listens. `backend` and `metrics` are not owned and outlive the server. `on_end` is called once, from a
  // thread of the server: OK when the coordinator asked the group to end, Unavailable when it was lost (its
  // stream broke, or nothing was heard for silence_limit after the first contact). It must not block and must
  // not destroy the server. Errors: InvalidArgument, naming the address, when it cannot listen there.
  static absl::StatusOr<std::unique_ptr<WorkerServer>> Start(const Options& options,
                                                             GenerationBackend* backend,
                                                             EngineMetrics* metrics,
                                                             std::function<void(absl::Status)> on_end);
  // Ends the stream and waits for it. Requests that the engine still runs report into the void; they may do
  // so until the engine is gone, after the server.
  ~WorkerServer();

 private:
  class Impl;
  explicit WorkerServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dflash
