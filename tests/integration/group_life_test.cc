// Groups of several ranks as real processes: they answer like one rank, and whatever happens to one of them
// in whatever phase, the group ends as a whole, clients hear it, and it serves again without anybody's help.
#include <dirent.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/golden_prompts.h"
#include "tests/integration/server.h"
#include "tools/dflashctl/commands.h"

namespace dflash::integration {
namespace {

using ::testing::ContainsRegex;

std::vector<std::string> GroupFlags(int ranks) {
  return {"--tp", absl::StrCat(ranks), "--max-restart-delay", "1", "--formation-timeout", "10"};
}

// Process ids of the ranks of one life of the group, from the daemon's log; empty when it has not begun.
std::vector<int> RankPids(const Process& daemon, int epoch, int ranks) {
  const std::string output = daemon.output();
  std::vector<int> pids;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string head = absl::StrCat("epoch ", epoch, ": started ");
    const std::string tail = absl::StrCat(", rank ", rank, "\n");
    for (size_t at = output.find(head); at != std::string::npos; at = output.find(head, at + 1)) {
      const std::string line = output.substr(at, output.find('\n', at) + 1 - at);
      if (!line.ends_with(tail)) continue;
      const size_t begin = line.find("as process ") + 11;
      int pid = 0;
      if (absl::SimpleAtoi(line.substr(begin, line.find(',', begin) - begin), &pid)) pids.push_back(pid);
      break;
    }
  }
  return static_cast<int>(pids.size()) == ranks ? pids : std::vector<int>();
}

bool IsGone(int pid) { return kill(pid, 0) != 0; }

// Breaks one connection of a process at the socket file whose name contains `name`, as if the kernel had lost
// it. False when it has none.
bool DropConnection(int pid, const std::string& name) {
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (pidfd < 0) return false;
  bool dropped = false;
  const std::string folder = absl::StrCat("/proc/", pid, "/fd");
  if (DIR* entries = opendir(folder.c_str())) {
    while (const dirent* entry = readdir(entries)) {
      int number = 0;
      if (dropped || !absl::SimpleAtoi(entry->d_name, &number)) continue;
      const int fd = static_cast<int>(syscall(SYS_pidfd_getfd, pidfd, number, 0));
      if (fd < 0) continue;
      sockaddr_un own = {}, peer = {};
      socklen_t own_size = sizeof(own), peer_size = sizeof(peer);
      // A listening socket has no peer.
      if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_size) == 0 && own.sun_family == AF_UNIX &&
          getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0 &&
          (std::string(own.sun_path).find(name) != std::string::npos ||
           std::string(peer.sun_path).find(name) != std::string::npos)) {
        dropped = shutdown(fd, SHUT_RDWR) == 0;
      }
      close(fd);
    }
    closedir(entries);
  }
  close(pidfd);
  return dropped;
}

enum class Phase { kForming, kLoading, kIdle, kMidStep };
enum class Fault { kKill, kStop, kDropRanks, kDropLeader };

const char* NameOf(Phase phase) {
  constexpr const char* kNames[] = {"forming", "loading", "idle", "mid-step"};
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

// A group under fire.
class Range {
 public:
  explicit Range(int ranks) : ranks_(ranks), server_(GroupFlags(ranks)) {
    if (server_.channel() != nullptr) expected_ = server_.GenerateOk(ShortRequest()).token_ids;
  }
  Server& server() { return server_; }
  int epoch() const { return epoch_; }

  // One fault, and the way back.
  void Survive(const Strike& strike) {
    SCOPED_TRACE(absl::StrCat("epoch ", epoch_, ", ", NameOf(strike.fault), " rank ", strike.rank, " while ",
                              NameOf(strike.phase)));
    std::vector<int> gone = Pids();
    ASSERT_FALSE(gone.empty());
    if (strike.phase == Phase::kForming || strike.phase == Phase::kLoading) {
      // The next life is the one to hit: this one goes in the plainest way.
      ASSERT_EQ(kill(gone[0], SIGKILL), 0);
      ++epoch_;
      const std::string sign = strike.phase == Phase::kForming
                                   ? absl::StrCat("epoch ", epoch_, ": started ")
                                   : absl::StrCat("rank ", strike.rank, " of ", ranks_, ", epoch ", epoch_);
      ASSERT_TRUE(server_.process().WaitForLine(sign).has_value());
      ASSERT_TRUE(PollUntil([&] { return !Pids().empty(); }));
      const std::vector<int> pids = Pids();
      gone.insert(gone.end(), pids.begin(), pids.end());
      Hit(strike, pids);
    } else {
      std::unique_ptr<OpenStream> stream;
      if (strike.phase == Phase::kMidStep) {
        stream = std::make_unique<OpenStream>(server_.stub(), EndlessRequest());
        ASSERT_TRUE(stream->ReadFirstTokens());
      }
      Hit(strike, gone);
      if (stream != nullptr) {
        const grpc::Status status = stream->Finish();
        EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << ctl::Describe(status);
      }
    }
    ++epoch_;
    EXPECT_TRUE(server_.process().WaitForLine(absl::StrCat("epoch ", epoch_, ": started ")).has_value())
        << server_.process().output();
    ASSERT_TRUE(server_.WaitUntilServing()) << server_.process().output();
    const ctl::Generation answer = server_.GenerateOk(ShortRequest());
    EXPECT_EQ(answer.token_ids, expected_);
    for (const int pid : gone) EXPECT_TRUE(IsGone(pid)) << "process " << pid << " is left over";
  }

 private:
  std::vector<int> Pids() const { return RankPids(const_cast<Server&>(server_).process(), epoch_, ranks_); }

  void Hit(const Strike& strike, const std::vector<int>& pids) {
    const int pid = pids[static_cast<size_t>(strike.rank)];
    switch (strike.fault) {
      case Fault::kKill:
        EXPECT_EQ(kill(pid, SIGKILL), 0);
        return;
      case Fault::kStop:
        EXPECT_EQ(kill(pid, SIGSTOP), 0);
        return;
      case Fault::kDropRanks:
        EXPECT_TRUE(PollUntil([&] { return DropConnection(pid, absl::StrCat("ranks.", epoch_, ".sock")); }));
        return;
      case Fault::kDropLeader:
        EXPECT_TRUE(PollUntil([&] { return DropConnection(pid, absl::StrCat("leader.", epoch_, ".sock")); }));
        return;
    }
  }

  const int ranks_;
  Server server_;
  int epoch_ = 1;
  std::vector<uint32_t> expected_;
};

class GroupOf : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GroupOf, ::testing::Values(2, 4), ::testing::PrintToStringParamName());

TEST_P(GroupOf, ReplaysTheGoldenAnswers) {
  Server server(GroupFlags(GetParam()));
  ASSERT_NE(server.channel(), nullptr);
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

TEST(GroupLife, AGroupOfTwoSurvivesWhatHappensToItsRanks) {
  Range range(2);
  ASSERT_NE(range.server().channel(), nullptr);
  for (const Strike& strike :
       {Strike{Phase::kMidStep, Fault::kKill, 1}, Strike{Phase::kMidStep, Fault::kKill, 0},
        Strike{Phase::kIdle, Fault::kDropRanks, 1}, Strike{Phase::kMidStep, Fault::kDropLeader, 0},
        Strike{Phase::kLoading, Fault::kKill, 1}, Strike{Phase::kForming, Fault::kKill, 0},
        Strike{Phase::kMidStep, Fault::kStop, 1}}) {
    range.Survive(strike);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// Every rank, every phase, every fault, in an order that differs between seeds.
TEST(GroupLife, FiftyCycles) {
  constexpr int kRanks = 4;
  Range range(kRanks);
  ASSERT_NE(range.server().channel(), nullptr);
  std::vector<Strike> strikes;
  for (const Phase phase : {Phase::kForming, Phase::kLoading, Phase::kIdle, Phase::kMidStep}) {
    for (int rank = 0; rank < kRanks; ++rank) {
      strikes.push_back({phase, Fault::kKill, rank});
      strikes.push_back({phase, Fault::kStop, rank});
      if (phase != Phase::kForming) strikes.push_back({phase, Fault::kDropRanks, rank});
    }
  }
  strikes.push_back({Phase::kIdle, Fault::kDropLeader, 0});
  strikes.push_back({Phase::kMidStep, Fault::kDropLeader, 0});
  std::mt19937 random(1);
  std::shuffle(strikes.begin(), strikes.end(), random);
  for (int cycle = 0; cycle < 50; ++cycle) {
    range.Survive(strikes[static_cast<size_t>(cycle) % strikes.size()]);
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace dflash::integration
