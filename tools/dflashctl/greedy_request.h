// The request that golden data is held against.
#pragma once

#include <cstdint>
#include <limits>

#include "dflash/v1/inference.pb.h"

namespace dflash::ctl {

// Greedy, of token ids (a container of them), with whole blocks however busy the server is, and only with
// them: a server without the drafter must not pass.
template <typename Ids>
v1::GenerateRequest GreedyRequest(const Ids& prompt, int64_t max_tokens, v1::SpeculationMode mode) {
  v1::GenerateRequest request;
  request.mutable_tokens()->mutable_ids()->Assign(prompt.begin(), prompt.end());
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stopping()->set_max_tokens(static_cast<uint32_t>(max_tokens));
  request.mutable_speculation()->set_mode(mode);
  request.mutable_speculation()->set_strict(true);
  request.mutable_speculation()->set_max_draft_tokens(std::numeric_limits<uint32_t>::max());
  return request;
}

}  // namespace dflash::ctl
