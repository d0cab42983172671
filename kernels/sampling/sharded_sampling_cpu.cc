#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/device/cpu/thread_pool.h"
#include "kernels/sampling/candidates_cpu.h"
#include "kernels/sampling/gumbel.h"
#include "kernels/sampling/philox.h"
#include "kernels/sampling/sharded_sampling_backend.h"

namespace dflash::backend {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <typename Fn>
void ForEachRow(const Stream& stream, int64_t rows, const Fn& fn) {
  ParallelFor(stream, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) fn(r);
  });
}

bool IsDrawn(const SamplingParams& params, CandidateKey best) {
  return best != kUnusableRow && best != kNoCandidate && params.temperature > 0;
}

bool HasFilter(const SamplingParams& params, SamplingFilter filter) {
  return filter == SamplingFilter::kTopK ? params.top_k > 0 : params.top_p < 1;
}

// The key of a token's score; kNoCandidate where min-p puts it out.
CandidateKey ScoreKey(float logit, int64_t id, CandidateKey best, const SamplingParams& params,
                      int64_t position) {
  const float log_weight = (logit - ValueOf(best)) / params.temperature;
  if (params.min_p > 0 && id != IdOf(best) && !(ExpF32(log_weight) >= std::min(params.min_p, 1.0f)))
    return kNoCandidate;
  const uint32_t word =
      NoiseWord(params.seed, position, static_cast<int32_t>(id), NoiseStream::kTargetChoice);
  return SortKey(log_weight + GumbelNoiseF32(word), id);
}

// The least of one key from every part.
CandidateKey LeastOf(const CandidateKey* keys, int64_t parts, int64_t stride) {
  CandidateKey least = kNoCandidate;
  for (int64_t part = 0; part < parts; ++part) least = std::min(least, keys[part * stride]);
  return least;
}

}  // namespace

absl::Status ListBest(ConstMatrixView logits, int64_t first_id, int64_t count, CandidateKey* keys,
                      const Stream& stream) {
  ForEachRow(stream, logits.rows, [&](int64_t r) {
    const float* row = logits.Row<float>(r);
    CandidateKey* list = keys + r * count;
    std::fill_n(list, count, kNoCandidate);
    if (logits.cols == 0) return;
    const BestLogit best = CurrentSamplingKernels().find_best(row, logits.cols);
    if (best.id < 0) {
      if (IsUnusable(row, logits.cols)) list[0] = kUnusableRow;
    } else if (count == 1) {
      list[0] = SortKey(best.logit, first_id + best.id);
    } else {
      std::vector<uint64_t> kept;
      KeepBest(row, logits.cols, std::min(count, logits.cols), kept);
      std::transform(kept.begin(), kept.end(), list,
                     [&](uint64_t key) { return key + static_cast<uint64_t>(first_id); });
    }
  });
  return absl::OkStatus();
}

absl::Status SampleFromLists(const CandidateKey* lists, int64_t parts, int64_t rows, int64_t count,
                             const SamplingParams* params, const int64_t* positions, int32_t* tokens,
                             const Stream& stream) {
  ForEachRow(stream, rows, [&](int64_t r) {
    const CandidateKey best = LeastOf(lists + r * count, parts, rows * count);
    tokens[r] = best == kUnusableRow || best == kNoCandidate ? -1 : IdOf(best);
    if (params == nullptr || !IsDrawn(params[r], best)) return;
    const SamplingParams& row = params[r];
    std::vector<CandidateKey> keys;
    for (int64_t part = 0; part < parts; ++part) {
      const CandidateKey* list = lists + (part * rows + r) * count;
      keys.insert(keys.end(), list, std::find(list, list + count, kNoCandidate));
    }
    std::sort(keys.begin(), keys.end());
    if (static_cast<int64_t>(keys.size()) > row.top_k) keys.resize(static_cast<size_t>(row.top_k));
    const auto mass = [&](CandidateKey key) {
      return Mass(Weight(ValueOf(key), ValueOf(best), row.temperature));
    };
    if (row.top_p < 1) {
      uint64_t total = 0, sum = 0;
      for (CandidateKey key : keys) total += mass(key);
      const double enough = static_cast<double>(row.top_p) * static_cast<double>(total);
      size_t length = 0;
      do {
        sum += mass(keys[length++]);
      } while (length < keys.size() && static_cast<double>(sum) < enough);
      keys.resize(length);
    }
    CandidateKey chosen = kNoCandidate;
    for (CandidateKey key : keys)
      chosen = std::min(chosen, ScoreKey(ValueOf(key), IdOf(key), best, row, positions[r]));
    tokens[r] = IdOf(chosen);
  });
  return absl::OkStatus();
}

absl::Status BeginSelection(const CandidateKey* best, int64_t parts, int64_t rows, RowSelection* selections,
                            const Stream& stream) {
  ForEachRow(stream, rows, [&](int64_t r) {
    selections[r] = RowSelection();
    selections[r].best = LeastOf(best + r, parts, rows);
  });
  return absl::OkStatus();
}

absl::Status CountDigits(ConstMatrixView logits, int64_t first_id, const SamplingParams* params,
                         SamplingFilter filter, int shift, const RowSelection* selections, uint64_t* sums,
                         const Stream& stream) {
  ForEachRow(stream, logits.rows, [&](int64_t r) {
    uint64_t* row_sums = sums + r * kDigits;
    std::fill_n(row_sums, kDigits, 0);
    const RowSelection& selection = selections[r];
    if (!IsDrawn(params[r], selection.best) || !HasFilter(params[r], filter)) return;
    const float* row = logits.Row<float>(r);
    const float best = ValueOf(selection.best);
    for (int64_t c = 0; c < logits.cols; ++c) {
      if (row[c] == -kInfinity) continue;
      const CandidateKey key = SortKey(row[c], first_id + c);
      if (key > selection.limit || (shift < 56 && key >> (shift + 8) != selection.digits)) continue;
      row_sums[key >> shift & (kDigits - 1)] +=
          filter == SamplingFilter::kTopK ? 1 : Mass(Weight(row[c], best, params[r].temperature));
    }
  });
  return absl::OkStatus();
}

absl::Status ChooseDigit(const uint64_t* sums, int64_t parts, int64_t rows, const SamplingParams* params,
                         SamplingFilter filter, int shift, RowSelection* selections, const Stream& stream) {
  ForEachRow(stream, rows, [&](int64_t r) {
    RowSelection& selection = selections[r];
    if (!IsDrawn(params[r], selection.best) || !HasFilter(params[r], filter)) return;
    uint64_t of_digit[kDigits];
    uint64_t total = 0;
    for (int64_t digit = 0; digit < kDigits; ++digit) {
      of_digit[digit] = 0;
      for (int64_t part = 0; part < parts; ++part)
        of_digit[digit] += sums[(part * rows + r) * kDigits + digit];
      total += of_digit[digit];
    }
    if (shift == 56) {
      selection.digits = 0;
      selection.before = 0;
      selection.enough = filter == SamplingFilter::kTopK
                             ? static_cast<double>(params[r].top_k)
                             : static_cast<double>(params[r].top_p) * static_cast<double>(total);
    } else if (selection.digits == kNoCandidate) {
      return;  // everything is not enough: all stay
    }
    uint64_t sum = selection.before;
    int64_t digit = 0;
    while (digit < kDigits &&
           (of_digit[digit] == 0 || static_cast<double>(sum + of_digit[digit]) < selection.enough)) {
      sum += of_digit[digit++];
    }
    selection.digits = digit < kDigits ? selection.digits << 8 | static_cast<uint64_t>(digit) : kNoCandidate;
    selection.before = sum;
    if (shift == 0) selection.limit = std::min(selection.limit, selection.digits);
  });
  return absl::OkStatus();
}

absl::Status DrawBelowLimit(ConstMatrixView logits, int64_t first_id, const SamplingParams* params,
                            const int64_t* positions, const RowSelection* selections, CandidateKey* keys,
                            const Stream& stream) {
  ForEachRow(stream, logits.rows, [&](int64_t r) {
    keys[r] = kNoCandidate;
    const RowSelection& selection = selections[r];
    if (!IsDrawn(params[r], selection.best)) return;
    const float* row = logits.Row<float>(r);
    for (int64_t c = 0; c < logits.cols; ++c) {
      if (row[c] == -kInfinity || SortKey(row[c], first_id + c) > selection.limit) continue;
      keys[r] = std::min(keys[r], ScoreKey(row[c], first_id + c, selection.best, params[r], positions[r]));
    }
  });
  return absl::OkStatus();
}

absl::Status ChooseTokens(const CandidateKey* draws, int64_t parts, int64_t rows,
                          const SamplingParams* params, const RowSelection* selections, int32_t* tokens,
                          const Stream& stream) {
  ForEachRow(stream, rows, [&](int64_t r) {
    const CandidateKey best = selections[r].best;
    if (best == kUnusableRow || best == kNoCandidate) {
      tokens[r] = -1;
    } else {
      tokens[r] = IdOf(IsDrawn(params[r], best) ? LeastOf(draws + r, parts, rows) : best);
    }
  });
  return absl::OkStatus();
}

}  // namespace dflash::backend
