#include "worker/fault_observer.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace dflash {

FaultObserver::FaultObserver(StepObserver* next, std::function<absl::Time()> clock,
                             std::function<void(const std::string&)> warn)
    : next_(next), clock_(std::move(clock)), warn_(std::move(warn)) {}

void FaultObserver::OnStep(const StepReport& report, const EngineGauges& gauges) {
  unsaid_ += report.numeric_faults;
  if (unsaid_ > 0 && clock_() >= next_line_) {
    warn_(absl::StrCat("the target's logits were no numbers (NaN or infinite): ", std::exchange(unsaid_, 0),
                       " requests failed of it since this was last said; if it goes on, its weights or the "
                       "device are broken"));
    next_line_ = clock_() + kInterval;
  }
  next_->OnStep(report, gauges);
}

}  // namespace dflash
