#include "daemon/traces/otlp.h"

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace dflash {
namespace {

using nlohmann::json;

// 64-bit integers are strings in this encoding.
std::string Nanoseconds(absl::Time time) { return absl::StrCat(absl::ToUnixNanos(time)); }

json Attribute(const std::string& key, const Span::Value& value) {
  json encoded;
  if (const auto* text = std::get_if<std::string>(&value)) encoded["stringValue"] = *text;
  if (const auto* integer = std::get_if<int64_t>(&value)) encoded["intValue"] = absl::StrCat(*integer);
  if (const auto* number = std::get_if<double>(&value)) encoded["doubleValue"] = *number;
  return {{"key", key}, {"value", std::move(encoded)}};
}

json Encode(const Span& span) {
  json encoded = {{"traceId", span.trace_id},
                  {"spanId", span.span_id},
                  {"name", span.name},
                  {"kind", static_cast<int>(span.kind)},
                  {"startTimeUnixNano", Nanoseconds(span.start)},
                  {"endTimeUnixNano", Nanoseconds(span.end)},
                  {"attributes", json::array()},
                  {"status", json::object()}};
  if (!span.parent_span_id.empty()) encoded["parentSpanId"] = span.parent_span_id;
  for (const auto& [key, value] : span.attributes) encoded["attributes"].push_back(Attribute(key, value));
  if (!span.error.empty()) encoded["status"] = {{"code", 2}, {"message", span.error}};
  return encoded;
}

}  // namespace

std::string OtlpJson(std::span<const Span> spans, const std::string& version) {
  json encoded = json::array();
  for (const Span& span : spans) encoded.push_back(Encode(span));
  const json resource = {
      {"attributes", {Attribute("service.name", "dflashd"), Attribute("service.version", version)}}};
  const json scope = {{"scope", {{"name", "dflashd"}, {"version", version}}}, {"spans", std::move(encoded)}};
  const json request = {{"resourceSpans", {{{"resource", resource}, {"scopeSpans", {scope}}}}}};
  // A client's words are UTF-8 already; should others not be, the export goes on.
  return request.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace dflash
