#include "worker/verify/verify_plan.h"

#include "absl/strings/str_cat.h"

namespace dflash {

bool VerifyPlan::IsChain() const {
  for (size_t row = 0; row < parents.size(); ++row) {
    if (parents[row] != static_cast<int32_t>(row) - 1) return false;
  }
  return true;
}

int32_t VerifyPlan::Child(int32_t row, int32_t token) const {
  for (size_t child = static_cast<size_t>(row) + 1; child < parents.size(); ++child) {
    if (parents[child] == row && tokens[child] == token) return static_cast<int32_t>(child);
  }
  return -1;
}

VerifyPlan MakeChain(int32_t anchor, const std::vector<int32_t>& drafts) {
  VerifyPlan plan;
  plan.tokens.push_back(anchor);
  plan.tokens.insert(plan.tokens.end(), drafts.begin(), drafts.end());
  for (int32_t row = 0; row < static_cast<int32_t>(plan.tokens.size()); ++row) {
    plan.parents.push_back(row - 1);
    plan.depths.push_back(row);
  }
  return plan;
}

absl::Status CheckPlan(const VerifyPlan& plan) {
  if (plan.tokens.empty() || plan.parents.size() != plan.tokens.size() ||
      plan.depths.size() != plan.tokens.size()) {
    return absl::InvalidArgumentError("a verify plan has an anchor and one parent and depth per row");
  }
  if (plan.parents[0] != -1 || plan.depths[0] != 0)
    return absl::InvalidArgumentError("row 0 must be the anchor");
  for (size_t row = 1; row < plan.tokens.size(); ++row) {
    const int32_t parent = plan.parents[row];
    if (parent < 0 || parent >= static_cast<int32_t>(row) ||
        plan.depths[row] != plan.depths[static_cast<size_t>(parent)] + 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("row ", row, " has parent ", parent, " and depth ", plan.depths[row]));
    }
    if (plan.Child(parent, plan.tokens[row]) != static_cast<int32_t>(row)) {
      return absl::InvalidArgumentError(absl::StrCat("row ", row, " repeats a sibling's token"));
    }
  }
  return absl::OkStatus();
}

}  // namespace dflash
