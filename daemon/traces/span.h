// A span of a trace, as OpenTelemetry has it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/time/time.h"

namespace dflash {

struct Span {
  enum class Kind : uint8_t { kInternal = 1, kServer = 2 };  // numbers of OTLP
  using Value = std::variant<std::string, int64_t, double>;

  std::string trace_id;        // 32 hexadecimal digits
  std::string span_id;         // 16
  std::string parent_span_id;  // likewise; empty: there is none
  std::string name;
  Kind kind = Kind::kInternal;
  absl::Time start, end;
  std::vector<std::pair<std::string, Value>> attributes;
  std::string error;  // what went wrong; empty: nothing did
};

}  // namespace dflash
