// Spans as OpenTelemetry's protocol writes them in JSON (https://opentelemetry.io/docs/specs/otlp, JSON
// Protobuf encoding of ExportTraceServiceRequest).
#pragma once

#include <span>
#include <string>

#include "daemon/traces/span.h"

namespace dflash {

// The body of one export. `version` is the build's.
std::string OtlpJson(std::span<const Span> spans, const std::string& version);

}  // namespace dflash
