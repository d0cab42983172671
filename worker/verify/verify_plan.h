// What a round sends to verification: the anchor and its drafts, as a tree given by parents (today always a
// chain). Source: docs/spec/verification.md "One contract for chain and tree".
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"

namespace dflash {

// Row 0 is the anchor. parents[0] = -1 and parents[i] < i; depths[i] = depths[parents[i]] + 1; children of
// one row carry distinct tokens. Row i is the token at absolute position anchor_position + depths[i].
struct VerifyPlan {
  std::vector<int32_t> tokens;
  std::vector<int32_t> parents;
  std::vector<int32_t> depths;

  int64_t rows() const { return static_cast<int64_t>(tokens.size()); }
  int64_t drafts() const { return rows() - 1; }
  // True when every row's parent is the row before it.
  bool IsChain() const;
  // The child of `row` that carries `token`, or -1.
  int32_t Child(int32_t row, int32_t token) const;
};

// The anchor followed by drafts[0], drafts[1], ...
VerifyPlan MakeChain(int32_t anchor, const std::vector<int32_t>& drafts);

// InvalidArgument naming the row that breaks a rule above.
absl::Status CheckPlan(const VerifyPlan& plan);

}  // namespace dflash
