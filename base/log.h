// How the log of our programs looks: one line a message on standard error, readable text or JSON. Messages go
// through spdlog as anywhere; those with fields of their own through LogEvent; gRPC's come through
// base/grpc_log.h; and what anybody writes to C's stderr (a failed check does), as errors, line by line. Who
// logs never waits for whoever reads standard error (base/log_writer.h); a process that ends does, for a
// second without progress at most: exit, and flush of the default logger before an _exit.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "spdlog/common.h"
#include "spdlog/sinks/sink.h"

namespace dflash {

enum class LogFormat : uint8_t { kText, kJson };

// Makes `sink` the log of this process, which is called `component`. Text: "2026-01-31T12:00:00.000Z info
// dflashd: message key=value ...". JSON: {"ts":"...","level":"info","component":"dflashd","msg":"message",
// "key":value,...}, ts in RFC 3339 with microseconds. Levels are spelt debug, info, warn, error; what is
// written whatever the level (spdlog's level off) is info, what is critical error. Text from outside cannot
// make a second line or another field. Call it before other threads log.
void SetUpLog(const std::string& component, LogFormat format, spdlog::level::level_enum level,
              spdlog::sink_ptr sink);
// The same on standard error.
void SetUpLog(const std::string& component, LogFormat format, spdlog::level::level_enum level);
// An exception that nobody converted, in whatever thread, is said in the log and ends the process where it
// was thrown: no destructor runs, since those of gRPC wait for threads that may never have started. What the
// system did not give (memory, a thread) ends it with `code`, anything else, a bug, aborts it.
void EndOnUncaughtExceptions(int code);

// "text", "json".
LogFormat ParseLogFormat(std::string_view name);
// "debug", "info", "warn", "error".
spdlog::level::level_enum ParseLogLevel(std::string_view name);

// Changes which messages are logged while the process runs. Any thread.
void ChangeLogLevel(spdlog::level::level_enum level);
// The level that was last set so, as ParseLogLevel reads it; empty: that of SetUpLog is still in force.
std::string ChangedLogLevel();
// Changes the level to what ChangedLogLevel says in the process that directs this one, and says so in the
// log, whatever the level, where it is another than before. Anything that is no level changes nothing.
void FollowLogLevel(std::string_view name);

struct LogField {
  std::string_view key;  // a constant, [a-z_]+
  std::variant<std::string, int64_t, double> value;
};
// One message with fields. `message` is a constant.
void LogEvent(spdlog::level::level_enum level, std::string_view message, const std::vector<LogField>& fields);

}  // namespace dflash
