#include "base/log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/log_writer.h"
#include "spdlog/formatter.h"
#include "spdlog/sinks/base_sink.h"
#include "spdlog/spdlog.h"

namespace dflash {
namespace {

// Stands between a message and the fields that follow it, already in the format's own form.
constexpr char kFieldsFollow = '\x1f';

std::atomic<LogFormat> log_format = LogFormat::kText;
// As nobody has changed it: a level that ChangeLogLevel never sets.
std::atomic<spdlog::level::level_enum> changed_level = spdlog::level::n_levels;

// `text` as it may stand inside a JSON string. Bytes that are not ASCII stay as they are: what is logged is
// UTF-8 already, and a reader copes with what is not.
void AppendJson(std::string_view text, std::string* to) {
  constexpr char kHex[] = "0123456789abcdef";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      *to += '\\';
      *to += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      absl::StrAppend(to, "\\u00", std::string(1, kHex[byte >> 4]), std::string(1, kHex[byte & 15]));
    } else {
      *to += c;
    }
  }
}

// `text` on one line.
void AppendLine(std::string_view text, std::string* to) {
  for (const char c : text) *to += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? ' ' : c;
}

const char* NameOf(spdlog::level::level_enum level) {
  switch (level) {
    case spdlog::level::trace:
    case spdlog::level::debug:
      return "debug";
    case spdlog::level::warn:
      return "warn";
    case spdlog::level::err:
    case spdlog::level::critical:
      return "error";
    default:
      return "info";
  }
}

std::string NumberText(double number) {
  if (!std::isfinite(number)) return "null";
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), number, std::chars_format::general, 6).ptr};
}

// A whole line. `fields` are in the format's own form.
std::string LineOf(LogFormat format, absl::Time time, const char* level, std::string_view component,
                   std::string_view text, std::string_view fields) {
  std::string line;
  if (format == LogFormat::kJson) {
    absl::StrAppend(&line, "{\"ts\":\"",
                    absl::FormatTime("%Y-%m-%d%ET%H:%M:%E6SZ", time, absl::UTCTimeZone()), "\",\"level\":\"",
                    level, "\",\"component\":\"");
    AppendJson(component, &line);
    line += "\",\"msg\":\"";
    AppendJson(text, &line);
    line += '"';
    line += fields;
    line += "}\n";
  } else {
    absl::StrAppend(&line, absl::FormatTime("%Y-%m-%d%ET%H:%M:%E3SZ", time, absl::UTCTimeZone()), " ", level,
                    " ", std::string(component), ": ");
    AppendLine(text, &line);
    line += fields;
    line += '\n';
  }
  return line;
}

class LineFormatter final : public spdlog::formatter {
 public:
  explicit LineFormatter(LogFormat format) : format_(format) {}
  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<LineFormatter>(format_);
  }

  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& to) override {
    const std::string_view payload(message.payload.data(), message.payload.size());
    const std::string_view text = payload.substr(0, payload.find(kFieldsFollow));
    const std::string line = LineOf(format_, absl::FromChrono(message.time), NameOf(message.level),
                                    {message.logger_name.data(), message.logger_name.size()}, text,
                                    payload.substr(std::min(text.size() + 1, payload.size())));
    to.append(line.data(), line.data() + line.size());
  }

 private:
  const LogFormat format_;
};

// The last lines of a process wait so long for a reader that takes none.
constexpr absl::Duration kPatience = absl::Seconds(1);

std::string StderrLine(spdlog::level::level_enum level, std::string_view text) {
  return LineOf(log_format, absl::Now(), NameOf(level), spdlog::default_logger_raw()->name(), text, "");
}

// What writes standard error.
LogWriter& StderrWriter() {
  static LogWriter* const writer = LogWriter::Create(STDERR_FILENO, [](int64_t lines) {
    return StderrLine(spdlog::level::warn,
                      absl::StrCat(lines, " lines of this log were lost here: nobody read them in time"));
  });
  return *writer;
}

class StderrSink final : public spdlog::sinks::base_sink<std::mutex> {
 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    StderrWriter().Write({line.data(), line.size()});
  }
  void flush_() override { StderrWriter().Drain(kPatience); }
};

// Text of somebody who does not know of the log, whole lines of it where they were written as such. No lock
// of the logger: it may be the one that is about to abort, which is why this waits until they are written.
ssize_t WriteLines(void*, const char* text, size_t size) {
  for (std::string_view rest(text, size); !rest.empty();) {
    const std::string_view next = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(next.size() + 1, rest.size()));
    if (!next.empty()) StderrWriter().Write(StderrLine(spdlog::level::err, next));
  }
  StderrWriter().Drain(kPatience);
  return static_cast<ssize_t>(size);
}

// The sink of the log on standard error. From its first call on, C's stderr leads to WriteLines.
const spdlog::sink_ptr& SinkOfStderr() {
  static const spdlog::sink_ptr* const sink = [] {
    auto* real = new spdlog::sink_ptr(std::make_shared<StderrSink>());
    StderrWriter();
    std::atexit([] { StderrWriter().Drain(kPatience); });
    FILE* lines =
        fopencookie(nullptr, "w", {.read = nullptr, .write = WriteLines, .seek = nullptr, .close = nullptr});
    if (lines != nullptr) {
      setvbuf(lines, nullptr, _IOLBF, BUFSIZ);
      stderr = lines;  // a variable in the C library of GNU
    }
    return real;
  }();
  return *sink;
}

void AppendField(const LogField& field, LogFormat format, std::string* to) {
  const bool json = format == LogFormat::kJson;
  absl::StrAppend(to, json ? ",\"" : " ", std::string(field.key), json ? "\":" : "=");
  if (const auto* integer = std::get_if<int64_t>(&field.value)) {
    absl::StrAppend(to, *integer);
  } else if (const auto* number = std::get_if<double>(&field.value)) {
    *to += NumberText(*number);
  } else if (json) {
    *to += '"';
    AppendJson(std::get<std::string>(field.value), to);
    *to += '"';
  } else {
    AppendLine(std::get<std::string>(field.value), to);
  }
}

}  // namespace

void SetUpLog(const std::string& component, LogFormat format, spdlog::level::level_enum level,
              spdlog::sink_ptr sink) {
  log_format = format;
  auto logger = std::make_shared<spdlog::logger>(component, std::move(sink));
  logger->set_formatter(std::make_unique<LineFormatter>(format));
  logger->set_level(level);
  spdlog::set_default_logger(std::move(logger));
}

void SetUpLog(const std::string& component, LogFormat format, spdlog::level::level_enum level) {
  SetUpLog(component, format, level, SinkOfStderr());
}

void EndOnUncaughtExceptions(int code) {
  static std::atomic<int> exit_code;
  exit_code = code;
  std::set_terminate([] {
    const auto say = [](const char* what) {
      spdlog::critical("unexpected exception: {}", what);
      spdlog::default_logger()->flush();
    };
    if (std::current_exception() == nullptr) std::abort();  // no exception: std::terminate was called
    try {
      throw;
    } catch (const std::system_error& error) {
      say(error.what());
      std::_Exit(exit_code);
    } catch (const std::bad_alloc&) {
      say("out of memory");
      std::_Exit(exit_code);
    } catch (const std::exception& error) {
      say(error.what());
    } catch (...) {
      say("of no type that is known");
    }
    std::abort();
  });
}

LogFormat ParseLogFormat(std::string_view name) {
  return name == "json" ? LogFormat::kJson : LogFormat::kText;
}

spdlog::level::level_enum ParseLogLevel(std::string_view name) {
  if (name == "debug") return spdlog::level::debug;
  if (name == "warn") return spdlog::level::warn;
  return name == "error" ? spdlog::level::err : spdlog::level::info;
}

void ChangeLogLevel(spdlog::level::level_enum level) {
  changed_level = level;
  spdlog::set_level(level);
}

std::string ChangedLogLevel() {
  const spdlog::level::level_enum level = changed_level;
  return level == spdlog::level::n_levels ? "" : NameOf(level);
}

void FollowLogLevel(std::string_view name) {
  const spdlog::level::level_enum level = ParseLogLevel(name);
  if (name != NameOf(level) || changed_level == level) return;
  ChangeLogLevel(level);
  spdlog::default_logger()->log(spdlog::level::off, "the log level is now {}", NameOf(level));
}

void LogEvent(spdlog::level::level_enum level, std::string_view message,
              const std::vector<LogField>& fields) {
  if (!spdlog::should_log(level)) return;
  std::string payload(message);
  payload += kFieldsFollow;
  for (const LogField& field : fields) AppendField(field, log_format, &payload);
  spdlog::default_logger()->log(level, spdlog::string_view_t(payload.data(), payload.size()));
}

}  // namespace dflash
