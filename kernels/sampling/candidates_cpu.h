// Candidates of the CPU backend's sampling: keys, weights, and the best few of a row without sorting it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/elementary/elementary.h"
#include "kernels/sampling/sampling_cpu.h"

namespace dflash::backend {

inline float Weight(float logit, float best, float temperature) {
  return ExpF32((logit - best) / temperature);
}

// The integer that stands for a weight in sums: sums of integers do not depend on their order.
inline uint64_t Mass(float weight) { return static_cast<uint64_t>(weight * 0x1p40f); }

// Ascending keys are (value descending, id ascending).
inline uint64_t SortKey(float value, int64_t id) {
  const auto bits = std::bit_cast<uint32_t>(value + 0.0f);  // + 0: the two zeros are equal
  const uint32_t ascending = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint64_t>(id);
}

inline int32_t IdOf(uint64_t key) { return static_cast<int32_t>(key & 0xffffffffu); }

inline float ValueOf(uint64_t key) {
  const uint32_t ascending = ~static_cast<uint32_t>(key >> 32);
  return std::bit_cast<float>((ascending & 0x80000000u) != 0 ? ascending & 0x7fffffffu : ~ascending);
}

// A NaN or +infinity is among the logits.
inline bool IsUnusable(const float* logits, int64_t count) {
  return std::any_of(logits, logits + count,
                     [](float logit) { return !(logit < std::numeric_limits<float>::infinity()); });
}

const SamplingKernels& CurrentSamplingKernels();

// Sorted keys of the `count` best ids, fewer when the others are -infinity. No NaN may be among the logits.
void KeepBest(const float* logits, int64_t vocabulary, int64_t count, std::vector<uint64_t>& keys);

}  // namespace dflash::backend
