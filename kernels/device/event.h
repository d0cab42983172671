// Points in the work of a stream.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/stream.h"

namespace dflash {

// Owns one such point. Movable; a moved-from object is empty. On the CPU every recorded point has been
// reached.
class Event {
 public:
  enum class Timing { kOff, kOn };  // an event without timing is cheaper to wait for

  static absl::StatusOr<Event> Create(Timing timing, const Stream& stream);
  Event(Event&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }
  ~Event();

  // The event is the end of all work that `stream` has been given so far.
  absl::Status Record(const Stream& stream) const;
  // Whether the recorded point has been reached; an event that was never recorded has.
  absl::StatusOr<bool> IsReached() const;
  // Blocks the calling thread until then.
  absl::Status Synchronize() const;
  // Work given to `stream` from now on begins after the recorded point; does not block the caller.
  absl::Status Precede(const Stream& stream) const;
  // Both events with timing on, both reached.
  static absl::StatusOr<float> MillisecondsBetween(const Event& start, const Event& end);

 private:
  explicit Event(void* raw) : raw_(raw) {}
  void* raw_ = nullptr;  // belongs to the backend
};

}  // namespace dflash
