#include "tools/doctor/revisions.h"

#include <algorithm>

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
  return compared > 0 && uncompared == 0 ? Weights::kRecorded : Weights::kUnknown;
}

WeightsComparison CompareWeights(const std::map<std::string, std::string>& own,
                                 const std::map<std::string, std::string>& recorded) {
  WeightsComparison comparison;
  for (const auto& [name, fingerprint] : own) {
    const auto found = recorded.find(name);
    if (found == recorded.end()) {
      ++comparison.uncompared;
      continue;
    }
    ++comparison.compared;
    if (found->second != fingerprint) comparison.different.push_back(name);
  }
  for (const auto& [name, fingerprint] : recorded) comparison.uncompared += !own.contains(name);
  return comparison;
}

void JudgeRevisions(const WeightsComparison& target, const WeightsComparison& drafter, Report* report) {
  report->target_weights = target.outcome();
  report->drafter_weights = drafter.outcome();
  const bool other_target = report->target_weights == Weights::kOther;
  const bool other_drafter = report->drafter_weights == Weights::kOther;
  const std::string compared =
      absl::StrCat("fingerprints of ", target.compared + drafter.compared, " tensors in the bundle");
  if (!other_target && !other_drafter) {
    if (report->target_weights == Weights::kRecorded && report->drafter_weights == Weights::kRecorded) {
      report->Pass("revisions", 0, 0, compared, "the weights are the recorded ones");
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
