// What the GPU's own counters say of work that is repeated for a while.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/stream.h"

namespace dflash::bench {

struct Energy {
  double milliseconds = 0, joules = 0;  // of one replay
  double megahertz = 0;                 // of the multiprocessors, on average over the last replays

  double watts() const { return 1e3 * joules / milliseconds; }
};

// Reads the driver's management library, which counts millijoules since it was loaded.
class EnergyMeter {
 public:
  // Of the first device. Errors: Unavailable without the library, or where the device does not count.
  static absl::StatusOr<EnergyMeter> Open();

  // Captures `body` once and replays it for a second and a half, of which the last one counts: clocks and
  // temperature settle in the first half second.
  Energy Measure(const Stream& stream, const std::function<absl::Status()>& body) const;

 private:
  using Counter = int (*)(void* device, unsigned long long* millijoules);
  using Clock = int (*)(void* device, int domain, unsigned* megahertz);

  double Joules() const;

  void* device_ = nullptr;
  Counter counter_ = nullptr;
  Clock clock_ = nullptr;
};

}  // namespace dflash::bench
