#include "worker/engine/prompt_sampler.h"

#include <algorithm>

#include "base/status.h"

namespace dflash {

RowProcessing KnownRows::Processing() const {
  RowProcessing processing;
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (!batch.sequences[i].last_logits) continue;
    processing.has_rules |= sequences[i]->rules != nullptr;
    processing.log_probs = std::max(processing.log_probs, sequences[i]->request.log_probs);
  }
  return processing;
}

absl::StatusOr<PromptSampler> PromptSampler::Create(int64_t rows, int64_t vocabulary, Target* target,
                                                    const Stream& stream) {
  PromptSampler sampler;
  sampler.vocabulary_ = vocabulary;
  sampler.target_ = target;
  sampler.stream_ = &stream;
  DFLASH_ASSIGN_OR_RETURN(sampler.params_, Buffer::Allocate(rows * int64_t{sizeof(SamplingParams)}, stream));
  DFLASH_ASSIGN_OR_RETURN(sampler.positions_, Buffer::Allocate(rows * int64_t{sizeof(int64_t)}, stream));
  DFLASH_ASSIGN_OR_RETURN(sampler.tokens_, Buffer::Allocate(rows * int64_t{sizeof(int32_t)}, stream));
  return sampler;
}

absl::StatusOr<PromptSampler::Tokens> PromptSampler::Sample(const KnownRows& known,
                                                            const ForwardResult& forward) {
  std::vector<SamplingParams> params;
  std::vector<int64_t> positions;
  SamplingReach reach = SamplingReach::kBest;
  RowProcessing processing = known.Processing();
  RuleBatch rules;
  processing.rules = &rules;
  for (size_t i = 0; i < known.sequences.size(); ++i) {
    if (!known.batch.sequences[i].last_logits) continue;
    const Sequence& sequence = *known.sequences[i];
    rules.rows.emplace_back();
    if (sequence.rules != nullptr) sequence.rules->Describe({}, params.size(), rules);
    params.push_back(sequence.request.sampling);
    reach = std::max(reach, ReachOf(params.back()));
    positions.push_back(sequence.prompt_size());
  }
  Tokens sampled;
  sampled.tokens.resize(params.size());
  if (params.empty()) return sampled;
  const auto count = static_cast<int64_t>(params.size());
  DFLASH_RETURN_IF_ERROR(
      CopyToDevice(params_.data(), params.data(), count * int64_t{sizeof(SamplingParams)}, *stream_));
  DFLASH_RETURN_IF_ERROR(
      CopyToDevice(positions_.data(), positions.data(), count * int64_t{sizeof(int64_t)}, *stream_));
  DFLASH_RETURN_IF_ERROR(target_->SampleProcessed(forward.logits.Rows(0, count), params_.As<SamplingParams>(),
                                                  positions_.As<int64_t>(), vocabulary_, reach, processing,
                                                  tokens_.As<int32_t>(), &sampled.log_probs));
  DFLASH_RETURN_IF_ERROR(
      CopyToHost(sampled.tokens.data(), tokens_.data(), count * int64_t{sizeof(int32_t)}, *stream_));
  return sampled;
}

}  // namespace dflash
