#include "kernels/sampling/sampling_cpu.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/device/cpu/thread_pool.h"
#include "kernels/sampling/candidates_cpu.h"
#include "kernels/sampling/gumbel.h"
#include "kernels/sampling/philox.h"
#include "kernels/sampling/sampling_backend.h"

namespace dflash::backend {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What the filters leave of a row. Where nothing but min-p is on, nothing needs an order: `all` with a bound.
struct Survivors {
  bool all = false;
  float min_weight = 0;
  std::vector<uint64_t> keys;  // unless all
};

// The filters of one row, before the draw. best: the highest logit.
void Process(const float* logits, int64_t vocabulary, const SamplingParams& params, float best,
             Survivors& survivors) {
  std::vector<uint64_t>& keys = survivors.keys;
  const auto weight = [&](int32_t id) { return Weight(logits[id], best, params.temperature); };
  survivors.min_weight = std::min(params.min_p, 1.0f);
  survivors.all = params.top_k <= 0 && !(params.top_p < 1);
  if (survivors.all) return;

  uint64_t total = 0;
  if (params.top_k > 0) {
    KeepBest(logits, vocabulary, std::min<int64_t>(params.top_k, vocabulary), keys);
    for (uint64_t key : keys) total += Mass(weight(IdOf(key)));
  } else {
    total = CurrentSamplingKernels().total_mass(logits, vocabulary, best, params.temperature);
  }
  if (params.top_p < 1) {
    const double enough = static_cast<double>(params.top_p) * static_cast<double>(total);
    const auto prefix = [&] {  // the shortest that is enough; 0: not enough keys
      uint64_t sum = 0;
      for (size_t i = 0; i < keys.size(); ++i) {
        sum += Mass(weight(IdOf(keys[i])));
        if (static_cast<double>(sum) >= enough) return i + 1;
      }
      return size_t{0};
    };
    size_t length = 0;
    if (params.top_k > 0) {
      length = prefix();
    } else {
      // The prefix is short in almost every text, so look for it among few before sorting many.
      for (int64_t count = 256; length == 0; count *= 16) {
        KeepBest(logits, vocabulary, std::min(count, vocabulary), keys);
        length = prefix();
        if (count >= vocabulary) break;
      }
    }
    keys.resize(length);
  }
  // Weights fall along the keys; the first, of weight 1, always stays.
  while (keys.size() > 1 && !(weight(IdOf(keys.back())) >= survivors.min_weight)) keys.pop_back();
}

// argmax of (logit - best) / temperature + noise over the survivors.
int32_t Draw(const float* logits, int64_t vocabulary, const SamplingParams& params, int64_t position,
             float best, const Survivors& survivors) {
  if (survivors.all) {
    return CurrentSamplingKernels().draw({.logits = logits,
                                          .vocabulary = vocabulary,
                                          .best = best,
                                          .temperature = params.temperature,
                                          .min_weight = survivors.min_weight,
                                          .seed = params.seed,
                                          .position = position});
  }
  int32_t token = -1;
  float highest = -kInfinity;
  for (uint64_t key : survivors.keys) {
    const int32_t id = IdOf(key);
    const uint32_t word = NoiseWord(params.seed, position, id, NoiseStream::kTargetChoice);
    const float score = (logits[id] - best) / params.temperature + GumbelNoiseF32(word);
    if (token < 0 || score > highest || (score == highest && id < token)) {
      highest = score;
      token = id;
    }
  }
  return token;
}

}  // namespace

absl::Status SampleRows(ConstMatrixView logits, const SamplingParams* params, const int64_t* positions,
                        int64_t vocabulary, int32_t* tokens, const Stream& stream) {
  const SamplingKernels& kernels = CurrentSamplingKernels();
  ParallelFor(stream, logits.rows, 1, [&](int64_t begin, int64_t end) {
    Survivors survivors;
    for (int64_t r = begin; r < end; ++r) {
      const float* row = logits.Row<float>(r);
      const BestLogit best = kernels.find_best(row, vocabulary);
      tokens[r] = best.id;
      if (best.id < 0 || params[r].temperature <= 0) continue;
      Process(row, vocabulary, params[r], best.logit, survivors);
      tokens[r] = Draw(row, vocabulary, params[r], positions[r], best.logit, survivors);
    }
  });
  return absl::OkStatus();
}

}  // namespace dflash::backend
