// Reference of sampling: the contract read aloud, one row, one full sort. Float32 where the contract says
// float32, so every backend must give the same token.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/elementary/elementary.h"
#include "kernels/sampling/gumbel.h"
#include "kernels/sampling/philox.h"
#include "kernels/sampling/sampling.h"

namespace dflash {

// The ids that may be drawn, by (logit descending, id ascending); empty where no token can be chosen.
inline std::vector<int32_t> SurvivorsRef(const float* logits, int64_t vocabulary,
                                         const SamplingParams& params) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<int32_t> ids;
  for (int64_t v = 0; v < vocabulary; ++v) {
    if (std::isnan(logits[v]) || logits[v] == kInfinity) return {};
    if (logits[v] != -kInfinity) ids.push_back(static_cast<int32_t>(v));
  }
  std::sort(ids.begin(), ids.end(),
            [&](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
  if (ids.empty()) return ids;
  if (params.temperature <= 0) return {ids[0]};

  const auto keep = [&](size_t count) { ids.resize(std::min(ids.size(), count)); };
  const auto weight = [&](int32_t id) { return ExpF32((logits[id] - logits[ids[0]]) / params.temperature); };
  if (params.top_k > 0) keep(static_cast<size_t>(params.top_k));
  if (params.top_p < 1) {
    uint64_t total = 0, sum = 0;
    for (int32_t id : ids) total += static_cast<uint64_t>(weight(id) * 0x1p40f);
    const double enough = static_cast<double>(params.top_p) * static_cast<double>(total);
    size_t count = 0;
    do {
      sum += static_cast<uint64_t>(weight(ids[count++]) * 0x1p40f);
    } while (count < ids.size() && static_cast<double>(sum) < enough);
    keep(count);
  }
  size_t count = 1;
  while (count < ids.size() && weight(ids[count]) >= std::min(params.min_p, 1.0f)) ++count;
  keep(count);
  return ids;
}

inline int32_t SampleRef(const float* logits, int64_t vocabulary, const SamplingParams& params,
                         int64_t position) {
  std::vector<int32_t> ids = SurvivorsRef(logits, vocabulary, params);
  if (ids.empty()) return -1;
  if (params.temperature <= 0) return ids[0];
  const float best = logits[ids[0]];
  std::sort(ids.begin(), ids.end());  // so that the first of equal scores is the lowest id
  int32_t token = -1;
  float highest = 0;
  for (int32_t id : ids) {
    const uint32_t word = NoiseWord(params.seed, position, id, NoiseStream::kTargetChoice);
    const float score = (logits[id] - best) / params.temperature + GumbelNoiseF32(word);
    if (token < 0 || score > highest) {
      token = id;
      highest = score;
    }
  }
  return token;
}

}  // namespace dflash
