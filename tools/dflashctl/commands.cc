#include "tools/dflashctl/commands.h"

#include <algorithm>
#include <cstdio>
#include <thread>
#include <vector>

namespace dflash::ctl {

std::optional<int> ParseCommandLine(FlagParser* parser, int argc, const char* const* argv) {
  FlagParser::Outcome outcome = FlagParser::Outcome::kRun;
  if (const absl::Status status = parser->Parse(argc, argv, &outcome); !status.ok()) {
    std::fprintf(stderr, "%s: %s\nTry: %s --help\n", argv[0], std::string(status.message()).c_str(), argv[0]);
    return kUsage;
  }
  switch (outcome) {
    case FlagParser::Outcome::kRun:
      return std::nullopt;
    case FlagParser::Outcome::kHelp:
      std::fputs(parser->Help().c_str(), stdout);
      return kSuccess;
    case FlagParser::Outcome::kVersion:
      std::puts("dflashctl " DFLASHD_VERSION);
      return kSuccess;
  }
  return kUsage;
}

int UsageError(const absl::Status& status) {
  std::fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
  return kUsage;
}

int ServerError(const grpc::Status& status, const Interrupt& interrupt) {
  if (interrupt.raised() && status.error_code() == grpc::StatusCode::CANCELLED) {
    std::fputs("interrupted\n", stderr);
    return kInterrupted;
  }
  std::fprintf(stderr, "error: %s\n", Describe(status).c_str());
  return kServerError;
}

grpc::Status RunConcurrently(int64_t count, int64_t concurrency,
                             const std::function<grpc::Status(int64_t index)>& job) {
  std::mutex mutex;
  int64_t next = 0;
  grpc::Status first_error;
  const auto work = [&] {
    for (;;) {
      int64_t index = 0;
      {
        std::lock_guard lock(mutex);
        if (next == count || !first_error.ok()) return;
        index = next++;
      }
      const grpc::Status status = job(index);
      if (status.ok()) continue;
      std::lock_guard lock(mutex);
      if (first_error.ok()) first_error = status;
    }
  };
  std::vector<std::thread> threads;
  for (int64_t i = 1; i < std::min(count, concurrency); ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  return first_error;
}

}  // namespace dflash::ctl
