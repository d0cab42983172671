#include "daemon/routing/choose_group.h"

namespace dflash {

std::optional<size_t> ChooseGroup(const std::vector<GroupSnapshot>& groups) {
  std::optional<size_t> best;
  for (size_t i = 0; i < groups.size(); ++i) {
    if (!groups[i].ready || groups[i].credits == 0) continue;
    if (!best.has_value() || groups[i].outstanding_tokens < groups[*best].outstanding_tokens) best = i;
  }
  return best;
}

}  // namespace dflash
