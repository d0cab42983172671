#include "tools/doctor/comparisons.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"

namespace dflash::doctor {

std::vector<int64_t> Sampled(int64_t rows) {
  constexpr int64_t kRows = 40;
  std::vector<int64_t> chosen;
  for (int64_t i = 0; i < std::min(rows, kRows); ++i)
    chosen.push_back(rows <= kRows ? i : i * (rows - 1) / (kRows - 1));
  return chosen;
}

Rows Pick(const Rows& rows, const std::vector<int64_t>& chosen) {
  Rows picked(0, rows.cols);
  for (const int64_t i : chosen) picked.Append(rows.Slice(i, 1));
  return picked;
}

Rows HeadNorms(const Rows& rows, int64_t head_dim) {
  Rows norms(rows.rows, rows.cols / head_dim);
  for (int64_t i = 0; i < rows.rows; ++i) {
    for (int64_t column = 0; column < rows.cols; ++column) {
      double& norm = norms.row(i)[column / head_dim];
      norm += rows.row(i)[column] * rows.row(i)[column];
    }
  }
  for (double& norm : norms.values) norm = std::sqrt(norm);
  return norms;
}

double ErrorOfSharedColumns(const Rows& ours, const Rows& golden) {
  const int64_t columns = std::min(golden.cols, ours.cols);
  return RelativeError(ours.Columns(0, columns), golden.Columns(0, columns));
}

std::string BundlePrompts(const Sequences& sequences) {
  std::vector<size_t> prompts;
  for (const std::optional<size_t>& prompt : sequences.golden) {
    if (prompt) prompts.push_back(*prompt);
  }
  return absl::StrCat("golden bundle, prompts ", absl::StrJoin(prompts, ", "));
}

absl::StatusOr<std::optional<double>> WorstAgainstBundle(
    const Subject& subject, const Sequences& sequences, const std::string& tensor,
    const std::function<double(const SequenceRecord& record, const Rows& golden)>& error) {
  std::optional<double> worst;
  for (size_t i = 0; i < sequences.records.size(); ++i) {
    const std::optional<size_t> prompt = sequences.golden[i];
    if (subject.bundle == nullptr || !prompt || !subject.bundle->HasTensor(*prompt, tensor)) continue;
    DFLASH_ASSIGN_OR_RETURN(const Rows golden, subject.bundle->Tensor(*prompt, tensor));
    worst = std::max(worst.value_or(0), error(sequences.records[i], golden));
  }
  return worst;
}

MaskMatch ClosestMask(const Subject& subject, const SequenceRecord& record, size_t layer,
                      const std::vector<bool>& causal, const std::vector<int64_t>& windows) {
  const DraftPass::Layer& pass = record.pass.layers[layer];
  const int64_t start = record.context_start;
  const LayerContext& all = record.context[layer];
  const LayerContext visible = {.k = all.k.Slice(start, record.context_end - start),
                                .v = all.v.Slice(start, record.context_end - start),
                                .first_position = start};
  MaskMatch best;
  best.error = kNoMatch;
  for (const bool flag : causal) {
    for (const int64_t window : windows) {
      const Rows attended = subject.reference->Attend(pass.q, pass.k, pass.v, record.length(), visible,
                                                      {.window = window, .causal = flag});
      const double error = RelativeError(attended, pass.attended);
      // Masks that hide the same keys give the same numbers: the first one counts.
      if (error < best.error * 0.99) best = {flag, window, error};
    }
  }
  return best;
}

Rotation WantedRotation(const Subject& subject) {
  return {.theta = subject.contract().rope_theta, .fraction = subject.contract().rotary_fraction};
}

RotationMatch ClosestRotation(const Subject& subject, const Rows& unrotated, const Rows& rotated,
                              const std::vector<int64_t>& positions, const Rotation& wanted) {
  const auto error_of = [&](const Rotation& rotation) {
    return RelativeError(subject.reference->Rotate(unrotated, positions, rotation), rotated);
  };
  RotationMatch best = {wanted, error_of(wanted)};
  if (best.error <= subject.gates.stage) return best;
  // The mistakes: the target's theta or one of another family, the target's partial rotation or another
  // part, positions off by one, and pairs of neighbours in place of halves.
  const TargetConfig& target = *subject.target_config;
  const double target_fraction =
      static_cast<double>(target.rotary_dim) / static_cast<double>(target.head_dim);
  std::vector<Rotation> others;
  for (const double theta : {wanted.theta, target.rope_theta, 1e4, 1e5, 5e5, 1e6, 5e6, 1e7}) {
    for (const double fraction : {wanted.fraction, target_fraction, 0.5, 0.25, 1.0}) {
      for (const int64_t shift : {0, -1, 1}) others.push_back({theta, fraction, shift, false});
    }
    others.push_back({theta, wanted.fraction, 0, true});
  }
  for (const Rotation& other : others) {
    const double error = error_of(other);
    if (error < best.error * 0.5) best = {other, error};
  }
  return best;
}

void Keep(const RotationMatch& match, const Rotation& wanted, std::optional<RotationMatch>* kept) {
  if (!*kept || (match.rotation != wanted && (*kept)->rotation == wanted)) *kept = match;
}

}  // namespace dflash::doctor
