#include "worker/fault_observer.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class StepCount final : public StepObserver {
 public:
  void OnStep(const StepReport&, const EngineGauges&) override { ++steps; }
  int steps = 0;
};

TEST(FaultObserverTest, OneLineAMinuteSaysHowManyThereWere) {
  StepCount next;
  absl::Time now = absl::UnixEpoch();
  std::vector<std::string> lines;
  FaultObserver observer(
      &next, [&] { return now; }, [&](const std::string& line) { lines.push_back(line); });
  const auto step = [&](int64_t faults) {
    StepReport report;
    report.numeric_faults = faults;
    observer.OnStep(report, {});
  };
  step(0);
  EXPECT_THAT(lines, IsEmpty());
  step(1);
  EXPECT_THAT(lines, ElementsAre(HasSubstr(": 1 requests")));
  step(2);
  now += FaultObserver::kInterval - absl::Seconds(1);
  step(3);
  EXPECT_EQ(lines.size(), 1u);
  now += absl::Seconds(1);
  step(0);  // what has not been said is said without another one
  EXPECT_THAT(lines, ElementsAre(HasSubstr(": 1 requests"), HasSubstr(": 5 requests")));
  now += absl::Hours(1);
  step(0);
  EXPECT_EQ(lines.size(), 2u);
  EXPECT_EQ(next.steps, 6);
}

}  // namespace
}  // namespace dflash
