// Starts and watches the ranks of this host for a coordinator on another one: what dflashd does for its own
// groups. All ranks of a life end together, and are started again with the next epoch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace dflash {

struct LaunchOptions {
  std::vector<std::string> command;  // of a rank: program and flags, without those that the launcher adds
  int ranks = 1;                     // of the whole group
  int hosts = 1;                     // that the group is spread over, each with an equal part of the ranks
  int host_index = 0;                // which of them this is; 0 has rank 0
  bool share_device = false;         // all ranks of this host use one GPU
  // Of the rank channel. Empty, on one host only: a private Unix socket.
  std::string group_socket;
  std::string listen;  // of rank 0, for the coordinator
  absl::Duration max_delay = absl::Seconds(60);
};

// Returns when the launcher is asked to end (SIGTERM or SIGINT, which must be blocked in every thread), after
// all ranks have: 0, or the exit code of a rank that says that another start would meet the same. Errors:
// those of starting a process.
absl::StatusOr<int> Launch(const LaunchOptions& options);

}  // namespace dflash
