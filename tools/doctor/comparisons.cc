#include "tools/doctor/comparisons.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status.h"

namespace dflash::doctor {

void StageError::Keep(const StageError& other) {
  if (gate == 0 || other.error * gate > error * other.gate) *this = other;
}

absl::StatusOr<StageError> CompareStage(const Subject& subject, const Rows& ours, const Rows& right,
                                        const std::function<absl::StatusOr<Rows>(double unit)>& moved) {
  StageError stage = {.error = RelativeError(ours, right), .gate = subject.gates.stage};
  if (!stage.fails()) return stage;
  DFLASH_ASSIGN_OR_RETURN(const Rows disturbed, moved(subject.gates.unit));
  const double rounding = subject.gates.roundings * RelativeError(disturbed, right);
  if (std::isfinite(rounding)) stage.gate = std::max(stage.gate, rounding);
  return stage;
}

void JudgeStage(const Subject& subject, const char* id, const StageError& worst, std::string compared,
                std::string detail, std::string cause) {
  Report& report = *subject.report;
  const double largest = subject.reference->largest();
  if (worst.fails() && !(largest <= std::numeric_limits<float>::max())) {
    const std::string words = absl::StrFormat(
        "weights lead to numbers beyond float32's range%s",
        std::isfinite(largest) ? absl::StrFormat(": up to %.2g in double precision", largest) : "");
    report.Judge(id, worst.error, worst.gate, std::move(compared), words, words);
    report.Of(id).blame = Blame::kModel;
    report.Of(id).look_at = "The drafter's weights: outliers, or a conversion that scaled them.";
    return;
  }
  if (worst.error > subject.gates.stage && worst.gate > 1) {
    return report.NotChecked(id, absl::StrFormat("rounding alone may move this by %.2g of its size: with "
                                                 "these weights nothing can be told from it",
                                                 worst.gate));
  }
  report.Judge(id, worst.error, worst.gate, std::move(compared), std::move(detail), std::move(cause));
}

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

absl::StatusOr<MaskMatch> ClosestMask(const Subject& subject, const SequenceRecord& record, size_t layer,
                                      const Mask& wanted, const std::vector<Mask>& others) {
  const DraftPass::Layer& pass = record.pass.layers[layer];
  const int64_t start = record.context_start;
  const LayerContext& all = record.context[layer];
  const LayerContext visible = {.k = all.k.Slice(start, record.context_end - start),
                                .v = all.v.Slice(start, record.context_end - start),
                                .first_position = start};
  // unit: by which what attention reads is disturbed.
  const auto attend = [&](const Mask& mask, double unit) {
    return subject.reference->Attend(Disturbed(pass.q, unit), Disturbed(pass.k, unit),
                                     Disturbed(pass.v, unit), record.length(),
                                     {.k = Disturbed(visible.k, unit),
                                      .v = Disturbed(visible.v, unit),
                                      .first_position = visible.first_position},
                                     {.window = mask.window, .causal = mask.causal});
  };
  MaskMatch match = {.mask = wanted, .wanted = {}};
  DFLASH_ASSIGN_OR_RETURN(
      match.wanted, CompareStage(subject, pass.attended, attend(wanted, 0),
                                 [&](double unit) -> absl::StatusOr<Rows> { return attend(wanted, unit); }));
  double best = kNoMatch;
  for (const Mask& other : others) {
    if (other == wanted) continue;
    const double error = RelativeError(pass.attended, attend(other, 0));
    // Near its edge a mask may hide little: one that explains much more counts where the wanted one is within
    // its gate, too. Masks that hide the same keys give the same numbers: the first one counts.
    if (error >= best * 0.99 || error > std::max(match.wanted.gate, subject.gates.stage)) continue;
    if (!match.wanted.fails() && error >= match.wanted.error / 4) continue;
    best = error;
    match.mask = other;
  }
  return match;
}

Rotation WantedRotation(const Subject& subject) {
  return {.theta = subject.contract().rope_theta, .fraction = subject.contract().rotary_fraction};
}

RotationMatch ClosestRotation(const Subject& subject, const Rows& unrotated, const Rows& rotated,
                              const std::vector<int64_t>& positions, const Rotation& wanted, double gate) {
  const auto error_of = [&](const Rotation& rotation) {
    return RelativeError(subject.reference->Rotate(unrotated, positions, rotation), rotated);
  };
  RotationMatch best = {wanted, error_of(wanted)};
  if (best.error <= gate) return best;
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
