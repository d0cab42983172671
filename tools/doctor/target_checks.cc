// target, tap-point, tap-alignment, next-token, tap-layer, tap-order
#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/comparisons.h"

namespace dflash::doctor {
namespace {

std::string StateName(int64_t index, int64_t states) {
  if (index == 0) return "the embedding";
  if (index + 1 == states) return "the final norm";
  return absl::StrCat("the output of layer ", index - 1);
}

int64_t RowsThatDiffer(const Rows& a, const Rows& b, int64_t count) {
  int64_t different = 0;
  for (int64_t i = 0; i < count; ++i) different += !std::equal(a.row(i), a.row(i) + a.cols, b.row(i));
  return different;
}

// --- target

// The target's own numbers against the bundle's, over the prompts so far.
struct TargetDistance {
  bool any = false;
  double worst = 0;
  std::string where;  // of the first that is past the gate; empty: none is
};

// What is off in a state is off in all that follow it, so the first one past the gate is named and the rest
// of the prompt's is not looked at.
absl::Status CompareHiddenStates(const Subject& subject, const SequenceRecord& record, size_t prompt,
                                 TargetDistance* distance) {
  if (!subject.bundle->HasTensor(prompt, "hidden_states")) return absl::OkStatus();
  DFLASH_ASSIGN_OR_RETURN(const Rows golden, subject.bundle->Tensor(prompt, "hidden_states"));
  const auto states = static_cast<int64_t>(record.hidden_states.size());
  if (golden.rows % std::max<int64_t>(states, 1) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("hidden_states of prompt ", prompt, ": not ", states,
                                                   " states, the embedding and one per layer"));
  }
  const int64_t rows = golden.rows / states;
  for (int64_t state = 0; state < states; ++state) {
    const Rows& ours = record.hidden_states[static_cast<size_t>(state)];
    const double error =
        RelativeError(ours.Slice(0, std::min(rows, ours.rows)), golden.Slice(state * rows, rows));
    distance->any = true;
    if (!(error > distance->worst)) continue;
    distance->worst = error;
    if (error <= subject.gates.golden) continue;
    distance->where =
        absl::StrCat("prompt ", prompt, ": ", StateName(state, states), " is off first by that much");
    break;
  }
  return absl::OkStatus();
}

absl::Status CompareLastLogits(const Subject& subject, const SequenceRecord& record, size_t prompt,
                               TargetDistance* distance) {
  if (!subject.bundle->HasTensor(prompt, "last_logits")) return absl::OkStatus();
  DFLASH_ASSIGN_OR_RETURN(const Rows golden, subject.bundle->Tensor(prompt, "last_logits"));
  const double error = ErrorOfSharedColumns(record.last_logits, golden);
  distance->any = true;
  if (error > subject.gates.golden && distance->where.empty()) {
    distance->where = absl::StrCat("prompt ", prompt,
                                   ": every hidden state agrees, the logits of the last position do not");
  }
  distance->worst = std::max(distance->worst, error);
  return absl::OkStatus();
}

// --- taps against what the target itself computes

// Every tap is one of our own finished residuals, bit for bit.
void CheckTapPoint(const Subject& subject, const SequenceRecord& record) {
  const int64_t width = subject.target_config->hidden_size;
  double worst = 0;
  for (int64_t tap = 0; tap < record.taps.cols / width; ++tap) {
    double least = kNoMatch;
    for (const Rows& state : record.hidden_states)
      least = std::min(least, RelativeError(record.taps.Block(0, state.rows, tap * width, width), state));
    worst = std::max(worst, least);
  }
  subject.report->Judge(
      "tap-point", worst, 0, "finished residuals of the target's own layers",
      "distance of a tap to the nearest residual",
      "a tap is taken before the residual is complete (sum over ranks, residual add) or behind a norm");
}

std::string WithAnotherToken(const Sequences& sequences) {
  return absl::StrCat("the same prompt with another token at position ", sequences.perturbed_at);
}

constexpr char kOneEmbedding[] = "tokens that were tried have the same embedding: none changes anything";

// What follows a token cannot change what was before it, and a token changes its own taps.
void CheckTapAlignment(const Subject& subject, const Sequences& sequences) {
  if (!sequences.perturbed) return subject.report->NotChecked("tap-alignment", kOneEmbedding);
  const Rows &taps = sequences.records[0].taps, &changed = sequences.perturbed->taps;
  const int64_t at = sequences.perturbed_at;
  const int64_t before = RowsThatDiffer(taps, changed, at);
  const bool own = RowsThatDiffer(taps.Slice(at, 1), changed.Slice(at, 1), 1) == 1;
  subject.report->Judge(
      "tap-alignment", static_cast<double>(before) + (own ? 0 : 1), 0, WithAnotherToken(sequences),
      own ? absl::StrCat(before, " of ", at, " rows before the changed token changed")
          : std::string("the changed token's own taps did not change"),
      before > 0 ? "a row carries the taps of a later token" : "a row carries the taps of an earlier token");
}

// The same of the drafter's context features, which are made of taps.
void CheckNextToken(const Subject& subject, const Sequences& sequences) {
  if (!sequences.perturbed) return subject.report->NotChecked("next-token", kOneEmbedding);
  const int64_t at = sequences.perturbed_at;
  const int64_t changed = RowsThatDiffer(sequences.records[0].features, sequences.perturbed->features, at);
  subject.report->Judge(
      "next-token", static_cast<double>(changed), 0, WithAnotherToken(sequences),
      absl::StrCat(changed, " of ", at, " context features before the changed token changed"),
      "the drafter's context reads the token after its own");
}

// --- which layers the taps are, by the bundle

using States = std::vector<int64_t>;  // hidden-state indices, one per tap

struct TapDistances {
  std::vector<std::vector<double>> errors;  // [tap][hidden state], the worst prompt's; empty: none recorded
  std::optional<double> last_rows;          // of all taps of the last 16 positions; none recorded

  // The hidden state that each tap is nearest to.
  States Found() const {
    States found;
    for (const std::vector<double>& of_tap : errors)
      found.push_back(std::min_element(of_tap.begin(), of_tap.end()) - of_tap.begin());
    return found;
  }
};

// What the drafter was trained on.
States WantedStates(const Subject& subject) {
  States wanted;
  for (const int32_t tap : subject.contract().taps) wanted.push_back(Number(OutputOf(LayerIndex{tap})));
  return wanted;
}

absl::StatusOr<TapDistances> MeasureTaps(const Subject& subject, const Sequences& sequences) {
  TapDistances distances;
  const int64_t width = subject.target_config->hidden_size;
  const auto taps = static_cast<size_t>(sequences.records[0].taps.cols / width);
  for (size_t i = 0; i < sequences.records.size(); ++i) {
    const SequenceRecord& record = sequences.records[i];
    if (!sequences.golden[i] || !subject.bundle->HasTensor(*sequences.golden[i], "hidden_states")) continue;
    DFLASH_ASSIGN_OR_RETURN(const Rows golden, subject.bundle->Tensor(*sequences.golden[i], "hidden_states"));
    const size_t states = record.hidden_states.size();
    const int64_t rows = golden.rows / static_cast<int64_t>(states);
    distances.errors.resize(taps, std::vector<double>(states));
    for (size_t tap = 0; tap < taps; ++tap) {
      const Rows ours = record.taps.Block(0, rows, static_cast<int64_t>(tap) * width, width);
      for (size_t state = 0; state < states; ++state) {
        double& error = distances.errors[tap][state];
        error = std::max(error, RelativeError(ours, golden.Slice(static_cast<int64_t>(state) * rows, rows)));
      }
    }
  }
  DFLASH_ASSIGN_OR_RETURN(
      distances.last_rows,
      WorstAgainstBundle(
          subject, sequences, "taps_last16", [](const SequenceRecord& record, const Rows& golden) {
            return RelativeError(record.taps.Slice(record.length() - golden.rows, golden.rows), golden);
          }));
  return distances;
}

// The states that the taps are, by the target's own numbers: taps are copies. None: they are not all copies.
// Where a state is the wanted one as well as another, it counts as the wanted one.
std::optional<States> OwnStates(const Subject& subject, const SequenceRecord& record) {
  const int64_t width = subject.target_config->hidden_size;
  const States wanted = WantedStates(subject);
  States own;
  for (int64_t tap = 0; tap < record.taps.cols / width; ++tap) {
    std::optional<int64_t> found;
    for (size_t i = 0; i < record.hidden_states.size(); ++i) {
      const Rows& state = record.hidden_states[i];
      const auto index = static_cast<int64_t>(i);
      const bool is_wanted =
          static_cast<size_t>(tap) < wanted.size() && wanted[static_cast<size_t>(tap)] == index;
      if ((!found || is_wanted) && record.taps.Block(0, state.rows, tap * width, width) == state)
        found = index;
    }
    if (!found) return std::nullopt;
    own.push_back(*found);
  }
  return own;
}

// Of taps that are copies of these states: 0 from those, and far from any other.
TapDistances DistancesOf(const States& own, size_t states) {
  TapDistances distances;
  for (const int64_t state : own) {
    distances.errors.emplace_back(states, kNoMatch);
    distances.errors.back()[static_cast<size_t>(state)] = 0;
  }
  return distances;
}

// "1, 3, 5"
std::string Layers(const States& states) {
  return absl::StrJoin(states, ", ",
                       [](std::string* out, int64_t state) { absl::StrAppend(out, state - 1); });
}

// Every tap is the layer `offset` away from the wanted one.
bool AllOffBy(int64_t offset, const States& found, const States& wanted) {
  return std::equal(found.begin(), found.end(), wanted.begin(), wanted.end(),
                    [offset](int64_t ours, int64_t theirs) { return ours == theirs + offset; });
}

void CheckTapLayer(const Subject& subject, const Sequences& sequences, const TapDistances& distances) {
  const States found = distances.Found(), wanted = WantedStates(subject);
  // How far the wanted layer that is worst off is from the nearest tap, whatever the order.
  double worst = found.size() == wanted.size() ? 0 : kNoMatch;
  for (const int64_t state : wanted) {
    double least = kNoMatch;
    for (const std::vector<double>& of_tap : distances.errors) {
      if (state >= 0 && state < static_cast<int64_t>(of_tap.size()))
        least = std::min(least, of_tap[static_cast<size_t>(state)]);
    }
    worst = std::max(worst, least);
  }
  std::string cause = "target_layer_ids of another drafter";
  if (AllOffBy(-1, found, wanted)) {
    cause =
        "layer ids are read one too low: id k was taken for hidden state k, which is the output of "
        "layer k - 1 (hidden state 0 is the embedding)";
  } else if (AllOffBy(1, found, wanted)) {
    cause = "layer ids are read one too high: the offset of hidden states was added twice";
  }
  subject.report->Judge("tap-layer", worst, subject.gates.golden, BundlePrompts(sequences),
                        absl::StrCat("the taps are the outputs of layers ", Layers(found),
                                     "; the drafter was trained on ", Layers(wanted)),
                        cause);
}

States Ascending(States states) {
  std::sort(states.begin(), states.end());
  return states;
}

// Of each state, its place among all of them in ascending order.
States Places(const States& states) {
  const States sorted = Ascending(states);
  States places;
  for (const int64_t state : states)
    places.push_back(std::lower_bound(sorted.begin(), sorted.end(), state) - sorted.begin());
  return places;
}

// Only the order: layers that are wrong, but in the right order, are the business of tap-layer.
void CheckTapOrder(const Subject& subject, const Sequences& sequences, const TapDistances& distances) {
  Report& report = *subject.report;
  const States found = distances.Found(), wanted = WantedStates(subject);
  if (Places(found) != Places(wanted)) {
    report.Judge(
        "tap-order", distances.last_rows.value_or(kNoMatch), subject.gates.golden, BundlePrompts(sequences),
        absl::StrCat("order of the taps: outputs of layers ", Layers(found), "; wanted ", Layers(wanted)),
        "the taps are concatenated in another order than target_layer_ids, or gathered rank by rank");
  } else if (Ascending(found) != Ascending(wanted)) {
    report.Skip("tap-order", "the layers are wrong already");
  } else {
    report.Judge("tap-order", distances.last_rows.value_or(0), subject.gates.golden, BundlePrompts(sequences),
                 "taps of the last 16 positions", "taps of later positions belong to other tokens");
  }
}

}  // namespace

absl::Status CheckTarget(const Subject& subject, const Sequences& sequences) {
  Report& report = *subject.report;
  if (subject.bundle == nullptr) {
    report.NotChecked("target", "needs a golden bundle");
    return absl::OkStatus();
  }
  if (!subject.target_recorded) {
    report.Skip("target", "the bundle was recorded with other weights of the target");
    return absl::OkStatus();
  }
  TargetDistance distance;
  for (size_t i = 0; i < sequences.records.size(); ++i) {
    const std::optional<size_t> prompt = sequences.golden[i];
    if (!prompt) continue;
    DFLASH_RETURN_IF_ERROR(CompareHiddenStates(subject, sequences.records[i], *prompt, &distance));
    DFLASH_RETURN_IF_ERROR(CompareLastLogits(subject, sequences.records[i], *prompt, &distance));
  }
  if (!distance.any) {
    report.NotChecked("target", "the bundle holds no hidden states");
    return absl::OkStatus();
  }
  if (!report.Judge(
          "target", distance.worst, subject.gates.golden, BundlePrompts(sequences),
          distance.where.empty() ? "every hidden state and the logits of the last position agree"
                                 : distance.where,
          absl::StrCat("config.json of the target (rope_theta, rms_norm_eps, ...), its layers' arithmetic or "
                       "precision",
                       report.target_weights == Weights::kRecorded ? ""
                       : report.target_weights == Weights::kSampled
                           ? ", or weights that were changed where no fingerprint samples them"
                           : ", or other weights"))) {
    report.Of("target").blame = Blame::kUnsettled;
  }
  return absl::OkStatus();
}

absl::Status CheckTaps(const Subject& subject, const Sequences& sequences) {
  CheckTapPoint(subject, sequences.records[0]);
  CheckTapAlignment(subject, sequences);
  CheckNextToken(subject, sequences);
  Report& report = *subject.report;
  const auto both = [&report](void (Report::*say)(std::string_view, std::string), const std::string& why) {
    for (const char* id : {"tap-layer", "tap-order"}) (report.*say)(id, why);
    return absl::OkStatus();
  };
  if (subject.bundle == nullptr) {
    return both(&Report::NotChecked,
                "needs a golden bundle: our own path reads the same ids with the same code");
  }
  TapDistances distances;
  if (subject.target_recorded && report.Of("target").outcome != Outcome::kFail) {
    DFLASH_ASSIGN_OR_RETURN(distances, MeasureTaps(subject, sequences));
    if (distances.errors.empty()) return both(&Report::NotChecked, "the bundle holds no hidden states");
  } else {
    // Of a target that computes something else recorded numbers tell no layer. Its own do.
    const std::optional<States> own = OwnStates(subject, sequences.records[0]);
    const States wanted = WantedStates(subject);
    if (!own) return both(&Report::Skip, "the target computes other numbers, and its taps are none of them");
    if (own == wanted) {
      return both(&Report::Skip,
                  absl::StrCat("the taps are the target's own layers ", Layers(wanted),
                               ", as wanted; the recorded numbers are those of another target"));
    }
    distances = DistancesOf(*own, sequences.records[0].hidden_states.size());
  }
  CheckTapLayer(subject, sequences, distances);
  CheckTapOrder(subject, sequences, distances);
  return absl::OkStatus();
}

}  // namespace dflash::doctor
