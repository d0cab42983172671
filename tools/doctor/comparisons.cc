#include "tools/doctor/comparisons.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status.h"

namespace dflash::doctor {

void StageError::Keep(const StageError& other) {
  const auto rank = [](const StageError& stage) { return stage.tells_nothing() ? 1 : stage.fails() ? 2 : 0; };
  if (gate == 0 || rank(other) > rank(*this) ||
      (rank(other) == rank(*this) && other.error * gate > error * other.gate)) {
    *this = other;
  }
}

absl::StatusOr<StageError> CompareStage(const Subject& subject, const Rows& ours,
                                        const std::function<absl::StatusOr<Rows>()>& stage) {
  DFLASH_ASSIGN_OR_RETURN(const Rows right, stage());
  StageError error = {.error = RelativeError(ours, right), .gate = subject.gates.stage};
  // One drawing of signs may spare the number that decides.
  constexpr uint64_t kDrawings = 4;
  for (uint64_t seed = 0; seed < kDrawings && error.fails(); ++seed) {
    DFLASH_ASSIGN_OR_RETURN(const Rows moved, subject.reference->Moved(subject.gates.rounding, seed, stage));
    error.gate = std::max(error.gate, RelativeError(moved, right));
  }
  return error;
}

namespace {

void FailRange(const Subject& subject, const char* id, double largest) {
  const std::string words = absl::StrFormat(
      "weights lead to numbers beyond float32's range%s",
      std::isfinite(largest) ? absl::StrFormat(": up to %.2g in double precision", largest) : "");
  subject.report->Fail(id, words, words, Blame::kModel);
  subject.report->Of(id).look_at = "The drafter's weights: outliers, or a conversion that scaled them.";
}

}  // namespace

bool JudgeRange(const Subject& subject, const char* id) {
  if (subject.reference->fits_float32()) return false;
  FailRange(subject, id, subject.reference->largest());
  return true;
}

bool JudgeFinite(const Subject& subject, const char* id, const Rows& right) {
  if (std::all_of(right.values.begin(), right.values.end(),
                  [](double value) { return std::isfinite(value); }))
    return false;
  FailRange(subject, id, HUGE_VAL);
  return true;
}

void JudgeStage(const Subject& subject, const char* id, const StageError& worst, std::string compared,
                std::string detail, std::string cause) {
  Report& report = *subject.report;
  if ((worst.fails() || worst.tells_nothing()) && JudgeRange(subject, id)) return;
  if (worst.tells_nothing()) {
    return report.NotChecked(
        id,
        absl::StrFormat("rounding alone may move this by %s: with these weights nothing can be told from it",
                        std::isfinite(worst.gate) ? absl::StrFormat("%.2g of its size", worst.gate)
                                                  : "more than its size, which is 0"));
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
  DraftReference& reference = *subject.reference;
  const auto attend = [&](const Mask& mask) {
    return reference.Attend(reference.Rounded(pass.q), reference.Rounded(pass.k), reference.Rounded(pass.v),
                            record.length(),
                            {.k = reference.Rounded(visible.k),
                             .v = reference.Rounded(visible.v),
                             .first_position = visible.first_position},
                            {.window = mask.window, .causal = mask.causal});
  };
  MaskMatch match = {.mask = wanted, .wanted = {}};
  DFLASH_ASSIGN_OR_RETURN(match.wanted, CompareStage(subject, pass.attended, [&]() -> absl::StatusOr<Rows> {
                            return attend(wanted);
                          }));
  if (match.wanted.tells_nothing()) return match;
  double best = kNoMatch;
  for (const Mask& other : others) {
    if (other == wanted) continue;
    const double error = RelativeError(pass.attended, attend(other));
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
