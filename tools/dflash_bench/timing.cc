#include "tools/dflash_bench/timing.h"

#include <algorithm>
#include <chrono>

namespace dflash::bench {
namespace {

constexpr double kShortestPassSeconds = 5e-3;

double Seconds(const std::function<void()>& run, int calls) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::vector<Timing> TimeInTurn(const std::vector<Pass>& alternatives, int repeats) {
  std::vector<int> calls;
  for (const Pass& pass : alternatives) {
    pass.run();
    pass.settle();
    int count = 1;
    while (count < (1 << 20) && Seconds(pass.run, count) < kShortestPassSeconds) count *= 2;
    pass.settle();
    calls.push_back(count);
  }
  std::vector<Timing> timings(alternatives.size());
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (size_t i = 0; i < alternatives.size(); ++i) {
      timings[i].seconds.push_back(Seconds(alternatives[i].run, calls[i]) /
                                   (calls[i] * alternatives[i].units));
      alternatives[i].settle();
    }
  }
  return timings;
}

double TimeMedian(const std::function<void()>& run, double units, int repeats) {
  return TimeInTurn({{run, units, [] {}}}, repeats)[0].median();
}

double MedianRatio(const Timing& a, const Timing& b) {
  std::vector<double> ratios;
  for (size_t i = 0; i < a.seconds.size() && i < b.seconds.size(); ++i) {
    ratios.push_back(a.seconds[i] / b.seconds[i]);
  }
  return Median(ratios);
}

}  // namespace dflash::bench
