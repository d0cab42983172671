#include <algorithm>
#include <limits>

#include "kernels/device/cpu/thread_pool.h"
#include "kernels/elementary/elementary.h"
#include "kernels/sampling/logit_rules_backend.h"

namespace dflash::backend {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

void Apply(const LogitEdit& edit, int64_t first_id, int64_t columns, float* row) {
  const int64_t column = edit.id - first_id;
  if (column < 0 || column >= columns) return;
  float x = row[column] + edit.bias;
  x = x > 0 ? x / edit.repetition : x * edit.repetition;
  row[column] = x - edit.penalty;
}

void Forbid(float& logit) {
  if (logit < kInfinity) logit = -kInfinity;
}

}  // namespace

absl::Status ProcessLogits(const LogitRules& rules, int64_t first_id, MatrixView logits,
                           const Stream& stream) {
  ParallelFor(stream, logits.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const RowRules& rule = rules.rows[r];
      float* row = logits.Row<float>(r);
      const LogitEdit *own = rules.edits + rule.own_begin, *own_end = rules.edits + rule.own_end;
      const auto is_own = [&](int32_t id) {
        const LogitEdit* found = std::lower_bound(
            own, own_end, id, [](const LogitEdit& edit, int32_t value) { return edit.id < value; });
        return found != own_end && found->id == id;
      };
      for (int32_t i = rule.shared_begin; i < rule.shared_end; ++i) {
        if (!is_own(rules.edits[i].id)) Apply(rules.edits[i], first_id, logits.cols, row);
      }
      for (const LogitEdit* edit = own; edit != own_end; ++edit) Apply(*edit, first_id, logits.cols, row);
      if (rule.mask >= 0) {
        const uint32_t* mask = rules.masks + rule.mask * rules.mask_words;
        for (int64_t c = 0; c < logits.cols; ++c) {
          const auto id = static_cast<uint64_t>(first_id + c);
          if ((mask[id / 32] >> (id % 32) & 1) == 0) Forbid(row[c]);
        }
      }
      if (rule.only >= 0) {
        for (int64_t c = 0; c < logits.cols; ++c) {
          if (first_id + c != rule.only) Forbid(row[c]);
        }
      }
    }
  });
  return absl::OkStatus();
}

absl::Status SumRows(ConstMatrixView logits, int64_t first_id, const int32_t* tokens, LogSum* sums,
                     const Stream& stream) {
  ParallelFor(stream, logits.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* row = logits.Row<float>(r);
      const int64_t column = tokens[r] - first_id;
      LogSum sum = {.best = -kInfinity, .token = -kInfinity, .sum = 0};
      if (logits.cols > 0) sum.best = *std::max_element(row, row + logits.cols);
      if (tokens[r] >= 0 && column >= 0 && column < logits.cols) sum.token = row[column];
      if (sum.best > -kInfinity) {
        for (int64_t c = 0; c < logits.cols; ++c) sum.sum += static_cast<double>(ExpF32(row[c] - sum.best));
      }
      sums[r] = sum;
    }
  });
  return absl::OkStatus();
}

}  // namespace dflash::backend
