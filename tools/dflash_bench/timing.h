// Timing on a machine that others use too: medians of short passes, alternatives measured in turn.
#pragma once

#include <functional>
#include <vector>

namespace dflash::bench {

// Nearest rank of the middle; 0 for no values.
double Median(std::vector<double> values);

struct Pass {
  std::function<void()> run;
  double units = 1;  // what one call does, for example calls of an operation: times are per unit
  std::function<void()> settle = [] {};  // after each pass, not timed
};

// Seconds per unit of each alternative. Passes run in turn, `repeats` times each after one that is not
// counted, and are repeated inside a pass until it is long enough for the clock. So a slow moment of the
// machine hits all alternatives alike: compare the medians, or the ratios pass by pass.
struct Timing {
  std::vector<double> seconds;  // one per pass, in order
  double median() const { return Median(seconds); }
};
std::vector<Timing> TimeInTurn(const std::vector<Pass>& alternatives, int repeats);
double TimeMedian(const std::function<void()>& run, double units, int repeats);

// Median of a / b, pass by pass.
double MedianRatio(const Timing& a, const Timing& b);

}  // namespace dflash::bench
