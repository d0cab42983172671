#include "worker/verify/walk.h"

#include "base/check.h"

namespace dflash {

WalkResult Walk(const VerifyPlan& plan, const std::vector<int32_t>& target_tokens,
                const std::function<bool(int32_t token)>& is_stop, int64_t room) {
  DFLASH_CHECK(plan.rows() == static_cast<int64_t>(target_tokens.size()) && room >= 1);
  WalkResult result;
  int32_t row = 0;
  while (true) {
    result.path.push_back(row);
    const int32_t token = target_tokens[static_cast<size_t>(row)];
    result.emitted.push_back(token);
    const int32_t child = plan.Child(row, token);
    if (child >= 0) ++result.accepted;
    result.stopped = is_stop(token);
    if (result.stopped || child < 0 || static_cast<int64_t>(result.emitted.size()) == room) return result;
    row = child;
  }
}

}  // namespace dflash
