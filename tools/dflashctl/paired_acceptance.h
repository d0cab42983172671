// Whether rounds lose accepted drafts against the same rounds, run another way.
#pragma once

#include <vector>

namespace dflash::ctl {

struct RoundPair {
  double ours = 0, theirs = 0;  // accepted drafts
};

// The loss of `ours` and what may be chance: near ties of 16-bit arithmetic, or a weak drafter's few drafts.
struct AcceptanceLoss {
  double loss = 0;     // relative to all of `theirs`; 0 where there is none
  double limit = 0;    // 0.15, or three standard errors of the loss, estimated from the rounds' differences
  bool tells = false;  // the loss of every draft would be past its limit
};
AcceptanceLoss CompareRounds(const std::vector<RoundPair>& rounds);

}  // namespace dflash::ctl
