#include <chrono>

#include "kernels/device/event.h"

namespace dflash {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

absl::StatusOr<Event> Event::Create(Timing, const Stream&) { return Event(new Clock::time_point()); }

Event::~Event() { delete static_cast<Clock::time_point*>(raw_); }

absl::Status Event::Record(const Stream&) const {
  *static_cast<Clock::time_point*>(raw_) = Clock::now();
  return absl::OkStatus();
}

absl::StatusOr<bool> Event::IsReached() const { return true; }
absl::Status Event::Synchronize() const { return absl::OkStatus(); }
absl::Status Event::Precede(const Stream&) const { return absl::OkStatus(); }

absl::StatusOr<float> Event::MillisecondsBetween(const Event& start, const Event& end) {
  const std::chrono::duration<float, std::milli> between =
      *static_cast<Clock::time_point*>(end.raw_) - *static_cast<Clock::time_point*>(start.raw_);
  return between.count();
}

}  // namespace dflash
