#include "base/restart_policy.h"

#include <algorithm>

namespace dflash {

std::optional<absl::Duration> RestartDecider::OnEnd(std::optional<absl::Duration> served, bool permanent) {
  if (served.has_value()) {
    has_served_ = true;
    if (*served >= policy_.healthy_after) losses_ = 0;
  }
  ++losses_;
  if (!has_served_ && (permanent || losses_ >= policy_.max_failed_starts)) return std::nullopt;
  absl::Duration delay = policy_.first_delay;
  for (int i = 1; i < losses_ && delay < policy_.max_delay; ++i) delay *= 2;
  return std::min(delay, policy_.max_delay);
}

}  // namespace dflash
