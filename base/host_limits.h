// What of this machine a process may use: its control groups (version 2) and its affinity bound it, in
// containers far below what the machine has.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace dflash {

// The folders of the groups that a process is in, from its own up to `mount` (/sys/fs/cgroup). `membership`
// is /proc/self/cgroup. In a container whose membership is a path of the host, only the group at `mount`.
std::vector<std::filesystem::path> ControlGroups(const std::filesystem::path& mount,
                                                 const std::filesystem::path& membership);
std::vector<std::filesystem::path> OwnControlGroups();

struct MemoryBound {
  int64_t total = 0;  // bytes that the tightest group may use
  int64_t free = 0;   // bytes that the fullest group has left
};

// Narrows `bound` to what every one of `groups` leaves. Pages of files that are only cached count as free:
// the kernel gives them up before it kills anybody, and a checkpoint that was just read fills a group with
// them.
MemoryBound BoundByGroups(MemoryBound bound, const std::vector<std::filesystem::path>& groups);

// Whole cores that `groups` leave of `cores`, at least one: a thread more than the quota pays for stops all
// of them for the rest of a period.
int CoresOfGroups(int cores, const std::vector<std::filesystem::path>& groups);

// Cores that this process may run on and has the quota for, at least one: how many threads it should compute
// on.
int AvailableCores();

}  // namespace dflash
