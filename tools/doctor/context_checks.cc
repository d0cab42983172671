// fusion, injection, rope: from taps to the keys and values of the drafter's context
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/comparisons.h"

namespace dflash::doctor {
namespace {

// --- fusion

// Which of the known mistakes c is.
absl::StatusOr<std::string> CauseOfFusion(const Subject& subject, const Rows& taps, const Rows& c,
                                          double gate) {
  const std::pair<FusionForm, const char*> mistakes[] = {
      {FusionForm::kOnePlus,
       "the target's form of the norm, (1 + w) x / rms, is used in the drafter, whose norm is w x / rms"},
      {FusionForm::kUnnormed, "hidden_norm is left out"}};
  std::string cause = "fc or hidden_norm";
  for (const auto& [form, words] : mistakes) {
    DFLASH_ASSIGN_OR_RETURN(const Rows mistaken, subject.reference->Features(taps, form));
    if (RelativeError(c, mistaken) <= gate) cause = words;
  }
  return cause;
}

// c of the last 16 positions against the bundle's; none: not recorded, or with other weights.
absl::StatusOr<std::optional<double>> FusionAgainstBundle(const Subject& subject,
                                                          const Sequences& sequences) {
  if (!subject.target_recorded || !subject.drafter_recorded) return std::nullopt;
  return WorstAgainstBundle(
      subject, sequences, "context_feature_last16", [](const SequenceRecord& record, const Rows& golden) {
        return RelativeError(record.features.Slice(record.length() - golden.rows, golden.rows), golden);
      });
}

absl::Status CheckFusion(const Subject& subject, const Sequences& sequences) {
  Report& report = *subject.report;
  StageError worst;
  std::string cause;
  subject.reference->ForgetLargest();
  for (const SequenceRecord& record : sequences.records) {
    const std::vector<int64_t> positions = Sampled(record.length());
    const Rows taps = Pick(record.taps, positions), c = Pick(record.features, positions);
    DFLASH_ASSIGN_OR_RETURN(const StageError error, CompareStage(subject, c, [&] {
                              return subject.reference->Features(subject.reference->Rounded(taps));
                            }));
    worst.Keep(error);
    if (error.fails() && cause.empty()) {
      DFLASH_ASSIGN_OR_RETURN(cause, CauseOfFusion(subject, taps, c, error.gate));
    }
  }
  DFLASH_ASSIGN_OR_RETURN(const std::optional<double> golden, FusionAgainstBundle(subject, sequences));
  JudgeStage(subject, "fusion", worst, "double precision, c = norm(fc taps)",
             "c of sampled positions, from the taps that the drafter was given", cause);
  const bool right = report.Of("fusion").outcome == Outcome::kPass;
  // With arithmetic and taps right, what remains of a distance to the bundle is about the weights.
  if (!right || !golden || report.Of("tap-layer").outcome != Outcome::kPass ||
      report.Of("tap-order").outcome != Outcome::kPass) {
    return absl::OkStatus();
  }
  if (!report.Judge("fusion", *golden, subject.gates.golden, BundlePrompts(sequences),
                    "c of the last 16 positions", "other weights of fc or hidden_norm than the bundle's")) {
    report.Of("fusion").blame = Blame::kUnsettled;
  }
  report.Of("fusion").held_against = Oracle::kBundle;
  return absl::OkStatus();
}

// --- injection and rope: the stored keys and values against those of c, in every layer

struct InjectionErrors {
  std::string missing;  // rows that were not stored; empty: none
  StageError values;
  StageError norms;   // of the heads of keys, which no rotation changes
  StageError origin;  // keys of position 0, which no rotation changes either
  size_t bad_layer = 0;
  StageError rotated;                 // keys, rotated as wanted
  std::optional<RotationMatch> seen;  // none: no context
};

absl::Status MeasureInjection(const Subject& subject, const SequenceRecord& record, InjectionErrors* errors) {
  DraftReference& reference = *subject.reference;
  const DraftConfig& config = reference.config();
  if (record.context_end != record.length() || record.context.size() != config.layers.size()) {
    errors->missing = absl::StrCat("the context ends at ", record.context_end, " behind a prompt of ",
                                   record.length(), " tokens");
    return absl::OkStatus();
  }
  const std::vector<int64_t> positions = Sampled(record.length());
  const Rows c = Pick(record.features, positions);
  const Rotation wanted = WantedRotation(subject);
  for (size_t layer = 0; layer < config.layers.size(); ++layer) {
    const Rows stored_k = Pick(record.context[layer].k, positions);
    const Rows stored_v = Pick(record.context[layer].v, positions);
    const auto compare_keys = [&](const Rows& ours, const std::function<Rows(const Rows& keys)>& form) {
      return CompareStage(subject, ours, [&]() -> absl::StatusOr<Rows> {
        DFLASH_ASSIGN_OR_RETURN(const Rows keys, reference.Keys(layer, reference.Rounded(c)));
        return form(keys);
      });
    };
    DFLASH_ASSIGN_OR_RETURN(const StageError values, CompareStage(subject, stored_v, [&] {
                              return reference.Values(layer, reference.Rounded(c));
                            }));
    DFLASH_ASSIGN_OR_RETURN(const StageError norms,
                            compare_keys(HeadNorms(stored_k, config.head_dim),
                                         [&](const Rows& keys) { return HeadNorms(keys, config.head_dim); }));
    DFLASH_ASSIGN_OR_RETURN(const StageError origin, compare_keys(stored_k.Slice(0, 1), [](const Rows& keys) {
                              return keys.Slice(0, 1);
                            }));
    DFLASH_ASSIGN_OR_RETURN(const StageError rotated, compare_keys(stored_k, [&](const Rows& keys) {
                              return reference.Rotate(keys, positions, wanted);
                            }));
    DFLASH_ASSIGN_OR_RETURN(const Rows k, reference.Keys(layer, c));
    if (values.fails() || norms.fails() || origin.fails()) errors->bad_layer = layer;
    errors->values.Keep(values);
    errors->norms.Keep(norms);
    errors->origin.Keep(origin);
    errors->rotated.Keep(rotated);
    Keep(ClosestRotation(subject, k, stored_k, positions, wanted, rotated.gate), wanted, &errors->seen);
  }
  return absl::OkStatus();
}

void CheckInjection(const Subject& subject, const InjectionErrors& errors) {
  if (!errors.missing.empty())
    return subject.report->Fail("injection", errors.missing, "rows are not ingested, or not all of them");
  StageError worst = errors.values;
  worst.Keep(errors.norms);
  worst.Keep(errors.origin);
  JudgeStage(
      subject, "injection", worst, "double precision, k_norm(k_proj c) and v_proj c",
      absl::StrFormat("%d layers: values %.2g, lengths of key heads %.2g, keys of position 0 %.2g",
                      subject.reference->config().layers.size(), errors.values.error, errors.norms.error,
                      errors.origin.error),
      absl::StrCat("layer ", errors.bad_layer,
                   " does not make its context from c alone (k_norm left out, input_layernorm applied, or "
                   "another layer's weights)"));
}

std::string Describe(const Rotation& rotation) {
  return absl::StrFormat("keys are rotated with theta %g over %.0f%% of a head%s%s", rotation.theta,
                         100 * rotation.fraction,
                         rotation.shift == 0 ? "" : absl::StrFormat(", positions off by %d", rotation.shift),
                         rotation.interleaved ? ", in neighbouring pairs" : "");
}

std::string CauseOfRotation(const Rotation& seen, const Rotation& wanted) {
  if (seen.fraction != wanted.fraction)
    return "the target's partial_rotary_factor leaked into the drafter, whose heads rotate as a whole";
  if (seen.theta != wanted.theta)
    return absl::StrFormat("theta is read from the wrong place: %g instead of %g", seen.theta, wanted.theta);
  if (seen.shift != 0) return "context rows carry shifted positions";
  if (seen.interleaved) return "interleaved pairs instead of halves";
  return "the rotation is none that the doctor knows";
}

void CheckRope(const Subject& subject, const InjectionErrors& errors) {
  const std::optional<RotationMatch>& seen = errors.seen;
  const std::string rotated = seen ? Describe(seen->rotation) : "no context";
  if (subject.bundle == nullptr)
    return subject.report->NotChecked("rope", absl::StrCat("needs a golden bundle; seen: ", rotated));
  JudgeStage(subject, "rope", errors.rotated, "the bundle's theta, in double precision", rotated,
             seen && seen->error <= errors.rotated.gate
                 ? CauseOfRotation(seen->rotation, WantedRotation(subject))
                 : "the rotation is none that the doctor knows");
}

}  // namespace

absl::Status CheckContext(const Subject& subject, const Sequences& sequences) {
  DFLASH_RETURN_IF_ERROR(CheckFusion(subject, sequences));
  InjectionErrors errors;
  subject.reference->ForgetLargest();
  for (const SequenceRecord& record : sequences.records)
    DFLASH_RETURN_IF_ERROR(MeasureInjection(subject, record, &errors));
  CheckInjection(subject, errors);
  CheckRope(subject, errors);
  return absl::OkStatus();
}

}  // namespace dflash::doctor
