#include "tools/dflashctl/paired_acceptance.h"

#include <algorithm>
#include <cmath>

namespace dflash::ctl {
namespace {

constexpr double kLeastLimit = 0.15;
constexpr double kStandardErrors = 3;

double Mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

// What chance alone may make of the mean of such values; infinite for fewer than two.
double Chance(const std::vector<double>& values) {
  const double mean = Mean(values);
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  const auto count = static_cast<double>(values.size());
  return count < 2 ? HUGE_VAL : kStandardErrors * std::sqrt(squares / (count * (count - 1)));
}

}  // namespace

AcceptanceLoss CompareRounds(const std::vector<RoundPair>& rounds) {
  std::vector<double> theirs, lost;
  for (const RoundPair& round : rounds) {
    theirs.push_back(round.theirs);
    lost.push_back(round.theirs - round.ours);
  }
  if (rounds.empty() || Mean(theirs) == 0) return {.limit = kLeastLimit};
  const double whole = Mean(theirs);
  return {.loss = std::max(0.0, Mean(lost) / whole),
          .limit = std::max(kLeastLimit, Chance(lost) / whole),
          .tells = Chance(theirs) < whole};
}

}  // namespace dflash::ctl
