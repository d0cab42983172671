// dflash-rank-bench: the ranks of a group as processes, without a server: what their sums, forward passes and
// rounds cost, and whether they compute what a group of another size does.
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/child_process.h"
#include "base/flag_parser.h"
#include "base/status.h"
#include "tools/rank_bench/rank.h"

namespace dflash::bench {
namespace {

enum ExitCode : int { kExitOk = 0, kExitFailed = 1, kExitBadFlags = 2 };

struct Flags {
  RankOptions options;
  std::string json, only = "all", communicator = "auto", group_socket, draft_placement = "rank0";
  int64_t tp = 1, rank = -1, threads = 0, random_weights = 0;
  bool share_device = false, no_peer = false;
};

FlagParser MakeParser(Flags& flags) {
  FlagParser parser("dflash-rank-bench",
                    "Measures the ranks of a group, one process each, and compares what they compute with a\n"
                    "group of another size.");
  parser.Text("model", "DIR", "folder of the target; required", &flags.options.group.model);
  parser.Text("draft-model", "DIR", "folder of the drafter", &flags.options.group.draft_model);
  parser.Integer("random-weights", "SEED", "makes weights from this seed; 0: reads those of the folders", 0,
                 int64_t{1} << 62, &flags.random_weights);
  parser.Integer("tp", "N", "ranks", 1, 8, &flags.tp);
  parser.Choice("communicator", {"auto", "host", "nccl"}, "as dflashd's", &flags.communicator);
  parser.Switch("no-peer", "without peer memory", &flags.no_peer);
  parser.Choice("draft-placement", {"rank0", "sharded"}, "as dflashd's", &flags.draft_placement);
  parser.Switch("share-device", "all ranks use one GPU", &flags.share_device);
  parser.Integer("threads", "N", "CPU threads of a rank; 0: one per core", 0, 256, &flags.threads);
  parser.Integer("max-sequences", "N", "slots", 1, 1024, &flags.options.group.max_sequences);
  parser.Integer("cache-tokens", "N", "tokens in the paged caches", 0, int64_t{1} << 40,
                 &flags.options.group.cache_tokens);
  parser.Integer("max-prefill-tokens", "N", "prompt tokens in one step", 64, 65536,
                 &flags.options.group.max_prefill_tokens);
  parser.Integer("shard-residual-rows", "N",
                 "prompt rows of a step from which the residual is sharded; 0: the target's choice", 0,
                 1 << 20, &flags.options.group.shard_residual_rows);
  parser.Integer("context", "N", "tokens before what is measured", 1, 1 << 20, &flags.options.context);
  parser.Integer("tokens", "N", "that the engine generates", 1, 1 << 20, &flags.options.tokens);
  parser.Integer("repeats", "N", "of every figure", 1, 10000, &flags.options.repeats);
  parser.Integer("seed", "N", "of prompts", 0, 1 << 30, &flags.options.seed);
  parser.Text("write-states", "FILE", "hidden states, for another group to compare with",
              &flags.options.write_states);
  parser.Text("read-states", "FILE", "hidden states of another group", &flags.options.read_states);
  parser.Number("tolerance", "R", "relative error of hidden state k is at most this times the root of k", 0,
                1, &flags.options.tolerance);
  parser.Choice("only", {"all", "sums", "states", "forward", "engine"}, "what to do", &flags.only);
  parser.Text("json", "FILE", "also writes all figures there", &flags.json);
  parser.Integer("rank", "R", "this process is that rank (for the program itself)", -1, 7, &flags.rank);
  parser.Text("group-socket", "ADDRESS", "of the rank channel (for the program itself)", &flags.group_socket);
  return parser;
}

absl::Status RunRank(Flags& flags) {
  RankOptions& options = flags.options;
  const int rank = static_cast<int>(flags.rank);
  options.group.device = flags.share_device ? 0 : rank;
  options.group.threads = static_cast<int>(flags.threads);
  if (flags.random_weights > 0) options.group.random_weights = static_cast<uint64_t>(flags.random_weights);
  options.group.draft_placement =
      flags.draft_placement == "sharded" ? DraftPlacement::kSharded : DraftPlacement::kRankZero;

  MembershipOptions joining;
  joining.rank = rank;
  joining.channel = {.address = flags.group_socket,
                     .group_id = "bench",
                     .epoch = 1,
                     .size = static_cast<int>(flags.tp),
                     .build = DFLASHD_VERSION,
                     .options = "",
                     .secret = ""};
  joining.communicator = flags.communicator;
  joining.all_reduce = "communicator";  // its peer memory comes below
  DFLASH_ASSIGN_OR_RETURN(Membership membership,
                          JoinGroup(joining, options.group.device, [rank](const absl::Status& fault) {
                            std::fprintf(stderr, "rank %d: %s\n", rank, std::string(fault.message()).c_str());
                            _exit(kExitFailed);
                          }));
  DFLASH_ASSIGN_OR_RETURN(const Stream stream,
                          Stream::Create({.threads = 1, .device = options.group.device}));
  Report report;
  const bool is_first = rank == 0;
  std::unique_ptr<PeerCommunicator> peer;
  Communicator* base = membership.communicator.get();
  if (flags.tp > 1 && !flags.no_peer) {
    DFLASH_ASSIGN_OR_RETURN(
        PeerMemory memory,
        PeerMemory::Create(base, int64_t{std::string(BackendName()) == "cuda" ? 128 : 16} << 20, stream));
    if (is_first) report.Fact("peer memory", memory.problem().empty() ? "yes" : memory.problem());
    if (memory.problem().empty()) {
      DFLASH_ASSIGN_OR_RETURN(peer, PeerCommunicator::Create(std::move(membership.communicator),
                                                             std::move(memory), options.group.device));
    }
  }
  SwitchedCommunicator communicator(base, peer.get());
  if (is_first) report.Fact("ranks", absl::StrCat(flags.tp, ", ", BackendName(), ", ", base->name()));
  options.group.communicator = &communicator;

  const auto wants = [&](const char* what) { return flags.only == "all" || flags.only == what; };
  DFLASH_ASSIGN_OR_RETURN(const Group group, LoadGroup(options.group, [](const std::string&) {}));
  if (wants("sums") && flags.tp > 1) {
    DFLASH_RETURN_IF_ERROR(MeasureSums(communicator, group.target->config().hidden_size, options.repeats,
                                       *group.stream, report));
  }
  if (wants("states")) DFLASH_RETURN_IF_ERROR(CheckStates(options, communicator, group, report));
  if (wants("forward")) DFLASH_RETURN_IF_ERROR(MeasureForward(options, communicator, group, report));
  communicator.UsePeer(true);
  if (wants("engine")) {
    DFLASH_RETURN_IF_ERROR(MeasureEngine(options, membership, group, report));
    // No rank takes its communicator away while another one is in its last round.
    DFLASH_RETURN_IF_ERROR(base->Barrier(stream));
  } else if (membership.hub != nullptr) {
    DFLASH_RETURN_IF_ERROR(base->Barrier(stream));
    membership.hub->End(absl::OkStatus());
  } else if (membership.link != nullptr) {
    DFLASH_RETURN_IF_ERROR(base->Barrier(stream));
    DFLASH_RETURN_IF_ERROR(membership.link->NextPlan().status());
  }
  if (is_first && !flags.json.empty()) DFLASH_RETURN_IF_ERROR(report.WriteJson(flags.json));
  return absl::OkStatus();
}

// Starts one process a rank, all with this one's flags. The first bad exit code.
absl::StatusOr<int> RunRanks(const Flags& flags, int argc, char** argv) {
  DFLASH_ASSIGN_OR_RETURN(const PrivateDirectory directory, PrivateDirectory::Create());
  absl::Mutex mutex;
  int running = 0, code = kExitOk;
  std::vector<std::unique_ptr<ChildProcess>> children;
  for (int64_t rank = 0; rank < flags.tp; ++rank) {
    std::error_code error;
    std::vector<std::string> command = {std::filesystem::read_symlink("/proc/self/exe", error).string()};
    command.insert(command.end(), argv + 1, argv + argc);
    command.insert(command.end(), {"--rank", absl::StrCat(rank), "--group-socket",
                                   absl::StrCat("unix:", directory.path(), "/ranks.sock")});
    {
      absl::MutexLock lock(&mutex);
      ++running;
    }
    DFLASH_ASSIGN_OR_RETURN(std::unique_ptr<ChildProcess> child,
                            ChildProcess::Start(command, [&](const ExitReport& report) {
                              absl::MutexLock lock(&mutex);
                              --running;
                              if (code == kExitOk && (report.by_signal || report.code != 0))
                                code = report.by_signal ? 128 + report.code : report.code;
                            }));
    children.push_back(std::move(child));
  }
  const auto over = [&] { return running == 0 || code != kExitOk; };
  absl::MutexLock lock(&mutex);
  mutex.Await(absl::Condition(&over));
  const int result = code;
  mutex.Unlock();
  children.clear();  // kills who is left
  mutex.Lock();
  return result;
}

int Fail(ExitCode code, const absl::Status& status) {
  std::fprintf(stderr, "dflash-rank-bench: %s\n", std::string(status.message()).c_str());
  return code;
}

int Main(int argc, char** argv) {
  Flags flags;
  flags.options.group.max_prefill_tokens = 512;
  flags.options.group.adaptive_blocks = false;  // whole blocks are measured
  FlagParser parser = MakeParser(flags);
  FlagParser::Outcome outcome = FlagParser::Outcome::kRun;
  if (absl::Status status = parser.Parse(argc, argv, &outcome); !status.ok())
    return Fail(kExitBadFlags, status);
  if (outcome == FlagParser::Outcome::kHelp) {
    std::fputs(parser.Help().c_str(), stdout);
    return kExitOk;
  }
  if (outcome == FlagParser::Outcome::kVersion) {
    std::puts("dflash-rank-bench " DFLASHD_VERSION);
    return kExitOk;
  }
  if (flags.options.group.model.empty())
    return Fail(kExitBadFlags, absl::InvalidArgumentError("--model is required"));
  if (flags.rank < 0) {
    const absl::StatusOr<int> code = RunRanks(flags, argc, argv);
    return code.ok() ? *code : Fail(kExitFailed, code.status());
  }
  const absl::Status status = RunRank(flags);
  return status.ok() ? kExitOk : Fail(kExitFailed, status);
}

}  // namespace
}  // namespace dflash::bench

int main(int argc, char** argv) {
  try {
    return dflash::bench::Main(argc, argv);
  } catch (const std::exception& error) {  // a library's exception that nobody converted
    std::fprintf(stderr, "dflash-rank-bench: unexpected exception: %s\n", error.what());
    return dflash::bench::kExitFailed;
  }
}
