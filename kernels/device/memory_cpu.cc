#include <fstream>
#include <string>

#include "base/host_limits.h"
#include "kernels/device/memory.h"

namespace dflash {

absl::StatusOr<DeviceMemory> GetDeviceMemory(const Stream&) {
  MemoryBound machine;
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  for (int64_t kib = 0; file >> name >> kib; std::getline(file, unit)) {
    if (name == "MemTotal:") machine.total = kib * 1024;
    if (name == "MemAvailable:") machine.free = kib * 1024;
  }
  if (machine.total == 0)
    return absl::UnavailableError("/proc/meminfo does not say how much memory there is");
  const MemoryBound bound = BoundByGroups(machine, OwnControlGroups());
  return DeviceMemory{.total = bound.total, .free = bound.free, .shared_by_ranks = true};
}

}  // namespace dflash
