// Tokens per round by kind of text, beside what a golden bundle has recorded.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/dtype.h"
#include "worker/golden/golden_bundle.h"

namespace dflash::doctor {

// The largest relative loss of tokens per round, by kind of text, that no defect is needed for. Near ties of
// 16-bit arithmetic change texts, and from there on rounds are others: four prompts of 1.46 tokens per round
// then scatter by several percent.
inline double LargestAcceptanceLoss(DType activations) { return activations == DType::kF32 ? 0.05 : 0.1; }

class RecordedAcceptance {
 public:
  // `rounds` rounds committed `tokens` tokens of this prompt's output. Ignored where nothing was recorded.
  void Add(const golden::GoldenPrompt& golden, int64_t rounds, int64_t tokens);

  bool empty() const { return kinds_.empty(); }
  // Of the worst kind, relative: 0 as recorded, 1 nothing.
  double loss() const;
  // "chat 10.10, recorded 10.15; code ..."
  std::string Describe() const;

 private:
  struct Sums {
    double tokens = 0, rounds = 0;
    double golden_tokens = 0, golden_rounds = 0;
    double ours() const;
    double golden() const { return golden_tokens / golden_rounds; }
  };
  std::map<std::string, Sums> kinds_;
};

}  // namespace dflash::doctor
