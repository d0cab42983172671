// A server under fire: its ranks are killed and stopped, connections break, clients cancel, stall, vanish and
// have no time, the log's disk is full, the coordinator is drained, ended and killed. And every answer is
// right: no other text, no token lost or doubled, nobody stuck, every request ends as it should and is
// counted once, and nothing is left behind. What happens is a function of a seed (chaos_plan.h) and is
// printed.
//   DFLASHD_CHAOS_SECONDS  how long, about, for each group size (default 45)
//   DFLASHD_CHAOS_SEED     (default 1)
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "dflash/v1/admin.grpc.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/integration/chaos_clients.h"
#include "tests/integration/chaos_plan.h"
#include "tests/integration/group_processes.h"
#include "tests/integration/server.h"

namespace dflash::integration {
namespace {

namespace fs = std::filesystem;

constexpr int kClients = 32;

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  int64_t value = otherwise;
  if (text != nullptr && !absl::SimpleAtoi(text, &value)) ADD_FAILURE() << name << " is no number";
  return value;
}

void Say(const std::string& what) {
  std::printf("%s %s\n", absl::FormatTime("%H:%M:%E3S", absl::Now(), absl::UTCTimeZone()).c_str(),
              what.c_str());
  std::fflush(stdout);
}

int64_t ResidentKib(int pid) {
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmRSS:")) return std::stoll(line.substr(6));
  }
  return 0;
}

// What a process has open, in words that are the same at another time.
std::string OpenFiles(int pid) {
  std::map<std::string, int> files;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(absl::StrCat("/proc/", pid, "/fd"), error)) {
    const std::string target = fs::read_symlink(entry.path(), error).string();
    ++files[target.starts_with("/") ? target : target.substr(0, target.find(":["))];
  }
  std::string text;
  for (const auto& [name, count] : files) absl::StrAppend(&text, count, " ", name, ", ");
  return text;
}

// Names of ours in a folder: other programs call theirs dflashd-..., as well.
std::set<std::string> Ours(const std::string& folder) {
  std::set<std::string> names;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("dflash-") || name.starts_with("dflashd-sockets-")) names.insert(name);
  }
  return names;
}

// What the coordinator wrote about one request.
struct Line {
  std::string id, end, reason;
  bool started = false;
  uint64_t tokens = 0;
};
std::vector<Line> RequestLines(const std::string& log) {
  std::vector<Line> lines;
  std::istringstream text(log);
  for (std::string line; std::getline(text, line);) {
    if (line.find("\"msg\":\"request ") == std::string::npos) continue;
    const nlohmann::json json = nlohmann::json::parse(line, nullptr, false);
    if (json.is_discarded()) {
      ADD_FAILURE() << "no line of JSON: " << line;
      continue;
    }
    lines.push_back({.id = json["request_id"],
                     .end = json["end"],
                     .reason = json.value("reason", ""),
                     .started = json["msg"] == "request ended",
                     .tokens = json.value("output_tokens", uint64_t{0})});
  }
  return lines;
}

// Breaks `count` of this process's connections to a port, as if the network had.
int DropOwnConnections(int port, uint32_t pick, int count) {
  std::vector<int> found;
  for (const fs::directory_entry& entry : fs::directory_iterator("/proc/self/fd")) {
    int fd = 0;
    sockaddr_storage peer = {};
    socklen_t size = sizeof(peer);
    if (!absl::SimpleAtoi(entry.path().filename().string(), &fd) ||
        getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) {
      continue;
    }
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&peer);
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&peer);
    if ((peer.ss_family == AF_INET && ntohs(v4->sin_port) == port) ||
        (peer.ss_family == AF_INET6 && ntohs(v6->sin6_port) == port)) {
      found.push_back(fd);
    }
  }
  int dropped = 0;
  for (int i = 0; i < count && !found.empty(); ++i) {
    const size_t at = pick % found.size();
    if (shutdown(found[at], SHUT_RDWR) == 0) ++dropped;
    found.erase(found.begin() + static_cast<ptrdiff_t>(at));
  }
  return dropped;
}

class Chaos {
 public:
  Chaos(uint64_t seed, int ranks, absl::Duration duration)
      : seed_(seed),
        ranks_(ranks),
        long_run_(duration > absl::Minutes(5)),
        plan_(PlanChaos(seed, ranks, duration)),
        runtime_(fs::path(::testing::TempDir()) / absl::StrCat("chaos_test.", getpid(), ".", ranks)),
        port_(FreePort()) {
    // Sockets of the groups of this test and of no other.
    fs::remove_all(runtime_);
    fs::create_directories(runtime_);
    fs::permissions(runtime_, fs::perms::owner_all);
    setenv("XDG_RUNTIME_DIR", runtime_.c_str(), 1);
    shared_memory_before_ = Ours("/dev/shm");
    Say(absl::StrCat("chaos: DFLASHD_CHAOS_SEED=", seed, ", groups of ", ranks, "\n", ToString(plan_)));
  }
  ~Chaos() {
    unsetenv("XDG_RUNTIME_DIR");
    fs::remove_all(runtime_);
  }

  void Run() {
    {
      Server quiet(Flags({}));
      ASSERT_NE(quiet.channel(), nullptr);
      texts_ = LearnTexts(quiet);
    }
    ASSERT_FALSE(::testing::Test::HasFailure()) << "the quiet server does not work";
    clients_ = std::make_unique<ChaosClients>(seed_, absl::StrCat("127.0.0.1:", port_), &texts_,
                                              &disturbances_, long_run_);
    std::optional<size_t> down;
    for (size_t i = 0; i < plan_.size() && !::testing::Test::HasFatalFailure(); ++i) Live(i, &down);
    EXPECT_TRUE(clients_->Stop());
    server_.reset();
    CheckBooks();
    CheckNothingIsLeft();
    CheckThatItWasChaos();
    if (::testing::Test::HasFailure()) Say(absl::StrCat("seed ", seed_, ", groups of ", ranks_));
  }

 private:
  std::vector<std::string> Flags(std::vector<std::string> more) const {
    std::vector<std::string> flags = {"--tp", absl::StrCat(ranks_),  "--threads",
                                      "1",    "--max-restart-delay", "1"};
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
  }
  int pid() { return server_->process().pid(); }

  void Live(size_t number, std::optional<size_t>* down) {
    const CoordinatorLife& life = plan_[number];
    clients_->SetLife(static_cast<int>(number));
    server_ = std::make_unique<Server>(Flags({"--listen",
                                              absl::StrCat("127.0.0.1:", port_),
                                              "--groups",
                                              absl::StrCat(life.groups),
                                              "--load-timeout",
                                              "15",
                                              "--formation-timeout",
                                              "15",
                                              "--max-sequences",
                                              "8",
                                              "--max-queued-requests",
                                              absl::StrCat(life.queue),
                                              "--silence-timeout",
                                              "3",
                                              "--drain-seconds",
                                              absl::StrCat(absl::ToDoubleSeconds(life.drain)),
                                              "--log-format",
                                              "json",
                                              "--log-level",
                                              "debug"}),
                                       TinyTarget(), life.log_disk_full ? "/dev/full" : "");
    ASSERT_NE(server_->channel(), nullptr);
    const auto operators = grpc::CreateChannel(server_->admin_address(), grpc::InsecureChannelCredentials());
    // It is among what the coordinator holds, whenever it is asked first.
    ASSERT_TRUE(operators->WaitForConnected(absl::ToChronoTime(absl::Now() + kPatience)));
    admin_ = v1::AdminService::NewStub(operators);
    if (down->has_value()) disturbances_.End(**down);
    down->reset();
    Say(absl::StrCat("life ", number, " serves: process ", pid()));
    if (number == 0) clients_->Start(kClients);
    std::vector<Holdings> holdings;
    std::vector<int64_t> resident;
    const bool last = number + 1 == plan_.size();
    for (const std::vector<Strike>& part : life.parts) {
      for (const Strike& strike : part) Strike_(strike);
      ASSERT_TRUE(clients_->Pause()) << "stuck:\n" << clients_->Doing() << Log();
      CheckQuiet(number, &holdings);
      if (::testing::Test::HasFatalFailure()) return;
      resident.push_back(ResidentKib(pid()));
      Say(absl::StrCat("pause: ", resident.back() / 1024, " MiB resident, ", holdings.back().ToString()));
      if (&part == &life.parts[0] || !last) clients_->Continue();
    }
    // Connections of clients that vanished have been closed by now, and everything else is as it was.
    EXPECT_LE(holdings[1].descriptors, holdings[0].descriptors);
    EXPECT_LE(holdings[1].threads, holdings[0].threads + 8);
    if (long_run_) {
      EXPECT_LE(resident[1], resident[0] + (16 << 10));
    }
    if (last) {
      ASSERT_TRUE(clients_->Stop());
      EndLife(SIGTERM);
      EXPECT_EQ(server_->process().WaitForExit(), 0);
    } else {
      absl::SleepFor(life.end_after);
      *down = disturbances_.Begin(Disturbances::kCoordinatorDown);
      EndLife(life.killed ? SIGKILL : SIGTERM);
      EXPECT_EQ(server_->process().WaitForExit(), life.killed ? 128 + SIGKILL : 0);
    }
    // The ranks are gone with their coordinator, and not only when they feel like it.
    EXPECT_TRUE(PollUntil([this] { return FindProcesses(WorkerPath(), runtime_.string()).empty(); }))
        << "ranks outlive their coordinator";
    for (Line& line : RequestLines(server_->process().output())) lines_.push_back(std::move(line));
    lives_with_log_.push_back(!life.log_disk_full);
  }
  void EndLife(int signal) {
    Say(absl::StrCat("coordinator: signal ", signal));
    server_->process().Signal(signal);
    (void)server_->process().WaitForExit();
  }

  std::string Log() {
    const std::string log = server_->process().output();
    return log.substr(log.size() - std::min<size_t>(log.size(), 6000));
  }

  void Strike_(const Strike& strike) {
    absl::SleepFor(strike.after);
    std::string what = NameOf(strike.fault);
    ++struck_[strike.fault];
    switch (strike.fault) {
      case Fault::kKillRank:
      case Fault::kPauseRank:
      case Fault::kStopRank:
      case Fault::kDropLeader:
      case Fault::kDropRanks: {
        const std::optional<RankProcess> rank = Pick(strike);
        if (!rank.has_value()) {
          --struck_[strike.fault];  // there is none: the group is between two lives
          what += ": nobody";
          break;
        }
        absl::StrAppend(&what, " process ", rank->pid, ", group ", rank->group, ", rank ", rank->rank);
        if (!StrikeRank(strike, *rank)) --struck_[strike.fault];
        break;
      }
      case Fault::kDropClients: {
        const size_t one = disturbances_.Begin(Disturbances::kDropped);
        absl::StrAppend(&what, ": ", DropOwnConnections(port_, strike.pick, 4));
        disturbances_.End(one);
        break;
      }
      case Fault::kDeadlineStorm:
      case Fault::kCancelStorm:
        clients_->Storm(strike.pick, strike.fault == Fault::kDeadlineStorm);
        break;
      case Fault::kDrainAndResume:
        Drain(strike.lasting, absl::Seconds(60));
        break;
      case Fault::kDrainAndCut:
        Drain(strike.lasting, absl::Milliseconds(50));
        break;
    }
    Say(what);
  }

  // Whom it strikes; nullopt: nobody is there.
  std::optional<RankProcess> Pick(const Strike& strike) {
    std::vector<RankProcess> ranks = RanksOf(pid());
    std::sort(ranks.begin(), ranks.end(), [](const RankProcess& a, const RankProcess& b) {
      return std::pair(a.group, a.rank) < std::pair(b.group, b.rank);
    });
    if (strike.fault == Fault::kDropLeader) {
      std::erase_if(ranks, [](const RankProcess& rank) { return rank.rank != 0; });
    }
    if (ranks.empty()) return std::nullopt;
    return ranks[strike.pick % ranks.size()];
  }

  bool StrikeRank(const Strike& strike, const RankProcess& rank) {
    switch (strike.fault) {
      case Fault::kKillRank:
        return kill(rank.pid, SIGKILL) == 0;
      case Fault::kStopRank:
        return kill(rank.pid, SIGSTOP) == 0;
      case Fault::kDropLeader:
        return DropConnection(rank.pid, "leader.");
      case Fault::kDropRanks:
        return DropConnection(rank.pid, "ranks.");
      default:
        break;
    }
    if (kill(rank.pid, SIGSTOP) != 0) return false;
    absl::SleepFor(strike.lasting);
    // Unless somebody has ended it meanwhile; a number is not used again so soon.
    if (Runs(rank.pid, WorkerPath())) kill(rank.pid, SIGCONT);
    return true;
  }

  // Drains for `lasting`, and resumes.
  void Drain(absl::Duration lasting, absl::Duration timeout) {
    const size_t one = disturbances_.Begin(Disturbances::kDraining);
    grpc::ClientContext draining;
    v1::DrainRequest request;
    request.set_timeout_seconds(absl::ToDoubleSeconds(timeout));
    const auto stream = admin_->Drain(&draining, request);
    v1::DrainResponse progress;
    EXPECT_TRUE(stream->Read(&progress));
    absl::SleepFor(lasting);
    grpc::ClientContext resuming;
    v1::ResumeResponse resumed;
    const grpc::Status status = admin_->Resume(&resuming, {}, &resumed);
    EXPECT_TRUE(status.ok()) << ctl::Describe(status);
    disturbances_.End(one);
    while (stream->Read(&progress)) {
    }
    const grpc::Status drained = stream->Finish();
    EXPECT_TRUE(drained.ok() || drained.error_code() == grpc::StatusCode::ABORTED) << ctl::Describe(drained);
  }

  // Nobody asks for anything: the server has nothing left, and has counted what it had.
  void CheckQuiet(size_t number, std::vector<Holdings>* holdings) {
    const CoordinatorLife& life = plan_[number];
    ASSERT_TRUE(PollUntil([&] {
      const v1::GetLoadResponse load = server_->Load();
      bool all = load.serving() && load.running() == 0 && load.waiting() == 0;
      for (const v1::GroupLoad& group : load.groups()) {
        all = all && group.state() == v1::GROUP_STATE_READY && group.running() == 0 &&
              group.cache_pages_free() == group.cache_pages_total();
      }
      return all;
    })) << "it does not come to rest: "
        << server_->Load().DebugString() << Log();
    Holdings now;
    EXPECT_TRUE(PollUntil([&] {
      now = HoldingsOf(pid());
      return now.children == life.groups * ranks_ && now.zombies == 0 &&
             (holdings->empty() || now.descriptors <= holdings->front().descriptors);
    })) << now.ToString()
        << "; " << OpenFiles(pid()) << "; before: " << files_before_;
    files_before_ = OpenFiles(pid());
    holdings->push_back(now);
    EXPECT_EQ(now.socket_files, life.groups * (ranks_ > 1 ? 2 : 1)) << now.ToString();
    EXPECT_EQ(Ours(runtime_.string()).size(), static_cast<size_t>(life.groups)) << "folders of sockets";
    EXPECT_EQ(Ours("/dev/shm"), shared_memory_before_);

    // The counters against the log, request by request...
    std::string page;
    std::vector<Line> lines;
    const auto handled = [&] {
      page = server_->Metrics();
      return static_cast<size_t>(
          SumOfMetric(page, "dflashd_grpc_server_handled_total", "method=\"Generate\""));
    };
    const auto outcome = [&](const char* label) {
      return static_cast<int64_t>(
          SumOfMetric(page, "dflashd_requests_total", absl::StrCat("outcome=\"", label, "\"")));
    };
    if (life.log_disk_full) {
      (void)handled();
    } else {
      EXPECT_TRUE(PollUntil([&] {
        lines = RequestLines(server_->process().output());
        return lines.size() == handled();
      })) << lines.size()
          << " lines, " << handled() << " calls";
      std::map<std::string, int64_t> ends;
      uint64_t tokens = 0;
      for (const Line& line : lines) {
        const bool known = line.end == "OK" || line.end == "CANCELLED" || line.end == "DEADLINE_EXCEEDED";
        ++ends[known ? line.end : "other"];
        tokens += line.tokens;
      }
      EXPECT_EQ(outcome("stop") + outcome("length"), ends["OK"]);
      EXPECT_EQ(outcome("cancelled"), ends["CANCELLED"]);
      EXPECT_EQ(outcome("deadline"), ends["DEADLINE_EXCEEDED"]);
      EXPECT_EQ(outcome("rejected") + outcome("error"), ends["other"]);
      EXPECT_EQ(SumOfMetric(page, "dflashd_generated_tokens_total"), static_cast<double>(tokens));
    }
    // ... and against what the clients know: of some calls they cannot know how they ended.
    int64_t finished = 0, unknown = 0, all = 0;
    for (const Attempt& attempt : clients_->attempts()) {
      if (attempt.last_life != static_cast<int>(number)) continue;
      ++all;
      if (attempt.first_life == attempt.last_life && attempt.status.ok()) ++finished;
      if (attempt.first_life != attempt.last_life || !attempt.IsDefinite()) ++unknown;
    }
    const int64_t killed = clients_->counts()["killed"];
    EXPECT_GE(outcome("stop") + outcome("length"), finished);
    EXPECT_LE(outcome("stop") + outcome("length"), finished + unknown + killed);
    EXPECT_LE(SumOfMetric(page, "dflashd_requests_total"), static_cast<double>(all + killed));
    EXPECT_GE(SumOfMetric(page, "dflashd_requests_total"), static_cast<double>(all - unknown));
    EXPECT_EQ(SumOfMetric(page, "dflashd_requests_running"), 0);
    EXPECT_EQ(SumOfMetric(page, "dflashd_requests_waiting"), 0);
    for (const std::string& complaint : clients_->complaints()) {
      if (told_.insert(complaint).second) ADD_FAILURE() << complaint;
    }
    if (::testing::Test::HasFailure() && told_log_.insert(number).second) Say(Log());
  }

  // Every request that a client knows the end of, in the logs of all lives: there, once, with the same end.
  void CheckBooks() {
    std::map<std::string, const Line*> by_id;
    for (const Line& line : lines_) {
      EXPECT_TRUE(by_id.emplace(line.id, &line).second) << line.id << " ended twice";
    }
    size_t compared = 0;
    std::set<std::string> known;
    for (const Attempt& attempt : clients_->attempts()) {
      known.insert(attempt.id);
      const auto found = by_id.find(attempt.id);
      if (found == by_id.end()) {
        EXPECT_TRUE(!attempt.IsDefinite() || !lives_with_log_[static_cast<size_t>(attempt.first_life)] ||
                    !lives_with_log_[static_cast<size_t>(attempt.last_life)])
            << attempt.id << " is in no log: " << ctl::Describe(attempt.status);
        continue;
      }
      const Line& line = *found->second;
      EXPECT_GE(line.tokens, attempt.tokens) << attempt.id << " got more tokens than there were";
      if (!attempt.IsDefinite()) continue;
      ++compared;
      const std::string end =
          attempt.status.ok()
              ? "OK"
              : absl::StatusCodeToString(static_cast<absl::StatusCode>(attempt.status.error_code()));
      EXPECT_EQ(line.end, end) << attempt.id;
      EXPECT_EQ(line.reason, attempt.reason) << attempt.id;
      if (attempt.status.ok()) {
        EXPECT_EQ(line.tokens, attempt.tokens) << attempt.id;
      }
    }
    for (const Line& line : lines_) {
      EXPECT_TRUE(known.count(line.id) > 0 || line.id.starts_with("gen-")) << line.id << " is nobody's";
    }
    for (const std::string& complaint : clients_->complaints()) {
      if (told_.insert(complaint).second) ADD_FAILURE() << complaint;
    }
    Say(absl::StrCat(known.size(), " calls, ", compared,
                     " found in the log with the end that their client saw"));
  }

  void CheckNothingIsLeft() {
    EXPECT_TRUE(fs::is_empty(runtime_)) << *Ours(runtime_.string()).begin();
    EXPECT_EQ(Ours("/dev/shm"), shared_memory_before_);
    EXPECT_TRUE(FindProcesses(DflashdPath(), absl::StrCat("127.0.0.1:", port_)).empty());
  }

  void CheckThatItWasChaos() {
    for (const Fault fault : AllFaults(ranks_)) EXPECT_GT(struck_[fault], 0) << NameOf(fault);
    const std::map<std::string, int64_t> counts = clients_->counts();
    for (const auto& [what, count] : counts)
      std::printf("  %8ld %s\n", static_cast<long>(count), what.c_str());
    // How often a call gets how far depends on the machine: every kind was made, and outputs were read and
    // read on.
    for (const char* what :
         {"read: OK ", "read on: OK ", "cancelled: ", "cancelled at once: ", "cancelled by id: ",
          "deadline: DEADLINE_EXCEEDED ", "read slowly: ", "killed", "asked: "}) {
      const auto found = counts.lower_bound(what);
      EXPECT_TRUE(found != counts.end() && found->first.starts_with(what)) << what;
    }
    Say(absl::StrCat(clients_->replays(), " times a request went on in a group's next life"));
    EXPECT_GT(clients_->replays(), 0u);
  }

  const uint64_t seed_;
  const int ranks_;
  const bool long_run_;
  const std::vector<CoordinatorLife> plan_;
  const fs::path runtime_;
  const int port_;
  std::set<std::string> shared_memory_before_;
  std::vector<KnownText> texts_;
  Disturbances disturbances_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<v1::AdminService::Stub> admin_;
  std::unique_ptr<ChaosClients> clients_;
  std::vector<Line> lines_;
  std::vector<bool> lives_with_log_;
  std::map<Fault, int> struck_;
  std::string files_before_;
  std::set<std::string> told_;
  std::set<size_t> told_log_;
};

void RunChaos(int ranks) {
  Chaos chaos(static_cast<uint64_t>(FromEnvironment("DFLASHD_CHAOS_SEED", 1)), ranks,
              absl::Seconds(FromEnvironment("DFLASHD_CHAOS_SECONDS", 45)));
  chaos.Run();
}

TEST(ChaosPlan, IsAFunctionOfItsSeedAndHasEveryFault) {
  std::set<std::string> different;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    for (const int ranks : {1, 2}) {
      const std::vector<CoordinatorLife> plan = PlanChaos(seed, ranks, absl::Seconds(60));
      EXPECT_EQ(ToString(plan), ToString(PlanChaos(seed, ranks, absl::Seconds(60))));
      different.insert(ToString(plan));
      std::set<Fault> faults;
      bool full = false, killed = false, ended = false;
      for (const CoordinatorLife& life : plan) {
        for (const std::vector<Strike>& part : life.parts) {
          for (const Strike& strike : part) faults.insert(strike.fault);
        }
        full = full || life.log_disk_full;
        killed = killed || life.killed;
        ended = ended || !life.killed;
      }
      EXPECT_EQ(faults.size(), AllFaults(ranks).size()) << seed << "\n" << ToString(plan);
      EXPECT_TRUE(full && killed && ended) << seed;
    }
  }
  EXPECT_EQ(different.size(), 400u);
}

TEST(Chaos, OneRank) { RunChaos(1); }
TEST(Chaos, TwoRanks) { RunChaos(2); }

}  // namespace
}  // namespace dflash::integration
