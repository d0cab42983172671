// What happens to a server in a chaos test, and when: a function of a seed, so that a run can be repeated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace dflash::integration {

enum class Fault : uint8_t {
  kKillRank,        // SIGKILL
  kPauseRank,       // SIGSTOP, and SIGCONT before anybody takes it for dead
  kStopRank,        // SIGSTOP, for good
  kDropLeader,      // the coordinator's connection to a group breaks
  kDropRanks,       // a connection between two ranks breaks
  kDropClients,     // connections of clients break
  kDeadlineStorm,   // a hundred calls with deadlines of milliseconds
  kCancelStorm,     // a hundred calls that are cancelled
  kDrainAndResume,  // Drain, with time for what runs
  kDrainAndCut,     // Drain, without
};
std::vector<Fault> AllFaults(int ranks);
const char* NameOf(Fault fault);

struct Strike {
  absl::Duration after;  // the one before
  Fault fault;
  uint32_t pick = 0;       // whom it strikes, of those who are there
  absl::Duration lasting;  // of a pause, a drain
};

// One life of the coordinator. Behind each part of its strikes everybody pauses, and the books are compared.
struct CoordinatorLife {
  int groups = 1;
  int queue = 16;              // requests that may wait
  bool log_disk_full = false;  // every write to the log fails
  std::vector<Strike> parts[2];
  // Under load, after `end_after`; but the last life ends when its clients have left.
  absl::Duration end_after;
  bool killed = false;  // else SIGTERM, with `drain` for what runs
  absl::Duration drain;
};

// About so long, and every fault once at least. Groups of `ranks` ranks.
std::vector<CoordinatorLife> PlanChaos(uint64_t seed, int ranks, absl::Duration duration);
std::string ToString(const std::vector<CoordinatorLife>& plan);

}  // namespace dflash::integration
