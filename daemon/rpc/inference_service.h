// dflash.v1.InferenceService on gRPC's callback API: parses, hands over, converts. Nothing here blocks;
// tokenizing and rendering run on a small pool of threads.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "daemon/auth/token_store.h"
#include "daemon/frontend/checkpoint_prompts.h"
#include "daemon/frontend/prepare.h"
#include "daemon/metrics/exporter.h"
#include "daemon/metrics/request_metrics.h"
#include "daemon/routing/dispatcher.h"
#include "daemon/traces/trace_exporter.h"

namespace grpc {
class Service;
}

namespace dflash {

class InferenceService {
 public:
  struct Options {
    std::string model;         // the served name
    std::string drafter_name;  // of the drafter's folder; empty: none
    std::string version;       // of this build
    absl::Duration default_deadline = absl::Seconds(600);
    absl::Duration max_deadline = absl::Seconds(3600);
    const TokenStore* tokens = nullptr;  // not owned; null: calls need no token
    TraceExporter* traces = nullptr;     // likewise; null: nobody watches
    int text_threads = 2;
    size_t max_unsent_bytes = 256 << 10;             // of one stream, before its client counts as too slow
    absl::Duration stall_limit = absl::Seconds(30);  // a client that takes nothing for so long is cut off
  };

  // Nothing is owned; all must outlive the service.
  InferenceService(Options options, Dispatcher* dispatcher, const CheckpointPrompts* prompts,
                   Exporter* exporter);
  // After the gRPC server has been shut down.
  ~InferenceService();

  // Cuts off clients that do not read; call it now and then, from one thread.
  void Tick(absl::Time now);

  // What requests get that come from now on; any thread.
  void SetSpeculation(const SpeculationPolicy& policy);
  SpeculationPolicy speculation() const;

  // Waits until clients have taken all streams to their end; false when `deadline` comes first, or `give_up`
  // says so, which is asked at once, when a stream has been taken, and by LookAgain.
  bool AwaitStreams(absl::Time deadline, const std::function<bool()>& give_up);
  void LookAgain();

  // To be registered with a server.
  grpc::Service* service();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dflash
