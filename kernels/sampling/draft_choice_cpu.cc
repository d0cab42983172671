#include <algorithm>

#include "kernels/device/cpu/thread_pool.h"
#include "kernels/elementary/elementary.h"
#include "kernels/sampling/candidates_cpu.h"
#include "kernels/sampling/draft_choice_backend.h"

namespace dflash::backend {

absl::Status ListDrafts(ConstMatrixView logits, int64_t first_id, DraftCandidate* candidates,
                        const Stream& stream) {
  const SamplingKernels& kernels = CurrentSamplingKernels();
  ParallelFor(stream, logits.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      candidates[r] = DraftCandidate();
      if (logits.cols == 0) continue;
      const float* row = logits.Row<float>(r);
      const BestLogit best = kernels.find_best(row, logits.cols);
      if (best.id >= 0) {
        candidates[r].key = SortKey(best.logit, first_id + best.id);
        candidates[r].mass = kernels.exp_sum(row, logits.cols, best.logit);
      } else if (IsUnusable(row, logits.cols)) {
        candidates[r].key = kUnusableRow;
      }
    }
  });
  return absl::OkStatus();
}

absl::Status ChooseDrafts(const DraftCandidate* candidates, int64_t parts, int64_t rows, int32_t* tokens,
                          float* confidences, const Stream& stream) {
  ParallelFor(stream, rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      CandidateKey best = kNoCandidate;
      for (int64_t part = 0; part < parts; ++part) best = std::min(best, candidates[part * rows + r].key);
      const bool chosen = best != kUnusableRow && best != kNoCandidate;
      tokens[r] = chosen ? IdOf(best) : -1;
      if (confidences == nullptr) continue;
      float mass = 0;
      for (int64_t part = 0; part < parts && chosen; ++part) {
        const DraftCandidate& candidate = candidates[part * rows + r];
        if (candidate.key != kNoCandidate)
          mass += candidate.mass * ExpF32(ValueOf(candidate.key) - ValueOf(best));
      }
      confidences[r] = chosen ? 1 / mass : 0;
    }
  });
  return absl::OkStatus();
}

}  // namespace dflash::backend
