#include "tools/doctor/revisions.h"

#include <algorithm>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace dflash::doctor {
namespace {

constexpr size_t kNames = 4;

// "drafter layers.3.mlp.up_proj.weight and 12 more of 47 tensors"
std::string Different(const char* whose, const WeightsComparison& weights) {
  const size_t shown = std::min(weights.different.size(), kNames);
  const auto end = weights.different.begin() + static_cast<std::ptrdiff_t>(shown);
  std::string text = absl::StrCat(whose, " ", absl::StrJoin(weights.different.begin(), end, ", "));
  if (weights.different.size() > shown)
    absl::StrAppend(&text, " and ", weights.different.size() - shown, " more");
  return absl::StrCat(text, " (", weights.different.size(), " of ", weights.compared, " tensors)");
}

}  // namespace

Weights WeightsComparison::outcome() const {
  if (!different.empty()) return Weights::kOther;
  if (compared == 0 || uncompared > 0) return Weights::kUnknown;
  return whole == compared ? Weights::kRecorded : Weights::kSampled;
}

WeightsComparison CompareWeights(const TensorDigests& own, const TensorDigests& recorded) {
  std::set<std::string> names;
  for (const TensorDigests* side : {&own, &recorded}) {
    for (const auto* map : {&side->samples, &side->whole}) {
      for (const auto& [name, digest] : *map) names.insert(name);
    }
  }
  WeightsComparison comparison;
  for (const std::string& name : names) {
    const auto compare = [&](const std::map<std::string, std::string>& a,
                             const std::map<std::string, std::string>& b) -> std::optional<bool> {
      const auto in_a = a.find(name), in_b = b.find(name);
      if (in_a == a.end() || in_b == b.end()) return std::nullopt;
      return in_a->second == in_b->second;
    };
    const std::optional<bool> samples = compare(own.samples, recorded.samples);
    const std::optional<bool> whole = compare(own.whole, recorded.whole);
    comparison.compared += samples || whole;
    comparison.whole += whole.has_value();
    comparison.uncompared += !samples && !whole;
    if (!samples.value_or(true) || !whole.value_or(true)) comparison.different.push_back(name);
  }
  return comparison;
}

void JudgeRevisions(const WeightsComparison& target, const WeightsComparison& drafter, Report* report) {
  report->target_weights = target.outcome();
  report->drafter_weights = drafter.outcome();
  const bool other_target = report->target_weights == Weights::kOther;
  const bool other_drafter = report->drafter_weights == Weights::kOther;
  const std::string compared =
      absl::StrCat("fingerprints of ", target.compared + drafter.compared,
                   " tensors in the bundle, digests of ", target.whole + drafter.whole);
  if (!other_target && !other_drafter) {
    if (report->target_weights != Weights::kUnknown && report->drafter_weights != Weights::kUnknown) {
      const auto how_far = [](Weights weights) {
        return weights == Weights::kRecorded ? "every byte" : "what fingerprints sample of every tensor";
      };
      report->Pass(
          "revisions", 0, 0, compared,
          absl::StrCat("the weights are the recorded ones: of the target ", how_far(report->target_weights),
                       ", of the drafter ", how_far(report->drafter_weights)));
    } else {
      report->NotChecked(
          "revisions",
          absl::StrCat("the bundle has fingerprints of ", target.compared + drafter.compared, " of ",
                       target.compared + target.uncompared + drafter.compared + drafter.uncompared,
                       " tensors (those of its format's first version do not count): record it anew"));
    }
    return;
  }
  std::vector<std::string> differences;
  if (other_target) differences.push_back(Different("target", target));
  if (other_drafter) differences.push_back(Different("drafter", drafter));
  report->Fail("revisions", "other weights than recorded: " + absl::StrJoin(differences, "; "),
               absl::StrCat(!other_drafter  ? "the target's weights are"
                            : !other_target ? "the drafter's weights are"
                                            : "both models' weights are",
                            " not those that the bundle was recorded with"),
               Blame::kModel);
  Finding& finding = report->Of("revisions");
  finding.measured = static_cast<double>(target.different.size() + drafter.different.size());
  finding.limit = 0;
  finding.compared = compared;
}

}  // namespace dflash::doctor
