#include "tests/integration/chaos_plan.h"

#include <algorithm>
#include <iterator>
#include <random>

#include "absl/strings/str_cat.h"

namespace dflash::integration {
namespace {

constexpr absl::Duration kLongLife = absl::Seconds(150);
constexpr int64_t kFewestLives = 3;
// Start of a coordinator, and two pauses until everything has ended.
constexpr absl::Duration kOverhead = absl::Seconds(6);

class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed) {}
  uint32_t Below(uint32_t count) { return static_cast<uint32_t>(random_() % count); }
  absl::Duration Between(absl::Duration low, absl::Duration high) {
    return low + (high - low) * Below(1000) / 1000;
  }

 private:
  std::mt19937_64 random_;  // the standard says which numbers it gives
};

// How long what a fault does keeps the plan's executor, or the server, from going on.
absl::Duration CostOf(Fault fault, absl::Duration lasting) {
  switch (fault) {
    case Fault::kStopRank:
      return absl::Seconds(4);
    case Fault::kKillRank:
    case Fault::kDropLeader:
    case Fault::kDropRanks:
      return absl::Milliseconds(500);
    case Fault::kDropClients:
      return absl::ZeroDuration();
    default:
      return lasting;
  }
}

}  // namespace

std::vector<Fault> AllFaults(int ranks) {
  std::vector<Fault> faults = {Fault::kKillRank,    Fault::kPauseRank,      Fault::kStopRank,
                               Fault::kDropLeader,  Fault::kDropClients,    Fault::kDeadlineStorm,
                               Fault::kCancelStorm, Fault::kDrainAndResume, Fault::kDrainAndCut};
  if (ranks > 1) faults.push_back(Fault::kDropRanks);
  return faults;
}

const char* NameOf(Fault fault) {
  constexpr const char* kNames[] = {"kill_rank",    "pause_rank",   "stop_rank",      "drop_leader",
                                    "drop_ranks",   "drop_clients", "deadline_storm", "cancel_storm",
                                    "drain_resume", "drain_cut"};
  return kNames[static_cast<size_t>(fault)];
}

std::vector<CoordinatorLife> PlanChaos(uint64_t seed, int ranks, absl::Duration duration) {
  Dice dice(seed);
  std::vector<Fault> deck;
  const auto draw = [&] {
    if (deck.empty()) {
      deck = AllFaults(ranks);
      for (size_t i = deck.size(); i > 1; --i)
        std::swap(deck[i - 1], deck[dice.Below(static_cast<uint32_t>(i))]);
    }
    const Fault fault = deck.back();
    deck.pop_back();
    return fault;
  };
  const int64_t count = std::max(kFewestLives, duration / kLongLife);
  // Where there is time, some of it is left to get on in.
  const absl::Duration longest_pause =
      duration / count < kLongLife ? absl::Milliseconds(1200) : absl::Seconds(5);
  const uint32_t full = dice.Below(static_cast<uint32_t>(count));
  std::vector<CoordinatorLife> plan(static_cast<size_t>(count));
  for (size_t i = 0; i < plan.size(); ++i) {
    CoordinatorLife& life = plan[i];
    // Groups of one rank have company now and then, which takes their requests over.
    life.groups = ranks == 1 && i % 3 == 1 ? 2 : 1;
    life.queue = dice.Below(2) == 0 ? 12 : 64;
    life.log_disk_full = i % kFewestLives == full % kFewestLives;
    life.killed = i % 2 == 0;
    life.drain = dice.Between(absl::Milliseconds(200), absl::Seconds(3));
    life.end_after = dice.Between(absl::Milliseconds(200), absl::Milliseconds(1200));
    for (std::vector<Strike>& part : life.parts) {
      absl::Duration left = (duration / count - kOverhead) / 2;
      while (left > absl::ZeroDuration()) {
        Strike strike = {.after = dice.Between(absl::Milliseconds(100), longest_pause),
                         .fault = draw(),
                         .pick = dice.Below(1 << 16),
                         .lasting = dice.Between(absl::Milliseconds(50), absl::Milliseconds(1500))};
        left -= strike.after + CostOf(strike.fault, strike.lasting);
        part.push_back(strike);
      }
    }
  }
  return plan;
}

std::string ToString(const std::vector<CoordinatorLife>& plan) {
  std::string text;
  for (const CoordinatorLife& life : plan) {
    absl::StrAppend(&text, "life: ", life.groups, " groups, queue ", life.queue,
                    life.log_disk_full ? ", no room for the log" : "", "\n");
    for (const std::vector<Strike>& part : life.parts) {
      for (const Strike& strike : part) {
        absl::StrAppend(&text, "  +", absl::FormatDuration(strike.after), " ", NameOf(strike.fault), " pick ",
                        strike.pick, " lasting ", absl::FormatDuration(strike.lasting), "\n");
      }
      absl::StrAppend(&text, "  pause\n");
    }
    absl::StrAppend(&text, "  +", absl::FormatDuration(life.end_after), life.killed ? " killed" : " ended",
                    ", drain ", absl::FormatDuration(life.drain), "\n");
  }
  return text;
}

}  // namespace dflash::integration
