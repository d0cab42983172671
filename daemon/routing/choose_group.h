// Which group gets the next request: a pure function of a snapshot.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/time/time.h"

namespace dflash {

struct GroupSnapshot {
  bool ready = false;
  uint64_t credits = 0;            // requests that it takes now
  int64_t running = 0;             // requests that it has
  int64_t outstanding_tokens = 0;  // prompt and limit on output of these
  int64_t prefix_tokens = 0;       // of the request's prompt, that the group is likely to have in its cache
  absl::Duration silence;          // since it was last heard of
  bool on_probation = false;       // it was lost, and has not finished a request since
};

// A group that has not been heard of for so long (three heartbeats) gets nothing while others are sound.
inline constexpr absl::Duration kDoubtfulSilence = absl::Milliseconds(1500);

// The index of the group that would be done first: with credits, and the least outstanding tokens after those
// of the prompt that its cache saves; the first of equals. A group that is silent, or on probation and busy
// with its trial request, is passed over as long as any ready group is sound, even if the request then waits.
// nullopt: no group takes a request now.
std::optional<size_t> ChooseGroup(const std::vector<GroupSnapshot>& groups);

}  // namespace dflash
