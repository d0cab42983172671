#include "kernels/bench/cuda/bench.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/device/event.h"
#include "kernels/device/graph.h"

namespace dflash::bench {

void Require(const absl::Status& status) {
  if (status.ok()) return;
  std::fflush(stdout);
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

Microseconds TimeReplays(const Stream& stream, const std::function<absl::Status()>& body, int replays) {
  const Graph graph = Value(Graph::Capture(stream, body));
  const Event start = Value(Event::Create(Event::Timing::kOn, stream));
  const Event end = Value(Event::Create(Event::Timing::kOn, stream));
  std::vector<double> times;
  constexpr int kWarmUps = 2;
  for (int i = 0; i < replays + kWarmUps; ++i) {
    Require(start.Record(stream));
    Require(graph.Launch(stream));
    Require(end.Record(stream));
    Require(end.Synchronize());
    if (i >= kWarmUps)
      times.push_back(1e3 * static_cast<double>(Value(Event::MillisecondsBetween(start, end))));
  }
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front(), times.back()};
}

}  // namespace dflash::bench
