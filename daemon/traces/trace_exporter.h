// Hands spans to an OpenTelemetry collector: OTLP over HTTP, in JSON, in batches, from a thread of its own.
// Serving never waits for it: what does not fit into the bounded queue, and what the collector does not take,
// is dropped and counted (metrics::kTraceSpans).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/metric_registry.h"
#include "daemon/traces/span.h"

namespace dflash {

// Where a collector listens.
struct OtlpEndpoint {
  std::string host;
  std::string port;
  std::string path;  // begins with '/'
};
// "http://HOST[:PORT][/PATH]"; without a port 4318, without a path /v1/traces. InvalidArgument: anything
// else, also https, which is for a collector on this machine to add.
absl::StatusOr<OtlpEndpoint> ParseOtlpEndpoint(std::string_view url);

class TraceExporter {
 public:
  struct Options {
    OtlpEndpoint endpoint;
    std::string version;                         // of this build
    double sample_ratio = 1;                     // of traces that begin here
    size_t max_queued = 2048;                    // spans
    size_t max_batch = 512;                      // likewise, of one export
    absl::Duration interval = absl::Seconds(1);  // that spans wait for more of them
    absl::Duration timeout = absl::Seconds(5);   // of one export
  };

  // `registry` is not owned and outlives the object.
  TraceExporter(Options options, MetricRegistry* registry);
  // Exports what is queued, for at most as long as one export may take, and drops the rest.
  ~TraceExporter();

  // Is a trace that begins here recorded? The same for all servers that see its id.
  bool Samples(std::string_view trace_id) const;
  // Takes the spans of one request, all or none. Any thread; never blocks.
  void Export(std::vector<Span> spans);
  // Exports at once what is queued; false when that takes longer than `timeout`. For the end of a process
  // that does not end this object, because others may still hand it spans.
  bool Flush(absl::Duration timeout);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dflash
