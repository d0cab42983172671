#include "daemon/routing/choose_group.h"

#include <algorithm>

namespace dflash {
namespace {

bool IsSound(const GroupSnapshot& group) {
  return group.ready && group.silence < kDoubtfulSilence && !(group.on_probation && group.running > 0);
}

}  // namespace

std::optional<size_t> ChooseGroup(const std::vector<GroupSnapshot>& groups) {
  const bool any_sound = std::any_of(groups.begin(), groups.end(), IsSound);
  const auto cost = [&](size_t i) { return groups[i].outstanding_tokens - groups[i].prefix_tokens; };
  std::optional<size_t> best;
  for (size_t i = 0; i < groups.size(); ++i) {
    const bool takes = groups[i].ready && groups[i].credits > 0;
    if (!takes || (any_sound && !IsSound(groups[i]))) continue;
    if (!best.has_value() || cost(i) < cost(*best)) best = i;
  }
  return best;
}

}  // namespace dflash
