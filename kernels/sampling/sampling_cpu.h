// The passes over a vocabulary of the CPU backend's sampling: one table of functions per instruction set, all
// with the same results.
#pragma once

#include <cstdint>

namespace dflash {

// The highest logit and the lowest id that has it; id -1 where no token can be chosen.
struct BestLogit {
  float logit;
  int32_t id;
};

// A draw among all ids whose weight is at least min_weight.
struct UnfilteredDraw {
  const float* logits;
  int64_t vocabulary;
  float best;
  float temperature;
  float min_weight;
  uint64_t seed;
  int64_t position;
};

struct SamplingKernels {
  BestLogit (*find_best)(const float* logits, int64_t vocabulary);
  // The first id in [from, vocabulary) whose logit is above `bound`, or vocabulary.
  int64_t (*next_above)(const float* logits, int64_t from, int64_t vocabulary, float bound);
  // Sum of floor(weight * 2^40).
  uint64_t (*total_mass)(const float* logits, int64_t vocabulary, float best, float temperature);
  // Sum of exp(logit - best), in one order on every instruction set.
  float (*exp_sum)(const float* logits, int64_t vocabulary, float best);
  int32_t (*draw)(const UnfilteredDraw& draw);
};
extern const SamplingKernels kSamplingKernelsScalar;
extern const SamplingKernels kSamplingKernelsAvx2;
extern const SamplingKernels kSamplingKernelsAvx512;

}  // namespace dflash
