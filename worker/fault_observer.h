// Says in the log that logits were no numbers: weights or a device that are broken fail every request, and
// nothing else of a group shows it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/time/time.h"
#include "worker/engine/engine.h"

namespace dflash {

class FaultObserver final : public StepObserver {
 public:
  // At most one line in so long a time, with how many requests failed since the last one.
  static constexpr absl::Duration kInterval = absl::Minutes(1);

  // Hands steps on to `next`, which is not owned. `warn` gets the lines.
  FaultObserver(StepObserver* next, std::function<absl::Time()> clock,
                std::function<void(const std::string&)> warn);
  void OnStep(const StepReport& report, const EngineGauges& gauges) override;

 private:
  StepObserver* const next_;
  const std::function<absl::Time()> clock_;
  const std::function<void(const std::string&)> warn_;
  int64_t unsaid_ = 0;  // faults that no line has told of
  absl::Time next_line_ = absl::InfinitePast();
};

}  // namespace dflash
