// What is done with rows of logits besides filtering and drawing: the rules of their requests, and log
// probabilities.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/sampling/logit_rules.h"

namespace dflash {

// Rules of the rows of one sampling, in their order, as the host writes them
// (kernels/sampling/logit_rules.h).
struct RuleBatch {
  std::vector<RowRules> rows;
  std::vector<LogitEdit> edits;
  std::vector<uint32_t> masks;
  int64_t mask_words = 0;  // of every mask
};

struct RowProcessing {
  bool has_rules = false;
  const RuleBatch* rules = nullptr;  // of rank 0, which has the say; other ranks may have none
  int32_t log_probs = 0;             // 0: none are wanted; else one and the number of best tokens
  bool any() const { return has_rules || log_probs > 0; }
};

inline constexpr int32_t kMaxTopLogProbs = 20;

// Natural logarithms of probabilities at one place of an output, under the target's own distribution.
struct TokenLogProbs {
  struct Top {
    int32_t token = 0;
    float log_prob = 0;
  };
  float log_prob = 0;    // of the token there
  std::vector<Top> top;  // the best tokens, best first, equal ones by id
};

}  // namespace dflash
