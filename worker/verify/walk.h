// Acceptance: follows the target's own tokens through a verify plan. This is where a draft is accepted.
// Source: docs/spec/verification.md "One contract for chain and tree", "The equality rule".
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "worker/verify/verify_plan.h"

namespace dflash {

struct WalkResult {
  std::vector<int32_t> path;     // rows to commit: the anchor's, then each accepted draft's that was fed
  std::vector<int32_t> emitted;  // new tokens: the target's token at every row of the path
  int32_t accepted = 0;  // drafts that equal an emitted token; the correction or bonus token is not counted.
                         // A draft equal to the emitted stop token counts, though it is never fed.
  bool stopped = false;  // the last emitted token is a stop token
};

// plan: checked; target_tokens[i]: the token that the target emits after row i (sampled from its own
// distribution, so the rule is exact whatever the drafts are); room >= 1: most tokens to emit. Emits at least
// one token.
WalkResult Walk(const VerifyPlan& plan, const std::vector<int32_t>& target_tokens,
                const std::function<bool(int32_t token)>& is_stop, int64_t room);

}  // namespace dflash
