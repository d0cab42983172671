// Draws the first tokens of prompts that are through, from logits that a forward pass of known rows has left.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device/buffer.h"
#include "worker/engine/sequence.h"
#include "worker/model/target.h"

namespace dflash {

// Rows that the host describes: of prompts, and of emitted tokens that are fed again.
struct KnownRows {
  StepBatch batch;
  std::vector<Sequence*> sequences;  // of the batch

  // What is done with the logits of all rows that are sampled together: what any of them needs.
  RowProcessing Processing() const;
};

class PromptSampler {
 public:
  struct Tokens {
    std::vector<int32_t> tokens;           // one per new prompt that is through, in the batch's order
    std::vector<TokenLogProbs> log_probs;  // one per token, where somebody wants them
  };

  // For at most `rows` tokens at a time of the ids [0, vocabulary). Target and stream are not owned and
  // outlive it. ResourceExhausted: no memory.
  static absl::StatusOr<PromptSampler> Create(int64_t rows, int64_t vocabulary, Target* target,
                                              const Stream& stream);
  PromptSampler() = default;  // of no rows

  // `forward` is the target's of known.batch; the logits of prompts come before those of fed tokens. Errors:
  // Target::SampleProcessed, those of the device.
  absl::StatusOr<Tokens> Sample(const KnownRows& known, const ForwardResult& forward);

 private:
  int64_t vocabulary_ = 0;
  Target* target_ = nullptr;
  const Stream* stream_ = nullptr;
  Buffer params_, positions_, tokens_;  // SamplingParams, int64, int32; [rows]
};

}  // namespace dflash
