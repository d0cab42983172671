// The commands of dflashctl. Each reads its own flags (argv[0] is "dflashctl COMMAND", which heads its help),
// runs, prints errors to stderr and returns an exit code (connection.h).
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "base/flag_parser.h"
#include "tools/dflashctl/connection.h"

namespace dflash::ctl {

int RunChat(int argc, const char* const* argv, Interrupt* interrupt);
int RunGenerate(int argc, const char* const* argv, Interrupt* interrupt);
int RunTop(int argc, const char* const* argv, Interrupt* interrupt);
int RunStatus(int argc, const char* const* argv, Interrupt* interrupt);
int RunReplay(int argc, const char* const* argv, Interrupt* interrupt);
int RunBench(int argc, const char* const* argv, Interrupt* interrupt);
int RunDrain(int argc, const char* const* argv, Interrupt* interrupt);
int RunResume(int argc, const char* const* argv, Interrupt* interrupt);
int RunSpeculation(int argc, const char* const* argv, Interrupt* interrupt);
int RunLogLevel(int argc, const char* const* argv, Interrupt* interrupt);
int RunDoctor(int argc, const char* const* argv, Interrupt* interrupt);
int RunGolden(int argc, const char* const* argv, Interrupt* interrupt);

// What the commands share.

// Parses; prints help, version or the error. Returns the exit code when the command is over with that.
std::optional<int> ParseCommandLine(FlagParser* parser, int argc, const char* const* argv);

// Print what went wrong and return the exit code for it.
int UsageError(const absl::Status& status);
int ServerError(const grpc::Status& status, const Interrupt& interrupt);

// Runs `count` jobs, at most `concurrency` at a time, in order of their index. After a job returns an error
// no further job begins; returns the first error.
grpc::Status RunConcurrently(int64_t count, int64_t concurrency,
                             const std::function<grpc::Status(int64_t index)>& job);

}  // namespace dflash::ctl
