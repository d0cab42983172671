// W3C trace context: which trace a request belongs to (https://www.w3.org/TR/trace-context, version 00).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace dflash {

struct TraceContext {
  std::string trace_id;             // 32 lower-case hexadecimal digits, not all zero
  std::string span_id;              // 16, likewise
  uint8_t flags = 0;                // bit 0: this trace is recorded
  std::string parent_span_id = {};  // the caller's; empty: the trace begins here
};

// Reads a traceparent header; nullopt when it is none. A higher version than 00 is read as far as 00 goes.
std::optional<TraceContext> ParseTraceparent(std::string_view header);
std::string FormatTraceparent(const TraceContext& context);
// The server's own part of the caller's trace, or a trace of its own when there is none: `bits` are random.
TraceContext ContinueTrace(const std::optional<TraceContext>& caller, uint64_t bits, uint64_t more_bits,
                           uint64_t span_bits);

}  // namespace dflash
