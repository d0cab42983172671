// Which group gets the next request: a pure function of a snapshot.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace dflash {

struct GroupSnapshot {
  bool ready = false;
  uint64_t credits = 0;            // requests that it takes now
  int64_t outstanding_tokens = 0;  // prompt and limit on output of the requests that it has
};

// The index of the ready group with credits that has the least outstanding work, the first of equals; nullopt
// when no group takes a request now.
std::optional<size_t> ChooseGroup(const std::vector<GroupSnapshot>& groups);

}  // namespace dflash
