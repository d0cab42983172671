// Reference of the drafter's choice, in double precision.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace dflash {

struct DraftChoiceRef {
  int32_t token = -1;
  double confidence = 0;
};

inline DraftChoiceRef ChooseDraftRef(const float* logits, int64_t vocabulary) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  DraftChoiceRef choice;
  for (int64_t v = 0; v < vocabulary; ++v) {
    if (std::isnan(logits[v]) || logits[v] == kInfinity) return {};
    if (logits[v] == -kInfinity) continue;
    if (choice.token < 0 || logits[v] > logits[choice.token]) choice.token = static_cast<int32_t>(v);
  }
  if (choice.token < 0) return choice;
  double sum = 0;
  for (int64_t v = 0; v < vocabulary; ++v)
    sum += std::exp(static_cast<double>(logits[v]) - static_cast<double>(logits[choice.token]));
  choice.confidence = 1 / sum;
  return choice;
}

}  // namespace dflash
