#include "base/host_limits.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <thread>

namespace dflash {
namespace {

// The number in `file`; `none` when there is no such file, or no number in it ("max").
int64_t ReadBytes(const std::filesystem::path& file, int64_t none) {
  std::ifstream in(file);
  int64_t bytes = 0;
  return in >> bytes ? bytes : none;
}

// Bytes of a group's file pages on the lists that the kernel reclaims from.
int64_t CachedFileBytes(const std::filesystem::path& group) {
  std::ifstream in(group / "memory.stat");
  std::string name;
  int64_t sum = 0;
  for (int64_t bytes = 0; in >> name >> bytes;) {
    if (name == "inactive_file" || name == "active_file") sum += bytes;
  }
  return sum;
}

int CoresOfAffinity() {
  const int configured = std::max<int>(1, static_cast<int>(std::thread::hardware_concurrency()));
  cpu_set_t set;
  // Fails on machines with more cores than a cpu_set_t has bits.
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? std::clamp(CPU_COUNT(&set), 1, configured)
                                                      : configured;
}

}  // namespace

std::vector<std::filesystem::path> ControlGroups(const std::filesystem::path& mount,
                                                 const std::filesystem::path& membership) {
  std::ifstream in(membership);
  std::filesystem::path own = "/";
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("0::/"))
      own = line.substr(3);  // 0, and no controllers' names: the groups of version 2
  }
  if (!std::filesystem::exists(mount / own.relative_path() / "cgroup.controllers")) own = "/";
  std::vector<std::filesystem::path> groups = {mount / own.relative_path()};
  for (; own.has_relative_path(); groups.push_back(mount / own.relative_path())) own = own.parent_path();
  return groups;
}

std::vector<std::filesystem::path> OwnControlGroups() {
  return ControlGroups("/sys/fs/cgroup", "/proc/self/cgroup");
}

MemoryBound BoundByGroups(MemoryBound bound, const std::vector<std::filesystem::path>& groups) {
  for (const std::filesystem::path& group : groups) {
    const int64_t most = ReadBytes(group / "memory.max", -1);
    if (most < 0) continue;
    const int64_t used =
        std::max<int64_t>(ReadBytes(group / "memory.current", 0) - CachedFileBytes(group), 0);
    bound.total = std::min(bound.total, most);
    bound.free = std::clamp<int64_t>(most - used, 0, bound.free);
  }
  return bound;
}

int CoresOfGroups(int cores, const std::vector<std::filesystem::path>& groups) {
  for (const std::filesystem::path& group : groups) {
    std::ifstream in(group / "cpu.max");
    double quota = 0, period = 0;  // microseconds; "max" is no number
    if (in >> quota >> period && period > 0)
      cores = std::min(cores, std::max(1, static_cast<int>(quota / period)));
  }
  return cores;
}

int AvailableCores() { return CoresOfGroups(CoresOfAffinity(), OwnControlGroups()); }

}  // namespace dflash
