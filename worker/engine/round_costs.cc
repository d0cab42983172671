#include "worker/engine/round_costs.h"

#include <algorithm>
#include <iterator>

namespace dflash {
namespace {

// Until so many observations a cell has the least of them: one that was disturbed must not count for long.
constexpr int64_t kFirstObservations = 3;
constexpr double kFollowDown = 0.25, kFollowUp = 0.02;

}  // namespace

void RoundCosts::Observe(int64_t block_rows, int64_t sequences, double seconds) {
  Cell& cell = curves_[block_rows][sequences];
  cell.last = ++observations_;
  if (++cell.count == 1) {
    cell.seconds = seconds;
  } else if (cell.count <= kFirstObservations) {
    cell.seconds = std::min(cell.seconds, seconds);
  } else {
    const double change = std::clamp(seconds, 0.5 * cell.seconds, 2 * cell.seconds) - cell.seconds;
    cell.seconds += (change < 0 ? kFollowDown : kFollowUp) * change;
  }
}

void RoundCosts::Assume(int64_t block_rows, int64_t sequences, double seconds) {
  Cell& cell = curves_[block_rows][sequences];
  if (cell.count == 0) cell.seconds = seconds;
}

double RoundCosts::On(const Curve& curve, int64_t sequences) {
  const auto at_least = curve.lower_bound(sequences);
  const auto wanted = static_cast<double>(sequences);
  if (at_least == curve.begin()) {  // fewer sequences than ever: at best they cost their share
    return at_least->second.seconds * wanted / static_cast<double>(at_least->first);
  }
  const auto before = std::prev(at_least);
  if (at_least != curve.end()) {
    const double share =
        (wanted - static_cast<double>(before->first)) / static_cast<double>(at_least->first - before->first);
    return before->second.seconds + share * (at_least->second.seconds - before->second.seconds);
  }
  // More than ever: as the last two have it, at least nothing and at most their share.
  double slope = 0;
  if (before != curve.begin()) {
    const auto first = std::prev(before);
    slope =
        (before->second.seconds - first->second.seconds) / static_cast<double>(before->first - first->first);
    slope = std::clamp(slope, 0.0, before->second.seconds / static_cast<double>(before->first));
  }
  return before->second.seconds + slope * (wanted - static_cast<double>(before->first));
}

double RoundCosts::Estimate(int64_t block_rows, int64_t sequences) const {
  if (curves_.empty()) return 0;
  const auto at_least = curves_.lower_bound(block_rows);
  if (at_least == curves_.end()) return On(std::prev(at_least)->second, sequences);
  const double above = On(at_least->second, sequences);
  if (at_least->first == block_rows) return above;
  const auto wanted = static_cast<double>(block_rows);
  if (at_least == curves_.begin()) return above * wanted / static_cast<double>(at_least->first);
  const auto before = std::prev(at_least);
  const double below = On(before->second, sequences);
  return below + (above - below) * (wanted - static_cast<double>(before->first)) /
                     static_cast<double>(at_least->first - before->first);
}

int64_t RoundCosts::LastObserved(int64_t block_rows, int64_t sequences) const {
  const auto curve = curves_.find(block_rows);
  if (curve == curves_.end()) return 0;
  const auto cell = curve->second.find(sequences);
  return cell == curve->second.end() ? 0 : cell->second.last;
}

}  // namespace dflash
