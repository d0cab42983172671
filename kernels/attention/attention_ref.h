// Reference of attention over one sequence whose keys and values lie in one dense array: one loop, no blocks.
// Acc = double is the oracle of every backend's test.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/attention/attention.h"

namespace dflash {

inline bool IsVisible(const AttentionMask& mask, int64_t query, int64_t key) {
  if (mask.causal && key > query) return false;
  if (mask.window > 0 && query - key >= mask.window) return false;
  if (mask.window > 0 && !mask.causal && key - query >= mask.window) return false;
  return true;
}

// One query head at absolute position `query` over the keys at positions [first, end): key p of this head
// begins at keys[(p - first) * stride], its value at values[(p - first) * stride]. out: [head_dim].
template <typename Acc>
void AttentionRef(const float* q, int64_t query, const float* keys, const float* values, int64_t stride,
                  int64_t first, int64_t end, int64_t head_dim, const AttentionMask& mask, Acc scale,
                  Acc* out) {
  std::vector<Acc> scores;
  std::vector<int64_t> visible;
  Acc best = 0;
  for (int64_t p = first; p < end; ++p) {
    if (!IsVisible(mask, query, p)) continue;
    Acc dot = 0;
    for (int64_t d = 0; d < head_dim; ++d) dot += Acc(q[d]) * Acc(keys[(p - first) * stride + d]);
    if (visible.empty() || scale * dot > best) best = scale * dot;
    scores.push_back(scale * dot);
    visible.push_back(p);
  }
  Acc sum = 0;
  for (Acc& score : scores) sum += score = std::exp(score - best);
  for (int64_t d = 0; d < head_dim; ++d) {
    Acc total = 0;
    for (size_t i = 0; i < visible.size(); ++i) {
      total += scores[i] * Acc(values[(visible[i] - first) * stride + d]);
    }
    out[d] = visible.empty() ? Acc(0) : total / sum;
  }
}

}  // namespace dflash
