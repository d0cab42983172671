// When a worker group that has ended is started again.
#pragma once

#include <optional>

#include "absl/time/time.h"

namespace dflash {

struct RestartPolicy {
  absl::Duration first_delay = absl::Milliseconds(100);
  absl::Duration max_delay = absl::Seconds(60);
  absl::Duration healthy_after = absl::Seconds(30);  // a group that served so long starts afresh
  int max_failed_starts = 5;                         // in a row, of a group that has never served
};

// Counts the lives of one group. No clock, no threads.
class RestartDecider {
 public:
  explicit RestartDecider(const RestartPolicy& policy) : policy_(policy) {}

  // The group has ended after it served for `served` (nullopt: it never got that far in this life).
  // `permanent`: the reason is one that another start meets again (bad flags, a bad model). Returns how long
  // to wait before the next start; nullopt: do not start it again. A group that has served once is always
  // started again.
  std::optional<absl::Duration> OnEnd(std::optional<absl::Duration> served, bool permanent);

 private:
  const RestartPolicy policy_;
  bool has_served_ = false;
  int losses_ = 0;  // in a row, without a healthy life in between
};

}  // namespace dflash
