#include "daemon/log/line_budget.h"

#include <utility>

namespace dflash {

std::optional<int64_t> LineBudget::Take(absl::Time now) {
  absl::MutexLock lock(&mutex_);
  if (now - second_ >= absl::Seconds(1)) {
    second_ = now;
    written_ = 0;
  }
  if (written_ >= per_second_) {
    ++left_out_;
    return std::nullopt;
  }
  ++written_;
  return std::exchange(left_out_, 0);
}

}  // namespace dflash
