// A generation as spans of a trace: one for the call, and below it its parts.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "daemon/metrics/request_metrics.h"
#include "daemon/rpc/convert.h"
#include "daemon/traces/span.h"

namespace dflash {

// Of a generation that has ended with `status`: "generate", and as far as it came "prepare" (tokenizing),
// "queue", "prefill" and "decode". `prepared`: when it was queued; InfinitePast: never. `finished`: the
// summary of its output, if it has one. Attributes are those of the GenAI conventions of OpenTelemetry and,
// with the prefix "dflashd.", our own; nothing that the client wrote is among them but its request id.
std::vector<Span> SpansOf(const StreamFacts& facts, const RequestTimeline& timeline, absl::Time prepared,
                          int64_t cached_tokens, const absl::Status& status, const FinishedOutput* finished);

}  // namespace dflash
