#include <algorithm>
#include <fstream>
#include <string>

#include "kernels/device/memory.h"

namespace dflash {
namespace {

// The number in a file of a control group; `none` when there is no such file or no bound ("max").
int64_t ReadBytes(const char* path, int64_t none) {
  std::ifstream file(path);
  int64_t bytes = 0;
  return file >> bytes ? bytes : none;
}

}  // namespace

absl::StatusOr<DeviceMemory> GetDeviceMemory(const Stream&) {
  DeviceMemory memory = {.shared_by_ranks = true};
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  for (int64_t kib = 0; file >> name >> kib; std::getline(file, unit)) {
    if (name == "MemTotal:") memory.total = kib * 1024;
    if (name == "MemAvailable:") memory.free = kib * 1024;
  }
  if (memory.total == 0) return absl::UnavailableError("/proc/meminfo does not say how much memory there is");
  const int64_t bound = ReadBytes("/sys/fs/cgroup/memory.max", memory.total);
  const int64_t used = ReadBytes("/sys/fs/cgroup/memory.current", 0);
  memory.total = std::min(memory.total, bound);
  memory.free = std::clamp<int64_t>(bound - used, 0, memory.free);
  return memory;
}

}  // namespace dflash
