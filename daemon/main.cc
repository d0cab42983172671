// dflashd: the coordinator. Takes requests over gRPC, hands them to a worker group that it starts and
// watches, streams the output back; exports metrics and health.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "base/flag_parser.h"
#include "base/status.h"
#include "daemon/frontend/checkpoint_prompts.h"
#include "daemon/local_group.h"
#include "daemon/metrics/exporter.h"
#include "daemon/ops/ops_server.h"
#include "daemon/routing/dispatcher.h"
#include "daemon/rpc/inference_service.h"
#include "daemon/rpc/public_server.h"
#include "daemon/supervise/child_process.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace dflash {
namespace {

enum ExitCode : int {
  kExitOk = 0,
  kExitBadFlags = 64,
  kExitBadModel = 65,
  kExitNoDevice = 69,
  kExitCannotListen = 74,
  kExitNoWorker = 75,
};

struct Flags {
  std::string model, draft_model;
  std::string listen = "127.0.0.1:8500";
  std::string ops_listen = "127.0.0.1:8503";
  int64_t tp = 1;
  int64_t rank_timeout_seconds = 60;
  int64_t formation_timeout_seconds = 60;
  int64_t max_restart_delay_seconds = 60;
  std::string communicator = "auto";
  std::string draft_placement = "rank0";
  bool share_device = false;
  std::string backend = "auto";
  std::string speculation = "dflash";
  std::string worker;  // empty: beside this program
  std::string model_name;
  int64_t max_queued_requests = 256;
  int64_t max_queued_tokens = 1 << 20;
  double max_queue_seconds = 120;
  int64_t max_client_requests = 0;
  double max_client_rate = 0;
  int64_t groups = 1;
  // Handed to the worker.
  std::string instruction_set = "auto";
  int64_t threads = 0, max_sequences = 8, max_context_tokens = 0, cache_tokens = 0, max_prefill_tokens = 512;
  bool allow_unlisted_keys = false;
  std::string defect;
};

FlagParser MakeParser(Flags& flags) {
  FlagParser parser("dflashd", "Serves a large language model with DFlash speculative decoding over gRPC.");
  parser.Text("model", "DIR", "folder of the target's checkpoint; required", &flags.model);
  parser.Text("draft-model", "DIR", "folder of the drafter's checkpoint; empty: plain decoding",
              &flags.draft_model);
  parser.Address("listen", "where gRPC clients connect; port 0 takes a free one", 0, &flags.listen);
  parser.Address("ops-listen", "where /metrics, /livez, /readyz are served over HTTP", 0, &flags.ops_listen);
  parser.Integer("tp", "N", "tensor-parallel ranks of the worker group", 1, 8, &flags.tp);
  parser.Integer("groups", "N", "worker groups, each with a whole copy of the model and its own devices", 1,
                 8, &flags.groups);
  parser.Choice("communicator", {"auto", "host", "nccl"},
                "how ranks exchange data; auto: nccl with CUDA, host (shared memory) without",
                &flags.communicator);
  parser.Choice("draft-placement", {"rank0", "sharded"}, "which ranks run the drafter",
                &flags.draft_placement);
  parser.Switch("share-device", "all ranks use one GPU (tests; needs --communicator host)",
                &flags.share_device);
  parser.Integer("rank-timeout", "SECONDS", "after which a rank that makes no progress ends its group", 1,
                 3600, &flags.rank_timeout_seconds);
  parser.Integer("formation-timeout", "SECONDS", "until all ranks of a group have found each other", 1, 3600,
                 &flags.formation_timeout_seconds);
  parser.Integer("max-restart-delay", "SECONDS", "longest wait before a lost group is started again", 1, 3600,
                 &flags.max_restart_delay_seconds);
  parser.Choice("backend", {"auto", "cpu", "cuda"}, "what the worker runs on", &flags.backend);
  parser.Choice("speculation", {"dflash", "off"}, "what requests get that do not choose", &flags.speculation);
  parser.Text("model-name", "NAME", "served name; default: the last part of --model", &flags.model_name);
  parser.Integer("max-queued-requests", "N", "requests that may wait", 1, 1 << 20,
                 &flags.max_queued_requests);
  parser.Integer("max-queued-tokens", "N", "prompt tokens of the requests that wait", 1, int64_t{1} << 40,
                 &flags.max_queued_tokens);
  parser.Number("max-queue-seconds", "SECONDS", "a request that would wait longer, or has, is refused", 0.001,
                1e6, &flags.max_queue_seconds);
  parser.Integer("max-client-requests", "N",
                 "requests of one client at a time, waiting and running; 0: no bound", 0, 1 << 20,
                 &flags.max_client_requests);
  parser.Number("max-client-rate", "N", "requests of one client a second; 0: no bound", 0, 1e6,
                &flags.max_client_rate);
  parser.Integer("threads", "N", "CPU threads of the worker; 0: one per core", 0, 256, &flags.threads);
  parser.Choice("instruction-set", {"auto", "scalar", "avx2", "avx512"},
                "instructions of the CPU worker; auto: the best that this machine has",
                &flags.instruction_set);
  parser.Integer("max-sequences", "N", "requests that run at a time", 1, 1024, &flags.max_sequences);
  parser.Integer("max-context-tokens", "N", "prompt and output of one request; 0: what the target allows", 0,
                 int64_t{1} << 30, &flags.max_context_tokens);
  parser.Integer("cache-tokens", "N", "tokens in the paged caches; 0: max-sequences whole contexts", 0,
                 int64_t{1} << 40, &flags.cache_tokens);
  parser.Integer("max-prefill-tokens", "N", "prompt tokens in one step", 64, 65536,
                 &flags.max_prefill_tokens);
  parser.Switch("allow-unlisted-config-keys",
                "accept keys of config.json that docs/config-keys.md does not list",
                &flags.allow_unlisted_keys);
  parser.Text("worker", "PATH", "worker program; default: dflash-worker beside this program", &flags.worker);
  parser.Text("inject-defect", "NAME", "plant a known integration defect (test builds only)", &flags.defect);
  return parser;
}

int Fail(ExitCode code, const std::string& message) {
  spdlog::error("{}", message);
  return code;
}

std::filesystem::path ProgramFolder() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
}

// Programs lie side by side when installed, in neighbouring folders when built.
std::filesystem::path FindProgram(const std::string& name) {
  for (const std::filesystem::path& folder : {ProgramFolder(), ProgramFolder().parent_path() / "worker"}) {
    if (std::filesystem::exists(folder / name)) return folder / name;
  }
  return {};
}

// Runs "PROGRAM --probe" and says whether it finds its device.
bool Probe(const std::filesystem::path& program) {
  absl::Notification ended;
  std::atomic<bool> found = false;
  auto child = ChildProcess::Start({program.string(), "--probe"}, [&](const ExitReport& report) {
    found = !report.by_signal && report.code == 0;
    ended.Notify();
  });
  if (!child.ok()) return false;
  return ended.WaitForNotificationWithTimeout(absl::Seconds(60)) && found;
}

// NotFound: no worker program. Unavailable: no device for --backend cuda.
absl::StatusOr<std::filesystem::path> ChooseWorker(const Flags& flags) {
  if (!flags.worker.empty()) return flags.worker;
  if (flags.backend != "cpu") {
    const std::filesystem::path cuda = FindProgram("dflash-worker-cuda");
    if (flags.backend == "cuda") {
      if (cuda.empty())
        return absl::UnavailableError("--backend cuda: dflash-worker-cuda is not in this build");
      if (!Probe(cuda)) return absl::UnavailableError("--backend cuda: no usable GPU was found");
      return cuda;
    }
    if (!cuda.empty()) {
      if (Probe(cuda)) return cuda;
      spdlog::info("no usable GPU: the worker runs on the CPU");
    }
  }
  const std::filesystem::path cpu = FindProgram("dflash-worker");
  if (cpu.empty())
    return absl::NotFoundError("dflash-worker is not beside this program; name it with --worker");
  return cpu;
}

std::vector<std::string> WorkerCommand(const std::filesystem::path& worker, const Flags& flags) {
  std::vector<std::string> command = {worker.string(), "--model", flags.model, "--speculation",
                                      flags.speculation};
  if (!flags.draft_model.empty()) command.insert(command.end(), {"--draft-model", flags.draft_model});
  const std::pair<const char*, int64_t> numbers[] = {{"--threads", flags.threads},
                                                     {"--max-sequences", flags.max_sequences},
                                                     {"--max-context-tokens", flags.max_context_tokens},
                                                     {"--cache-tokens", flags.cache_tokens},
                                                     {"--max-prefill-tokens", flags.max_prefill_tokens}};
  for (const auto& [name, value] : numbers) command.insert(command.end(), {name, absl::StrCat(value)});
  if (flags.instruction_set != "auto") {
    command.insert(command.end(), {"--instruction-set", flags.instruction_set});
  }
  if (flags.allow_unlisted_keys) command.emplace_back("--allow-unlisted-config-keys");
  if (!flags.defect.empty()) command.insert(command.end(), {"--inject-defect", flags.defect});
  return command;
}

// One command a rank. Rank r of group g has device g * tp + r, unless all share one.
std::vector<std::vector<std::string>> WorkerCommands(const std::filesystem::path& worker, const Flags& flags,
                                                     int64_t group) {
  std::vector<std::vector<std::string>> commands;
  for (int64_t rank = 0; rank < flags.tp; ++rank) {
    std::vector<std::string>& command = commands.emplace_back(WorkerCommand(worker, flags));
    const int64_t device = flags.share_device ? 0 : group * flags.tp + rank;
    if (device != 0) command.insert(command.end(), {"--device", absl::StrCat(device)});
    if (flags.tp == 1) break;
    command.insert(command.end(),
                   {"--communicator", flags.communicator, "--draft-placement", flags.draft_placement,
                    "--rank-timeout", absl::StrCat(flags.rank_timeout_seconds), "--formation-timeout",
                    absl::StrCat(flags.formation_timeout_seconds)});
  }
  return commands;
}

// The groups of this host by name. Empty at first: the operators' thread runs before there are any.
class LocalGroups {
 public:
  void Add(const std::string& name, std::unique_ptr<LocalGroup> group) {
    absl::MutexLock lock(&mutex_);
    groups_.emplace(name, std::move(group));
  }
  std::map<std::string, LocalGroup::Stats> GetStats() const {
    absl::MutexLock lock(&mutex_);
    std::map<std::string, LocalGroup::Stats> stats;
    for (const auto& [name, group] : groups_) stats.emplace(name, group->GetStats());
    return stats;
  }
  // All groups are gone for good: only a new process helps.
  bool AllGivenUp() const {
    const auto stats = GetStats();
    return !stats.empty() &&
           std::all_of(stats.begin(), stats.end(), [](const auto& entry) { return entry.second.given_up; });
  }
  // Of all groups at once.
  void Shutdown(absl::Duration timeout) {
    absl::MutexLock lock(&mutex_);
    std::vector<std::thread> threads;
    for (const auto& entry : groups_) {
      threads.emplace_back([group = entry.second.get(), timeout] { group->Shutdown(timeout); });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  mutable absl::Mutex mutex_;
  std::map<std::string, std::unique_ptr<LocalGroup>> groups_ ABSL_GUARDED_BY(mutex_);
};

void RefreshGauges(const Dispatcher& dispatcher, const LocalGroups& groups, Exporter& exporter) {
  const Dispatcher::Stats stats = dispatcher.GetStats();
  MetricRegistry& server = exporter.server();
  const auto set = [&](const MetricInfo& info, double value, const MetricLabels& labels = {}) {
    server.Gauge(info, labels).Set(value);
  };
  set(metrics::kRequestsRunning, static_cast<double>(stats.running));
  set(metrics::kRequestsWaiting, static_cast<double>(stats.waiting));
  set(metrics::kWaitingPromptTokens, static_cast<double>(stats.waiting_prompt_tokens));
  set(metrics::kOldestWaitingSeconds, absl::ToDoubleSeconds(stats.oldest_waiting));
  set(metrics::kQueueLimit, static_cast<double>(stats.limits.max_requests), {{"dimension", "requests"}});
  set(metrics::kQueueLimit, static_cast<double>(stats.limits.max_prompt_tokens), {{"dimension", "tokens"}});
  set(metrics::kReady, stats.serving);
  set(metrics::kDraining, stats.draining);
  const std::map<std::string, LocalGroup::Stats> local = groups.GetStats();
  for (const Dispatcher::GroupStats& state : stats.groups) {
    const auto found = local.find(state.name);
    if (found == local.end()) continue;
    const LocalGroup::Stats& lives = found->second;
    MetricRegistry& registry = exporter.group(state.name);
    for (int rank = 0; rank < lives.ranks; ++rank) {
      registry.Gauge(metrics::kWorkerUp, {{"rank", absl::StrCat(rank)}})
          .Set(state.state == Dispatcher::GroupState::kReady);
    }
    registry.Gauge(metrics::kWorkerHeartbeatAge, {{"rank", "0"}})
        .Set(absl::ToDoubleSeconds(lives.heartbeat_age));
    registry.Gauge(metrics::kGroupEpoch, {}).Set(static_cast<double>(lives.epoch));
    for (const auto& [cause, count] : lives.reforms) {
      prometheus::Counter& counter = registry.Counter(metrics::kGroupReforms, {{"cause", cause}});
      counter.Increment(static_cast<double>(count) - counter.Value());
    }
  }
}

OpsReply Answer(const std::string& path, const Dispatcher& dispatcher, Exporter& exporter,
                const LocalGroups& groups, const std::atomic<bool>& has_been_ready) {
  if (path == "/metrics") {
    return {
        .status = 200, .content_type = "text/plain; version=0.0.4; charset=utf-8", .body = exporter.Text()};
  }
  if (path == "/version") return {.body = DFLASHD_VERSION "\n"};
  const Dispatcher::Stats stats = dispatcher.GetStats();
  const std::string why = stats.detail.empty() ? "not ready" : stats.detail;
  if (path == "/livez") {
    // A lost group comes back by itself, unless it was given up: then only a new process helps.
    const bool lost = !stats.draining && groups.AllGivenUp();
    return lost ? OpsReply{.status = 503, .body = why + "\n"} : OpsReply{.body = "ok\n"};
  }
  if (path == "/readyz")
    return stats.serving ? OpsReply{.body = "ok\n"} : OpsReply{.status = 503, .body = why + "\n"};
  if (path == "/startupz") {
    return has_been_ready ? OpsReply{.body = "ok\n"} : OpsReply{.status = 503, .body = why + "\n"};
  }
  return {.status = 404, .body = "no such page; there are /metrics, /livez, /readyz, /startupz, /version\n"};
}

int Serve(const Flags& flags) {
  absl::StatusOr<std::filesystem::path> worker = ChooseWorker(flags);
  if (!worker.ok()) {
    return Fail(absl::IsUnavailable(worker.status()) ? kExitNoDevice : kExitBadFlags,
                std::string(worker.status().message()));
  }
  absl::StatusOr<CheckpointPrompts> prompts = CheckpointPrompts::Load(flags.model);
  if (!prompts.ok()) return Fail(kExitBadModel, std::string(prompts.status().message()));

  Exporter exporter(flags.model_name);
  exporter.server().Gauge(metrics::kBuildInfo, {{"version", DFLASHD_VERSION}}).Set(1);
  Dispatcher dispatcher(
      {.queue = {.max_requests = flags.max_queued_requests,
                 .max_prompt_tokens = flags.max_queued_tokens,
                 .max_wait = absl::Seconds(flags.max_queue_seconds)},
       .client = {.max_requests = flags.max_client_requests, .requests_per_second = flags.max_client_rate}},
      &absl::Now);
  InferenceService service({.model = flags.model_name,
                            .drafter_name = std::filesystem::path(flags.draft_model).filename().string(),
                            .version = DFLASHD_VERSION},
                           &dispatcher, &*prompts, &exporter);

  absl::StatusOr<std::unique_ptr<PublicServer>> server = PublicServer::Start(flags.listen, &service);
  if (!server.ok())
    return Fail(kExitCannotListen, absl::StrCat("--listen: ", std::string(server.status().message())));

  std::atomic<bool> has_been_ready = false;
  LocalGroups groups;
  exporter.SetRefresh([&] { RefreshGauges(dispatcher, groups, exporter); });
  absl::StatusOr<std::unique_ptr<OpsServer>> ops = OpsServer::Start(
      flags.ops_listen,
      [&](const std::string& path) { return Answer(path, dispatcher, exporter, groups, has_been_ready); });
  if (!ops.ok())
    return Fail(kExitCannotListen, absl::StrCat("--ops-listen: ", std::string(ops.status().message())));

  const std::string host = flags.listen.substr(0, flags.listen.rfind(':'));
  const std::string ops_host = flags.ops_listen.substr(0, flags.ops_listen.rfind(':'));
  dispatcher.SetServingCallback([&] {
    const bool serving = dispatcher.GetStats().serving;
    (*server)->SetServing(serving);
    if (!serving || has_been_ready.exchange(true)) return;
    std::printf("dflashd: serving on %s:%d, ops on %s:%d\n", host.c_str(), (*server)->port(),
                ops_host.c_str(), (*ops)->port());
    std::fflush(stdout);
  });

  // Signals are blocked in every thread (main): this one takes them, and SIGUSR1 from the watcher of the
  // worker.
  const pthread_t main_thread = pthread_self();
  std::atomic<int> failed_start = 0;
  for (int64_t i = 0; i < flags.groups; ++i) {
    const std::string name = absl::StrCat(i);
    absl::StatusOr<std::unique_ptr<LocalGroup>> started =
        LocalGroup::Start({.name = name,
                           .commands = WorkerCommands(*worker, flags, i),
                           .build = DFLASHD_VERSION,
                           .restart = {.max_delay = absl::Seconds(flags.max_restart_delay_seconds)}},
                          &dispatcher, &exporter, [&](int code) {
                            if (has_been_ready) return;  // it serves errors from now on, and says so
                            failed_start = code == 0 ? static_cast<int>(kExitNoWorker) : code;
                            pthread_kill(main_thread, SIGUSR1);
                          });
    if (!started.ok()) return Fail(kExitNoWorker, std::string(started.status().message()));
    groups.Add(name, *std::move(started));
  }
  absl::Notification stop_ticking;
  std::thread ticking([&] {
    while (!stop_ticking.WaitForNotificationWithTimeout(absl::Milliseconds(100))) {
      dispatcher.ExpireWaiting();
      service.Tick(absl::Now());
    }
  });

  sigset_t set;
  sigemptyset(&set);
  for (int number : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&set, number);
  int number = 0;
  sigwait(&set, &number);
  if (number != SIGUSR1) spdlog::info("signal {}: shutting down", number);

  dispatcher.ShutDown();
  (*server)->Shutdown(absl::Seconds(2));
  groups.Shutdown(absl::Seconds(10));
  stop_ticking.Notify();
  ticking.join();
  ops->reset();
  if (failed_start != 0) {
    return Fail(static_cast<ExitCode>(failed_start.load()),
                "the worker ended before it could serve; see its message above");
  }
  return kExitOk;
}

int Main(int argc, char** argv) {
  Flags flags;
  FlagParser parser = MakeParser(flags);
  FlagParser::Outcome outcome = FlagParser::Outcome::kRun;
  if (absl::Status status = parser.Parse(argc, argv, &outcome); !status.ok()) {
    return Fail(kExitBadFlags, std::string(status.message()));
  }
  if (outcome == FlagParser::Outcome::kHelp) {
    std::fputs(parser.Help().c_str(), stdout);
    return kExitOk;
  }
  if (outcome == FlagParser::Outcome::kVersion) {
    std::puts("dflashd " DFLASHD_VERSION);
    return kExitOk;
  }
  if (flags.model.empty()) return Fail(kExitBadFlags, "--model is required");
  if (flags.draft_model.empty() && parser.Given("speculation") && flags.speculation != "off") {
    return Fail(kExitBadFlags, "--speculation dflash needs --draft-model");
  }
  for (const auto& [name, folder] :
       {std::pair("--model", &flags.model), std::pair("--draft-model", &flags.draft_model)}) {
    if (!folder->empty() && !std::filesystem::is_directory(*folder)) {
      return Fail(kExitBadModel, absl::StrCat(name, ": ", *folder, " is no folder"));
    }
  }
  if (flags.model_name.empty()) {
    flags.model_name = std::filesystem::weakly_canonical(flags.model).filename().string();
  }
  return Serve(flags);
}

}  // namespace
}  // namespace dflash

int main(int argc, char** argv) {
  sigset_t blocked;
  sigemptyset(&blocked);
  for (int number : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&blocked, number);
  pthread_sigmask(SIG_BLOCK, &blocked, nullptr);  // before any thread exists
  std::signal(SIGPIPE, SIG_IGN);
  spdlog::set_default_logger(spdlog::stderr_logger_mt("dflashd"));
  spdlog::set_pattern("%Y-%m-%dT%H:%M:%S.%eZ %^%l%$ %n: %v", spdlog::pattern_time_type::utc);
  try {
    return dflash::Main(argc, argv);
  } catch (const std::exception& error) {  // a library's exception that nobody converted
    spdlog::critical("unexpected exception: {}", error.what());
    return dflash::kExitNoWorker;
  }
}
