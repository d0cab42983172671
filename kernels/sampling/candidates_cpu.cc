#include "kernels/sampling/candidates_cpu.h"

#include <algorithm>
#include <limits>

#include "kernels/device/cpu/instruction_set.h"

namespace dflash::backend {

const SamplingKernels& CurrentSamplingKernels() {
  return ForCurrentInstructionSet(kSamplingKernelsScalar, kSamplingKernelsAvx2, kSamplingKernelsAvx512);
}

// One pass that keeps a few times `count` candidates, cut back whenever the buffer is full.
void KeepBest(const float* logits, int64_t vocabulary, int64_t count, std::vector<uint64_t>& keys) {
  const auto cut = [&] {
    if (static_cast<int64_t>(keys.size()) <= count) return;
    std::nth_element(keys.begin(), keys.begin() + (count - 1), keys.end());
    keys.resize(static_cast<size_t>(count));
  };
  keys.clear();
  const auto capacity = static_cast<size_t>(std::min(vocabulary, std::max<int64_t>(4 * count, 1024)));
  keys.reserve(capacity);
  const auto next_above = CurrentSamplingKernels().next_above;
  float lowest = -std::numeric_limits<float>::infinity();  // a logit at or below it cannot enter: an equal
                                                           // one has a higher id
  for (int64_t v = 0; (v = next_above(logits, v, vocabulary, lowest)) < vocabulary;) {
    if (keys.size() == capacity) {
      cut();
      lowest = logits[IdOf(keys.back())];
      continue;
    }
    keys.push_back(SortKey(logits[v], v));
    ++v;
  }
  cut();
  std::sort(keys.begin(), keys.end());
}

}  // namespace dflash::backend
