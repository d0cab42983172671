#include "kernels/bench/cuda/bench.h"
#include "kernels/batch/segments.h"

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

namespace {
std::vector<Figure>& MutableFigures() {
  static std::vector<Figure> figures;
  return figures;
}
}  // namespace

void Record(const std::string& name, const Microseconds& time, double calls) {
  MutableFigures().push_back({name, {time.median / calls, time.low / calls, time.high / calls}});
}

const std::vector<Figure>& Figures() { return MutableFigures(); }

Matrix Noise(int64_t rows, int64_t cols, const Stream& stream) {
  Matrix matrix = Value(Matrix::Allocate(rows, cols, DType::kBf16, stream));
  Require(FillNormal(matrix.view().data, rows * cols * 2, 1, 3, stream));
  return matrix;
}

Buffer EqualSegments(int64_t sequences, int64_t rows, int64_t position, const Stream& stream) {
  std::vector<Segment> segments;
  for (int64_t i = 0; i < sequences; ++i) {
    segments.push_back({static_cast<int32_t>(i), static_cast<int32_t>(i * rows), static_cast<int32_t>(rows),
                        static_cast<int32_t>(position)});
  }
  return OnDevice(segments, stream);
}

}  // namespace dflash::bench
