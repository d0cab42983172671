#include "daemon/log/trace_context.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace dflash {
namespace {

constexpr size_t kTraceDigits = 32, kSpanDigits = 16;
constexpr size_t kHeaderBytes = 2 + 1 + kTraceDigits + 1 + kSpanDigits + 1 + 2;

bool IsHex(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}
bool IsId(std::string_view text) {
  return IsHex(text) && text.find_first_not_of('0') != std::string_view::npos;
}

uint8_t Digit(char c) { return static_cast<uint8_t>(c <= '9' ? c - '0' : c - 'a' + 10); }

std::string Hex(uint64_t bits) { return absl::StrCat(absl::Hex(bits == 0 ? 1 : bits, absl::kZeroPad16)); }

}  // namespace

std::optional<TraceContext> ParseTraceparent(std::string_view header) {
  if (header.size() < kHeaderBytes) return std::nullopt;
  const std::string_view version = header.substr(0, 2), trace = header.substr(3, kTraceDigits),
                         span = header.substr(4 + kTraceDigits, kSpanDigits),
                         flags = header.substr(5 + kTraceDigits + kSpanDigits, 2);
  const bool dashes =
      header[2] == '-' && header[3 + kTraceDigits] == '-' && header[4 + kTraceDigits + kSpanDigits] == '-';
  const bool length = header.size() == kHeaderBytes || (version != "00" && header[kHeaderBytes] == '-');
  if (!dashes || !length || !IsHex(version) || version == "ff" || !IsId(trace) || !IsId(span) ||
      !IsHex(flags)) {
    return std::nullopt;
  }
  return TraceContext{std::string(trace),
                      std::string(span),
                      static_cast<uint8_t>(Digit(flags[0]) << 4 | Digit(flags[1])),
                      {}};
}

std::string FormatTraceparent(const TraceContext& context) {
  return absl::StrCat("00-", context.trace_id, "-", context.span_id, "-",
                      absl::Hex(context.flags, absl::kZeroPad2));
}

TraceContext ContinueTrace(const std::optional<TraceContext>& caller, uint64_t bits, uint64_t more_bits,
                           uint64_t span_bits) {
  // Version 00 gives a meaning to the lowest flag alone.
  if (caller.has_value())
    return {caller->trace_id, Hex(span_bits), static_cast<uint8_t>(caller->flags & 1), caller->span_id};
  return {absl::StrCat(Hex(bits), Hex(more_bits)), Hex(span_bits), 0, {}};
}

}  // namespace dflash
