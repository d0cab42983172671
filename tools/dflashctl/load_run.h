// Puts a load on a server and times what comes back.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "tools/dflashctl/connection.h"
#include "tools/dflashctl/load_plan.h"

namespace dflash::ctl {

// One request. Times are seconds since it was due, so what a late sender or a full server adds is in them
// (no coordinated omission); in a closed loop a request is due when its client is free.
struct LoadSample {
  double due = 0;           // since the phase began
  double delay = 0;         // until it was sent
  double first_token = -1;  // -1: none came
  double last_token = -1;
  double end = 0;
  double queue = 0;  // of it in the server's queue, as the server says; 0 when it did not finish
  int64_t client = 0;
  int64_t prompt_tokens = 0;  // as the server counted; 0 when it did not start
  int64_t cached_tokens = 0;
  int64_t tokens = 0;
  int64_t rounds = 0, drafted = 0, accepted = 0;
  grpc::StatusCode code = grpc::StatusCode::OK;
  std::string reason;       // of a failure (ErrorInfo)
  double retry_after = -1;  // the server's hint; -1: none
  bool Refused() const { return code == grpc::StatusCode::RESOURCE_EXHAUSTED && first_token < 0; }
};

// The gap between two chunks of one stream.
struct StepSample {
  double due = 0;  // of its request, since the phase began
  double seconds = 0;
  int64_t tokens = 0;  // that the second brought
};

struct LoadPhase {
  // Open loop: requests come at this rate whatever becomes of them; 0: closed loop.
  double rate = 0;
  // Closed loop: each sends its next request when the last has ended, or, refused, when the server's hint
  // says. Open loop: the connections over which requests are spread.
  int64_t clients = 1;
  double seconds = 10;                         // no request is sent later
  int64_t max_requests = 1'000'000;            // nor more than these
  absl::Duration timeout = absl::Seconds(60);  // of a request, from when it was due
  uint64_t seed = 1;                           // of the arrivals
  uint64_t first_index = 0;                    // of the requests

  bool open() const { return rate > 0; }
  std::string Name() const;  // "open 12.5/s", "closed 8"
};

struct LoadResult {
  LoadPhase phase;
  double wall_seconds = 0;  // until the last request had ended
  std::vector<LoadSample> requests;
  std::vector<StepSample> steps;
};

// How far a phase is; counts since it began, rates over the time since the last report.
struct LoadProgress {
  double seconds = 0;
  int64_t sent = 0, running = 0, finished = 0, refused = 0, failed = 0;
  double tokens_per_second = 0;
  double first_token_p50 = 0, first_token_p99 = 0;  // of the requests that ended since; 0 when none did
};

// Runs one phase to its end, or to an interrupt, which cancels what runs. `progress` (may be empty) is called
// about once a second. Every client has a connection of its own.
LoadResult RunLoad(const Endpoint& endpoint, const LoadPhase& phase, const RequestMaker& maker,
                   Interrupt* interrupt, const std::function<void(const LoadProgress&)>& progress);

}  // namespace dflash::ctl
