// Groups of several ranks as real processes: they answer like one rank, and whatever happens to one of them
// in whatever phase, the group ends as a whole, clients hear it, it serves again without anybody's help, and
// nothing of the lost life is left behind.
#include <algorithm>
#include <csignal>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/golden_prompts.h"
#include "tests/integration/group_gates.h"
#include "tests/integration/group_processes.h"
#include "tests/integration/server.h"
#include "tools/dflashctl/commands.h"

namespace dflash::integration {
namespace {

using ::testing::ContainsRegex;

std::vector<std::string> GroupFlags(int ranks) {
  // Clients hear of every loss: what becomes of their requests otherwise is replay_test's.
  return {"--tp",
          absl::StrCat(ranks),
          "--max-restart-delay",
          "1",
          "--formation-timeout",
          "10",
          "--replay-seconds",
          "0"};
}

// What the group is doing when a fault strikes.
enum class Phase {
  kJoining,  // a rank has not started yet, the others wait for it
  kLoading,  // the struck rank opens its weights
  kIdle,
  kPrefill,     // of a prompt of thousands of tokens
  kDecode,      // with drafts
  kCollective,  // the struck rank waits for another one in a collective, in the middle of a step
  kEnding,      // another rank was killed a moment ago
};
constexpr Phase kPhases[] = {Phase::kJoining, Phase::kLoading,    Phase::kIdle,  Phase::kPrefill,
                             Phase::kDecode,  Phase::kCollective, Phase::kEnding};

enum class Fault {
  kKill,
  kStop,
  kDropRanks,   // a connection of the rank channel breaks
  kDropLeader,  // the coordinator's connection to rank 0 breaks
};

const char* NameOf(Phase phase) {
  constexpr const char* kNames[] = {"joining", "loading",    "idle",  "prefill",
                                    "decode",  "collective", "ending"};
  return kNames[static_cast<int>(phase)];
}
const char* NameOf(Fault fault) {
  constexpr const char* kNames[] = {"kill", "stop", "drop_ranks", "drop_leader"};
  return kNames[static_cast<int>(fault)];
}

struct Strike {
  Phase phase;
  Fault fault;
  int rank;
};

// Everything that can happen to a group of so many ranks.
std::vector<Strike> AllStrikes(int ranks) {
  std::vector<Strike> strikes;
  for (const Phase phase : kPhases) {
    for (int rank = 0; rank < ranks; ++rank) {
      strikes.push_back({phase, Fault::kKill, rank});
      strikes.push_back({phase, Fault::kStop, rank});
      // In a group of two that is not complete nobody is connected; a group that ends loses its connections
      // anyway.
      if (phase != Phase::kEnding && (phase != Phase::kJoining || ranks > 2))
        strikes.push_back({phase, Fault::kDropRanks, rank});
    }
    // The coordinator has a connection as soon as the leader serves.
    if (phase != Phase::kJoining && phase != Phase::kLoading && phase != Phase::kEnding)
      strikes.push_back({phase, Fault::kDropLeader, 0});
  }
  return strikes;
}

// Decodes for thousands of tokens, with drafts.
v1::GenerateRequest EndlessDrafts() {
  v1::GenerateRequest request = EndlessRequest();
  request.clear_speculation();
  return request;
}

// Its prompt takes dozens of steps.
v1::GenerateRequest LongPrompt() {
  std::vector<uint32_t> prompt(3900);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<uint32_t>(300 + i * 7 % 3000);
  return TokenRequest(prompt, 100);
}

// "2026-11-29T23:55:06.120Z ..." at the head of a line of our logs.
absl::Time TimeOf(const std::string& line) {
  absl::Time time = absl::InfinitePast();
  std::string error;
  EXPECT_TRUE(absl::ParseTime(absl::RFC3339_full, line.substr(0, line.find(' ')), &time, &error)) << line;
  return time;
}

// A group under fire.
class Range {
 public:
  explicit Range(int ranks) : ranks_(ranks), gates_(ranks), server_(Flags(ranks, gates_), gates_.target()) {
    if (server_.channel() == nullptr) return;
    chat_ = GoldenTexts().front();
    chat_.output_ids.resize(24);
    CheckAnswers();
    at_first_ = HoldingsOf(server_.process().pid());
    EXPECT_EQ(at_first_.children, ranks) << at_first_.ToString();
    EXPECT_EQ(at_first_.socket_files, 2) << at_first_.ToString();
  }
  Server& server() { return server_; }

  // One fault, and the way back.
  void Survive(const Strike& strike) {
    SCOPED_TRACE(absl::StrCat("epoch ", epoch_, ", ", NameOf(strike.fault), " rank ", strike.rank, " while ",
                              NameOf(strike.phase)));
    const absl::Time begin = absl::Now();
    gone_ = Pids();
    ASSERT_FALSE(gone_.empty());
    switch (strike.phase) {
      case Phase::kJoining:
      case Phase::kLoading:
        ASSERT_NO_FATAL_FAILURE(StrikeAtStart(strike));
        break;
      case Phase::kIdle:
        ASSERT_NO_FATAL_FAILURE(Hit(strike));
        break;
      case Phase::kPrefill:
      case Phase::kDecode:
      case Phase::kCollective:
        ASSERT_NO_FATAL_FAILURE(StrikeAtWork(strike));
        break;
      case Phase::kEnding:
        ASSERT_EQ(kill(gone_[static_cast<size_t>((strike.rank + 1) % ranks_)], SIGKILL), 0);
        ASSERT_NO_FATAL_FAILURE(Hit(strike));
        break;
    }
    // Whoever loses a connection before it has joined dials again, and nothing else happens.
    const bool may_go_on = strike.phase == Phase::kJoining && strike.fault == Fault::kDropRanks;
    if (!may_go_on) {
      ++epoch_;
      EXPECT_TRUE(server_.process().WaitForLine(absl::StrCat("epoch ", epoch_, ": started ")).has_value())
          << server_.process().output();
    }
    gates_.Release();
    ASSERT_TRUE(server_.WaitUntilServing()) << server_.process().output();
    if (may_go_on) {
      if (RankPids(server_.process(), epoch_ + 1, ranks_).empty()) {
        gone_.resize(gone_.size() - static_cast<size_t>(ranks_));
      } else {
        ++epoch_;
      }
    }
    CheckAnswers();
    CheckHoldings();
    for (const int pid : gone_) EXPECT_TRUE(IsGone(pid)) << "process " << pid << " is left over";
    Cycles& cycles = cycles_[absl::StrFormat("%-10s %s", NameOf(strike.phase), NameOf(strike.fault))];
    ++cycles.count;
    cycles.longest = std::max(cycles.longest, absl::Now() - begin);
  }

  void PrintCycles() const {
    int count = 0;
    for (const auto& [name, cycles] : cycles_) {
      std::printf("%-24s %3d cycles, longest %.1f s\n", name.c_str(), cycles.count,
                  absl::ToDoubleSeconds(cycles.longest));
      count += cycles.count;
    }
    std::printf("%d cycles; clients heard of a loss at most %.3f s after the daemon had\n", count,
                absl::ToDoubleSeconds(longest_wait_));
    std::printf("at first: %s\nat last:  %s\n", at_first_.ToString().c_str(),
                HoldingsOf(const_cast<Server&>(server_).process().pid()).ToString().c_str());
  }

 private:
  struct Cycles {
    int count = 0;
    absl::Duration longest;
  };

  static std::vector<std::string> Flags(int ranks, const GroupGates& gates) {
    std::vector<std::string> flags = GroupFlags(ranks);
    flags.insert(flags.end(), {"--worker", gates.worker(), "--max-prefill-tokens", "64"});
    return flags;
  }
  std::vector<int> Pids() { return RankPids(server_.process(), epoch_, ranks_); }
  std::string RanksSocket() const { return absl::StrCat("ranks.", epoch_, ".sock"); }

  // The next life is the one to hit: this one goes in the plainest way.
  void StrikeAtStart(const Strike& strike) {
    // Who starts late, so that the struck rank waits for somebody: not the leader, if it can be helped,
    // because nobody gets anywhere without it.
    const int late = strike.rank != 0 && ranks_ == 2 ? 0 : strike.rank == 1 ? 2 : 1;
    if (strike.phase == Phase::kJoining) {
      gates_.HoldStart(late);
    } else {
      ASSERT_TRUE(gates_.HoldLoading(strike.rank));
    }
    ASSERT_EQ(kill(gone_[0], SIGKILL), 0);
    ++epoch_;
    ASSERT_TRUE(PollUntil([&] { return !Pids().empty(); })) << server_.process().output();
    const std::vector<int> next = Pids();
    gone_.insert(gone_.end(), next.begin(), next.end());
    const int pid = next[static_cast<size_t>(strike.rank)];
    if (strike.phase == Phase::kLoading) {
      ASSERT_TRUE(PollUntil([&] { return gates_.IsLoadingHeld(); })) << server_.process().output();
    } else if (late == 0) {
      ASSERT_TRUE(PollUntil([&] { return Runs(pid, WorkerPath()); }));
    } else if (ranks_ == 2) {
      // Asked anew each time: a rank that was forked has no command line of its own yet.
      ASSERT_TRUE(PollUntil([&] {
        const std::string folder = SocketFolder(next[0]);
        return !folder.empty() && std::filesystem::exists(std::filesystem::path(folder) / RanksSocket());
      }));
    } else {
      ASSERT_TRUE(PollUntil([&] { return IsConnected(pid, RanksSocket()); }));
    }
    Hit(strike);
    // Whoever is late goes on, the struck rank's weights stay closed.
    if (strike.phase == Phase::kJoining) gates_.Release();
  }

  // With a client that waits for its answer.
  void StrikeAtWork(const Strike& strike) {
    const bool prefill = strike.phase == Phase::kPrefill;
    OpenStream stream(server_.stub(), prefill ? LongPrompt() : EndlessDrafts());
    ASSERT_TRUE(prefill ? stream.ReadStarted() : stream.ReadFirstTokens());
    if (strike.phase == Phase::kCollective) {
      // Another rank comes late to the collective in which the struck one waits for it then.
      const int late = Pids()[static_cast<size_t>((strike.rank + 1) % ranks_)];
      const int pid = Pids()[static_cast<size_t>(strike.rank)];
      // Stopped between two plans, a leader would be waited for elsewhere: then once more. Longer each time,
      // for busy machines, but not so long that its silence counts.
      absl::Duration patience = absl::Milliseconds(300);
      ASSERT_TRUE(PollUntil([&] {
        kill(late, SIGSTOP);
        if (PollUntil([&] { return IsStopped(late) && IsInCollective(pid); }, patience)) return true;
        kill(late, SIGCONT);
        patience = std::min(patience * 2, absl::Duration(absl::Seconds(2)));
        return false;
      }));
      Hit(strike);
      kill(late, SIGCONT);  // it may have been killed already
    } else {
      Hit(strike);
    }
    const grpc::Status status = stream.Finish();
    const absl::Time heard = absl::Now();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << ctl::Describe(status);
    if (prefill) {
      EXPECT_EQ(stream.tokens(), 0u) << "the prompt was through before the strike";
    }
    const std::optional<std::string> line =
        server_.process().WaitForLine("group 0 is lost", kPatience, seen_);
    ASSERT_TRUE(line.has_value()) << server_.process().output();
    longest_wait_ = std::max(longest_wait_, heard - TimeOf(*line));
    EXPECT_LT(heard - TimeOf(*line), absl::Seconds(3));
  }

  void Hit(const Strike& strike) {
    seen_ = server_.process().output().size();
    const std::vector<int> pids = Pids();
    ASSERT_FALSE(pids.empty());
    const int pid = pids[static_cast<size_t>(strike.rank)];
    const auto signal = [&](int number) {
      // A group that ends may be faster.
      EXPECT_TRUE(kill(pid, number) == 0 || strike.phase == Phase::kEnding);
    };
    switch (strike.fault) {
      case Fault::kKill:
        return signal(SIGKILL);
      case Fault::kStop:
        return signal(SIGSTOP);
      case Fault::kDropRanks:
        EXPECT_TRUE(PollUntil([&] { return DropConnection(pid, RanksSocket()); }));
        return;
      case Fault::kDropLeader:
        EXPECT_TRUE(PollUntil([&] { return DropConnection(pid, absl::StrCat("leader.", epoch_, ".sock")); }));
        return;
    }
  }

  // The group computes what it should, drafts included.
  void CheckAnswers() {
    const ctl::Generation answer =
        server_.GenerateOk(TokenRequest(chat_.prompt_ids, static_cast<uint32_t>(chat_.output_ids.size())));
    EXPECT_EQ(answer.token_ids, chat_.output_ids);
    EXPECT_GT(answer.finished.speculation().accepted_tokens(), 0u);
  }

  // Nothing grows from life to life. A stream that has just ended may need a moment to be put away.
  void CheckHoldings() {
    Holdings now;
    const bool same = PollUntil(
        [&] {
          now = HoldingsOf(server_.process().pid());
          return now.children == at_first_.children && now.zombies == 0 &&
                 now.socket_files == at_first_.socket_files &&
                 now.shared_memories == at_first_.shared_memories &&
                 now.descriptors <= at_first_.descriptors + kSpare &&
                 now.threads <= at_first_.threads + kSpare;
        },
        absl::Seconds(20));
    EXPECT_TRUE(same) << "now:      " << now.ToString() << "\nat first: " << at_first_.ToString();
  }

  // gRPC makes threads, and what they wake each other with, as it needs them.
  static constexpr int kSpare = 8;

  const int ranks_;
  GroupGates gates_;
  Server server_;
  int epoch_ = 1;
  std::vector<int> gone_;  // processes that must not be there any more when this cycle is over
  size_t seen_ = 0;        // of the daemon's output, before the last strike
  GoldenText chat_;
  Holdings at_first_;
  std::map<std::string, Cycles> cycles_;
  absl::Duration longest_wait_;
};

void SurviveAll(Range& range, const std::vector<Strike>& strikes) {
  ASSERT_NE(range.server().channel(), nullptr);
  for (const Strike& strike : strikes) {
    range.Survive(strike);
    if (::testing::Test::HasFailure()) return;
  }
  range.PrintCycles();
}

class GroupOf : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GroupOf, ::testing::Values(2, 4), ::testing::PrintToStringParamName());

TEST_P(GroupOf, ReplaysTheGoldenAnswers) {
  Server server(GroupFlags(GetParam()));
  ASSERT_NE(server.channel(), nullptr);
  EXPECT_TRUE(server.process().WaitForLine("communicator host+peer").has_value());
  uint64_t accepted = 0;
  const std::vector<GoldenText> texts = GoldenTexts();
  std::vector<ctl::Generation> answers(texts.size());
  const grpc::Status status = ctl::RunConcurrently(static_cast<int64_t>(texts.size()), 8, [&](int64_t i) {
    return Generate(server.channel(), TokenRequest(texts[static_cast<size_t>(i)].prompt_ids, 128), kPatience,
                    &answers[static_cast<size_t>(i)]);
  });
  ASSERT_TRUE(status.ok()) << ctl::Describe(status);
  for (size_t i = 0; i < texts.size(); ++i) {
    EXPECT_EQ(answers[i].token_ids, texts[i].output_ids) << i;
    accepted += answers[i].finished.speculation().accepted_tokens();
  }
  EXPECT_GT(accepted, 500u);
  EXPECT_THAT(server.Metrics(), ContainsRegex(absl::StrCat("dflashd_worker_up[{][^}]*rank=\"", GetParam() - 1,
                                                           "\"[^}]*[}] 1")));
}

// Every phase and every fault once; every rank and all combinations are in the cycles below.
TEST(GroupLife, AGroupOfTwoSurvivesWhatHappensToItsRanks) {
  Range range(2);
  SurviveAll(range, {{Phase::kDecode, Fault::kKill, 1},
                     {Phase::kPrefill, Fault::kKill, 0},
                     {Phase::kIdle, Fault::kDropRanks, 1},
                     {Phase::kDecode, Fault::kDropLeader, 0},
                     {Phase::kLoading, Fault::kKill, 1},
                     {Phase::kJoining, Fault::kKill, 0},
                     {Phase::kCollective, Fault::kStop, 1},
                     {Phase::kEnding, Fault::kKill, 0}});
}

// In an order that differs between seeds.
void SurviveCycles(int ranks, uint32_t seed) {
  Range range(ranks);
  std::vector<Strike> strikes = AllStrikes(ranks);
  ASSERT_GE(strikes.size() * 2, 50u);
  if (strikes.size() < 50) strikes.insert(strikes.end(), strikes.begin(), strikes.end());
  std::mt19937 random(seed);
  std::shuffle(strikes.begin(), strikes.end(), random);
  SurviveAll(range, strikes);
}
TEST(GroupLife, TwoRanksCycles) { SurviveCycles(2, 1); }
TEST(GroupLife, FourRanksCycles) { SurviveCycles(4, 2); }

// A group that is asked to end and cannot do it in order: the daemon ends all the same, says that all is
// well, and leaves nothing behind.
void LeaveDespite(int ranks, Fault fault, int rank) {
  SCOPED_TRACE(absl::StrCat(NameOf(fault), " rank ", rank, " of ", ranks, " while leaving"));
  std::vector<std::string> flags = GroupFlags(ranks);
  flags.insert(flags.end(), {"--drain-seconds", "0", "--drain-grace-seconds", "0"});
  Server server(flags);
  ASSERT_NE(server.channel(), nullptr);
  const std::vector<int> pids = RankPids(server.process(), 1, ranks);
  ASSERT_FALSE(pids.empty());
  const std::string folder = SocketFolder(pids[0]);
  ASSERT_TRUE(std::filesystem::exists(folder)) << folder;
  OpenStream stream(server.stub(), EndlessDrafts());
  ASSERT_TRUE(stream.ReadFirstTokens());
  const int pid = pids[static_cast<size_t>(rank)];
  // It stands still while the others leave, so that the fault meets it then.
  ASSERT_EQ(kill(pid, SIGSTOP), 0);
  ASSERT_TRUE(PollUntil([&] { return IsStopped(pid); }));
  server.process().Signal(SIGTERM);
  ASSERT_TRUE(server.process().WaitForLine(": draining for").has_value());
  if (fault == Fault::kKill) {
    EXPECT_EQ(kill(pid, SIGKILL), 0);
  } else if (fault == Fault::kDropRanks) {
    EXPECT_TRUE(DropConnection(pid, "ranks.1.sock"));
    kill(pid, SIGCONT);
  }
  EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(server.process().WaitForExit(), 0) << server.process().output();
  for (const int gone : pids) EXPECT_TRUE(IsGone(gone)) << "process " << gone << " is left over";
  EXPECT_FALSE(std::filesystem::exists(folder)) << folder;
}

TEST(GroupLife, LeavesDespiteARankThatWasKilled) { LeaveDespite(2, Fault::kKill, 1); }
TEST(GroupLife, LeavesDespiteEverythingCycles) {
  for (const int ranks : {2, 4}) {
    for (int rank = 0; rank < ranks; ++rank) {
      for (const Fault fault : {Fault::kKill, Fault::kStop, Fault::kDropRanks})
        LeaveDespite(ranks, fault, rank);
    }
  }
}

// Ranks load side by side: whoever is late, the others are through before it begins.
TEST(GroupLoading, NoRankWaitsForAnother) {
  GroupGates gates(2);
  for (const int late : {0, 1}) {
    SCOPED_TRACE(late);
    ASSERT_TRUE(gates.HoldLoading(late));
    std::vector<std::string> flags = GroupFlags(2);
    flags.insert(flags.end(), {"--worker", gates.worker()});
    Process daemon(ServerCommand(flags, gates.target()));
    EXPECT_TRUE(PollUntil([&] { return gates.IsLoadingHeld(); })) << daemon.output();
    // Of the rank that is not held: the one that is has not even opened them.
    const std::optional<std::string> line = daemon.WaitForLine("loaded target");
    ASSERT_TRUE(line.has_value()) << daemon.output();
    EXPECT_EQ(daemon.output().find("dflashd: ready"), std::string::npos);
    gates.Release();
    EXPECT_TRUE(daemon.WaitForLine("dflashd: ready").has_value()) << daemon.output();
    daemon.Signal(SIGTERM);
    EXPECT_EQ(daemon.WaitForExit(), 0);
  }
}

// A rank that hangs while it loads says its heartbeats; only the deadline ends it.
TEST_P(GroupOf, ARankThatHangsWhileItLoadsIsStartedAgain) {
  const int ranks = GetParam() == 4 ? 1 : GetParam();  // one rank alone, too
  GroupGates gates(ranks);
  std::vector<std::string> flags = GroupFlags(ranks);
  flags.insert(flags.end(), {"--worker", gates.worker(), "--load-timeout", "6"});
  Server server(flags, gates.target());
  ASSERT_NE(server.channel(), nullptr);
  const std::vector<uint32_t> expected = server.GenerateOk(ShortRequest()).token_ids;
  ASSERT_TRUE(gates.HoldLoading(ranks - 1));
  const std::vector<int> pids = RankPids(server.process(), 1, ranks);
  ASSERT_FALSE(pids.empty());
  ASSERT_EQ(kill(pids[0], SIGKILL), 0);
  ASSERT_TRUE(PollUntil([&] { return gates.IsLoadingHeld(); })) << server.process().output();
  // Of a group, the leader says who is late; of one rank, the daemon does.
  EXPECT_TRUE(
      server.process()
          .WaitForLine(ranks == 1 ? "was not ready within 6s" : "ranks that have not loaded in time: 1")
          .has_value())
      << server.process().output();
  gates.Release();
  ASSERT_TRUE(server.WaitUntilServing()) << server.process().output();
  EXPECT_EQ(server.GenerateOk(ShortRequest()).token_ids, expected);
  EXPECT_THAT(server.Metrics(),
              ContainsRegex(absl::StrCat("dflashd_[a-z_]*reforms_total[{][^}]*cause=\"",
                                         ranks == 1 ? "load_timeout" : "rank_lost", "\"[^}]*[}] 1")));
}

}  // namespace
}  // namespace dflash::integration
