// dflashd: the coordinator. Takes requests over gRPC, hands them to a worker group that it starts and
// watches, streams the output back; exports metrics and health.
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/exit_codes.h"
#include "base/group_secret.h"
#include "base/grpc_log.h"
#include "base/log.h"
#include "base/regular_file.h"
#include "base/sha256.h"
#include "base/status.h"
#include "daemon/auth/token_store.h"
#include "daemon/frontend/checkpoint_prompts.h"
#include "daemon/frontend/model_files.h"
#include "daemon/local_group.h"
#include "daemon/metrics/exporter.h"
#include "daemon/ops/ops_server.h"
#include "daemon/probes.h"
#include "daemon/remote_group.h"
#include "daemon/routing/dispatcher.h"
#include "daemon/routing/model_agreement.h"
#include "daemon/rpc/admin_server.h"
#include "daemon/rpc/credentials.h"
#include "daemon/rpc/inference_service.h"
#include "daemon/rpc/public_server.h"
#include "daemon/settings.h"
#include "daemon/traces/trace_exporter.h"
#include "daemon/worker_program.h"
#include "spdlog/spdlog.h"

namespace dflash {
namespace {

// No worker group could be started.
constexpr ExitCode kExitNoWorker = kExitEngineFailed;
// Spans of the last requests get so long to reach their collector.
constexpr absl::Duration kTraceFlush = absl::Seconds(2);
constexpr char kProgram[] = "dflashd";

int Fail(ExitCode code, const std::string& message) {
  spdlog::error("{}", message);
  return code;
}

// All worker groups by name. Empty at first: the operators' thread runs before there are any.
class Groups {
 public:
  void Add(const std::string& name, std::unique_ptr<LocalGroup> group) {
    absl::MutexLock lock(&mutex_);
    local_.emplace(name, std::move(group));
  }
  void Add(const std::string& name, std::unique_ptr<RemoteGroup> group) {
    absl::MutexLock lock(&mutex_);
    remote_.emplace(name, std::move(group));
  }
  std::map<std::string, GroupLives> Lives() const {
    absl::MutexLock lock(&mutex_);
    std::map<std::string, GroupLives> lives;
    for (const auto& [name, group] : local_) lives.emplace(name, group->Lives());
    for (const auto& [name, group] : remote_) lives.emplace(name, group->Lives());
    return lives;
  }
  // Lets go of groups on other hosts; ends those of this one, all at once. They stay here: others know them.
  void Shutdown(absl::Duration timeout) {
    absl::MutexLock lock(&mutex_);
    for (const auto& entry : remote_) entry.second->Shutdown();
    std::vector<std::thread> threads;
    for (const auto& entry : local_) {
      threads.emplace_back([group = entry.second.get(), timeout] { group->Shutdown(timeout); });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  mutable absl::Mutex mutex_;
  std::map<std::string, std::unique_ptr<LocalGroup>> local_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::unique_ptr<RemoteGroup>> remote_ ABSL_GUARDED_BY(mutex_);
};

void RefreshGauges(const Dispatcher& dispatcher, const Groups& groups, Exporter& exporter) {
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
  const std::map<std::string, GroupLives> all_lives = groups.Lives();
  for (const Dispatcher::GroupStats& state : stats.groups) {
    using State = Dispatcher::GroupState;
    const auto found = all_lives.find(state.name);
    if (found == all_lives.end()) continue;
    const GroupLives& lives = found->second;
    MetricRegistry& registry = exporter.group(state.name);
    for (const auto& [label, value] : {std::pair("loading", State::kLoading),
                                       std::pair("ready", State::kReady), std::pair("lost", State::kLost)}) {
      registry.Gauge(metrics::kGroupState, {{"state", label}}).Set(state.state == value);
    }
    for (int64_t rank = 0; rank < state.info.ranks; ++rank) {
      registry.Gauge(metrics::kWorkerUp, {{"rank", absl::StrCat(rank)}}).Set(state.state == State::kReady);
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

// Watches the certificates: when they end is a metric, and that they were changed is in the log. What cannot
// be read now leaves everything as it is: MakeServerCredentials has read it, and says why when it cannot.
class CertificateWatch {
 public:
  CertificateWatch(const Settings& settings, Exporter* exporter)
      : files_({{"server", settings.tls_cert}, {"client_ca", settings.tls_client_ca}}), exporter_(exporter) {
    Refresh();
  }
  void Refresh() {
    for (const auto& [label, path] : files_) {
      if (path.empty()) continue;
      const absl::StatusOr<absl::Time> expiry = CertificateExpiry(path);
      if (!expiry.ok()) continue;
      exporter_->server()
          .Gauge(metrics::kCertificateExpiry, {{"file", label}})
          .Set(static_cast<double>(absl::ToUnixSeconds(*expiry)));
      const absl::StatusOr<std::string> bytes = ReadFile(path, kMaxCertificateBytes);
      if (!bytes.ok()) continue;
      const std::string digest = Sha256().Add(*bytes).HexDigest();
      const auto [known, is_new] = known_.try_emplace(label, digest);
      if (is_new || std::exchange(known->second, digest) == digest) continue;
      spdlog::info("certificates were read again: {} ends {}", path,
                   absl::FormatTime(*expiry, absl::UTCTimeZone()));
    }
  }

 private:
  static constexpr int64_t kMaxCertificateBytes = 1 << 20;
  const std::map<std::string, std::string> files_;  // paths by what they are for
  Exporter* const exporter_;
  std::map<std::string, std::string> known_;  // digests
};

// Does an address of a flag stand for this machine alone?
bool IsLoopback(const std::string& address) {
  const std::string host = address.substr(0, address.rfind(':'));
  return host == "localhost" || host == "[::1]" || host.rfind("127.", 0) == 0;
}

OpsReply Answer(const OpsRequest& request, const Dispatcher& dispatcher, Exporter& exporter,
                const Groups& groups, bool has_been_ready, absl::Time last_tick) {
  if (request.path == "/metrics") {
    return {
        .status = 200, .content_type = "text/plain; version=0.0.4; charset=utf-8", .body = exporter.Text()};
  }
  if (request.path == "/version") return {.body = DFLASHD_VERSION "\n"};
  const std::optional<OpsReply> reply = AnswerProbe(request, {.stats = dispatcher.GetStats(),
                                                              .lives = groups.Lives(),
                                                              .has_been_ready = has_been_ready,
                                                              .tick_age = absl::Now() - last_tick});
  if (reply.has_value()) return *reply;
  return {.status = 404, .body = "no such page; there are /metrics, /livez, /readyz, /startupz, /version\n"};
}

void RefreshTokens(TokenStore* tokens) {
  const absl::StatusOr<bool> changed = tokens->Refresh();
  if (!changed.ok()) spdlog::error("tokens stay as they are: {}", std::string(changed.status().message()));
  if (changed.ok() && *changed) spdlog::info("tokens were read again: {}", tokens->size());
}

// Waits for a signal that is blocked in all threads (main).
int AwaitSignal() {
  sigset_t set;
  sigemptyset(&set);
  for (int number : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&set, number);
  int number = 0;
  sigwait(&set, &number);
  return number;
}

// Lets requests finish and their clients take what is theirs, for `timeout` after `grace`, or until a second
// signal.
void Drain(Dispatcher* dispatcher, InferenceService* service, absl::Duration grace, absl::Duration timeout) {
  absl::Notification cut_short;
  std::thread hastener([&] {
    const int number = AwaitSignal();
    if (number == SIGUSR1) return;  // all is done
    spdlog::warn("signal {}: requests that still run are ended", number);
    cut_short.Notify();  // first: what waits for the requests looks at it when there are none left
    dispatcher->ShutDown();
    service->LookAgain();
  });
  dispatcher->LeaveForGood();
  cut_short.WaitForNotificationWithTimeout(grace);
  dispatcher->Drain();
  const absl::Time deadline = absl::Now() + timeout;
  if (!dispatcher->AwaitEmpty(deadline) && !cut_short.HasBeenNotified()) {
    spdlog::warn("{} requests did not finish in time and are ended", dispatcher->EndAll());
  }
  service->AwaitStreams(deadline, [&] { return cut_short.HasBeenNotified(); });
  pthread_kill(hastener.native_handle(), SIGUSR1);
  hastener.join();
}

// Groups on other hosts.
struct RemoteLeaders {
  std::vector<std::string> addresses;
  std::string secret;
};
absl::StatusOr<RemoteLeaders> RemoteLeadersOf(const Settings& settings) {
  RemoteLeaders remote;
  remote.addresses = LeadersOf(settings);
  if (remote.addresses.empty()) return remote;
  DFLASH_ASSIGN_OR_RETURN(remote.secret, ReadGroupSecret(settings.group_secret_file));
  return remote;
}

int Serve(const Settings& settings, const RemoteLeaders& remote) {
  absl::StatusOr<std::filesystem::path> worker =
      settings.groups > 0 ? ChooseWorker(settings) : std::filesystem::path();
  if (!worker.ok()) {
    return Fail(absl::IsUnavailable(worker.status()) ? kExitNoDevice : kExitBadFlags,
                std::string(worker.status().message()));
  }
  absl::StatusOr<CheckpointPrompts> prompts = CheckpointPrompts::Load(settings.model);
  if (!prompts.ok()) return Fail(kExitBadModel, std::string(prompts.status().message()));
  absl::StatusOr<ModelIdentity> files = IdentityOfFiles(settings.model, settings.draft_model);
  if (!files.ok()) return Fail(kExitBadModel, std::string(files.status().message()));
  ModelAgreement agreement(*std::move(files), settings.groups > 0 ? GroupPlace::kLocal : GroupPlace::kRemote);

  const absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> credentials =
      MakeServerCredentials({.certificate = settings.tls_cert,
                             .key = settings.tls_key,
                             .client_ca = settings.tls_client_ca,
                             .refresh_seconds = static_cast<unsigned>(settings.tls_refresh_seconds)});
  if (!credentials.ok()) return Fail(kExitBadFlags, std::string(credentials.status().message()));
  std::unique_ptr<TokenStore> tokens;
  if (!settings.token_file.empty()) {
    absl::StatusOr<std::unique_ptr<TokenStore>> opened = TokenStore::Open(settings.token_file);
    if (!opened.ok()) return Fail(kExitBadFlags, std::string(opened.status().message()));
    tokens = *std::move(opened);
    spdlog::info("{} tokens from {}", tokens->size(), settings.token_file);
  }

  Exporter exporter(settings.model_name);
  exporter.server().Gauge(metrics::kBuildInfo, {{"version", DFLASHD_VERSION}}).Set(1);
  CertificateWatch certificates(settings, &exporter);
  Dispatcher dispatcher({.queue = {.max_requests = settings.max_queued_requests,
                                   .max_prompt_tokens = settings.max_queued_tokens,
                                   .max_wait = absl::Seconds(settings.max_queue_seconds)},
                         .client = {.max_requests = settings.max_client_requests,
                                    .requests_per_second = settings.max_client_rate},
                         .replay_patience = absl::Seconds(settings.replay_seconds)},
                        &absl::Now);
  std::unique_ptr<TraceExporter> traces;
  if (!settings.otlp_endpoint.empty()) {
    absl::StatusOr<OtlpEndpoint> endpoint = ParseOtlpEndpoint(settings.otlp_endpoint);  // has been checked
    if (!endpoint.ok()) return Fail(kExitBadFlags, std::string(endpoint.status().message()));
    traces =
        std::make_unique<TraceExporter>(TraceExporter::Options{.endpoint = *std::move(endpoint),
                                                               .version = DFLASHD_VERSION,
                                                               .sample_ratio = settings.otlp_sample_ratio},
                                        &exporter.server());
  }
  InferenceService service({.model = settings.model_name,
                            .drafter_name = std::filesystem::path(settings.draft_model).filename().string(),
                            .version = DFLASHD_VERSION,
                            .tokens = tokens.get(),
                            .traces = traces.get()},
                           &dispatcher, &*prompts, &exporter);

  const ReflectionPolicy reflection = {.open = settings.reflection != "off",
                                       .tokens = settings.reflection == "auto" ? tokens.get() : nullptr};
  absl::StatusOr<std::unique_ptr<PublicServer>> server =
      PublicServer::Start(settings.listen, &service, *credentials, reflection);
  if (!server.ok())
    return Fail(kExitCannotListen, absl::StrCat("--listen: ", std::string(server.status().message())));

  std::atomic<bool> has_been_ready = false;
  std::atomic<int64_t> last_tick = absl::GetCurrentTimeNanos();  // of the Unix epoch
  Groups groups;
  exporter.SetRefresh([&] { RefreshGauges(dispatcher, groups, exporter); });
  const bool protect_metrics =
      tokens != nullptr && !settings.open_metrics && !IsLoopback(settings.ops_listen);
  absl::StatusOr<std::unique_ptr<OpsServer>> ops =
      OpsServer::Start(settings.ops_listen, [&](const OpsRequest& request) -> OpsReply {
        // Probes say nothing but state, unless they are asked for more.
        const bool tells = request.path == "/metrics" || request.path == "/version" || IsVerbose(request);
        if (tells && protect_metrics) {
          const absl::Status allowed =
              tokens->Check(request.authorization, Role::kMetrics, absl::Now()).status();
          if (!allowed.ok()) {
            return {.status = absl::IsPermissionDenied(allowed) ? 403 : 401,
                    .body = absl::StrCat(std::string(allowed.message()), "\n")};
          }
        }
        return Answer(request, dispatcher, exporter, groups, has_been_ready, absl::FromUnixNanos(last_tick));
      });
  if (!ops.ok())
    return Fail(kExitCannotListen, absl::StrCat("--ops-listen: ", std::string(ops.status().message())));

  const std::string host = settings.listen.substr(0, settings.listen.rfind(':'));
  const std::string ops_host = settings.ops_listen.substr(0, settings.ops_listen.rfind(':'));
  // Signals are blocked in every thread (main): this one takes them, and SIGUSR1 from the watcher of the
  // worker.
  const pthread_t main_thread = pthread_self();
  std::atomic<double> drain_timeout_seconds = settings.drain_seconds;
  std::unique_ptr<AdminServer> admin;
  if (!settings.admin_listen.empty()) {
    absl::StatusOr<std::unique_ptr<AdminServer>> started =
        AdminServer::Start({.address = settings.admin_listen,
                            .access = {.credentials = *credentials, .tokens = tokens.get()},
                            .reflection = reflection,
                            .drain_timeout = absl::Seconds(settings.drain_seconds),
                            .exit =
                                [&](absl::Duration timeout) {
                                  drain_timeout_seconds = absl::ToDoubleSeconds(timeout);
                                  pthread_kill(main_thread, SIGTERM);
                                }},
                           &dispatcher, &service, &exporter);
    if (!started.ok()) {
      return Fail(kExitCannotListen,
                  absl::StrCat("--admin-listen: ", std::string(started.status().message())));
    }
    admin = *std::move(started);
  }
  // Standard output is for scripts, in these two lines; people and collectors read the log.
  std::printf("dflashd: listening on %s:%d, ops on %s:%d%s%s\n", host.c_str(), (*server)->port(),
              ops_host.c_str(), (*ops)->port(), admin == nullptr ? "" : ", admin on ",
              admin == nullptr ? "" : admin->address().c_str());
  std::fflush(stdout);
  LogEvent(spdlog::level::info, "takes connections",
           {{"listen", absl::StrCat(host, ":", (*server)->port())},
            {"ops_listen", absl::StrCat(ops_host, ":", (*ops)->port())},
            {"admin_listen", admin == nullptr ? std::string() : admin->address()}});
  dispatcher.SetServingCallback([&] {
    const bool serving = dispatcher.GetStats().serving;
    (*server)->SetServing(serving);
    if (!serving || has_been_ready.exchange(true)) return;
    std::puts("dflashd: ready");
    std::fflush(stdout);
    spdlog::info("the first worker group serves");
  });

  std::atomic<int> failed_start = 0;
  for (int64_t i = 0; i < settings.groups; ++i) {
    const std::string name = absl::StrCat(i);
    absl::StatusOr<std::unique_ptr<LocalGroup>> started = LocalGroup::Start(
        {.name = name,
         .commands = WorkerCommands(*worker, settings, i),
         .build = DFLASHD_VERSION,
         .restart = {.max_delay = absl::Seconds(settings.max_restart_delay_seconds)},
         // In a group the leader notices first, and can say which rank is late.
         .load_timeout = absl::Seconds(settings.load_timeout_seconds +
                                       (settings.tp > 1 ? settings.formation_timeout_seconds : 0)),
         .silence_limit = absl::Seconds(settings.silence_timeout_seconds)},
        &agreement, &dispatcher, &exporter, [&](int code) {
          if (has_been_ready) return;  // it serves errors from now on, and says so
          failed_start = code == 0 ? static_cast<int>(kExitNoWorker) : code;
          pthread_kill(main_thread, SIGUSR1);
        });
    if (!started.ok()) return Fail(kExitNoWorker, std::string(started.status().message()));
    groups.Add(name, *std::move(started));
  }
  for (size_t i = 0; i < remote.addresses.size(); ++i) {
    const std::string name = absl::StrCat(settings.groups + static_cast<int64_t>(i));
    groups.Add(name, RemoteGroup::Start({.name = name,
                                         .address = remote.addresses[i],
                                         .build = DFLASHD_VERSION,
                                         .secret = remote.secret,
                                         .silence_limit = absl::Seconds(settings.silence_timeout_seconds),
                                         .max_delay = absl::Seconds(settings.max_restart_delay_seconds)},
                                        &agreement, &dispatcher, &exporter));
  }
  absl::Notification stop_ticking;
  std::thread ticking([&] {
    int64_t ticks = 0;
    while (!stop_ticking.WaitForNotificationWithTimeout(absl::Milliseconds(100))) {
      dispatcher.ExpireWaiting();
      service.Tick(absl::Now());
      if (++ticks % 10 == 0) {
        if (tokens != nullptr) RefreshTokens(tokens.get());
        certificates.Refresh();
      }
      last_tick = absl::GetCurrentTimeNanos();
    }
  });

  const int number = AwaitSignal();
  if (number != SIGUSR1) {
    const absl::Duration timeout = absl::Seconds(drain_timeout_seconds.load());
    spdlog::info("signal {}: draining for at most {}; a second signal ends it", number,
                 absl::FormatDuration(timeout));
    Drain(&dispatcher, &service, absl::Seconds(settings.drain_grace_seconds), timeout);
  }
  dispatcher.ShutDown();
  service.AwaitStreams(absl::Now() + absl::Seconds(2), [] { return false; });  // clients take what was said
  admin.reset();
  groups.Shutdown(absl::Seconds(10));
  if (traces != nullptr) traces->Flush(kTraceFlush);
  stop_ticking.Notify();
  ticking.join();
  ops->reset();
  if (failed_start != 0) {
    Fail(static_cast<ExitCode>(failed_start.load()),
         "the worker ended before it could serve; see its message above");
  }
  // The clients' port is open to the last moment. Were it shut down, gRPC would end calls that arrive
  // meanwhile with CANCELLED, as if their clients had wanted that. So they hear that the server is going, and
  // then their connections break, which is UNAVAILABLE: both send them elsewhere.
  std::fflush(nullptr);
  spdlog::default_logger()->flush();
  std::_Exit(failed_start);
}

// Every client is a descriptor, and who starts programs leaves them few unless they ask for more.
void RaiseDescriptorLimit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

std::map<std::string, std::string> Environment() {
  std::map<std::string, std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    const size_t equals = std::min(text.find('='), text.size());
    variables.emplace(text.substr(0, equals), text.substr(std::min(equals + 1, text.size())));
  }
  return variables;
}

int Main(int argc, char** argv) {
  absl::StatusOr<CommandLine> command_line = ReadSettings(argc, argv, Environment());
  if (!command_line.ok()) return Fail(kExitBadFlags, std::string(command_line.status().message()));
  if (command_line->text.has_value()) {
    std::fputs(command_line->text->c_str(), stdout);
    return kExitOk;
  }
  Settings& settings = command_line->settings;
  SetUpLog(kProgram, ParseLogFormat(settings.log_format), ParseLogLevel(settings.log_level));
  for (const std::string& warning : command_line->warnings) spdlog::warn("{}", warning);
  for (const auto& [name, folder] :
       {std::pair("--model", &settings.model), std::pair("--draft-model", &settings.draft_model)}) {
    std::error_code error;
    if (!folder->empty() && !std::filesystem::is_directory(*folder, error)) {
      return Fail(kExitBadModel, absl::StrCat(name, ": ", *folder, " is no folder"));
    }
  }
  if (settings.model_name.empty()) {
    settings.model_name = std::filesystem::weakly_canonical(settings.model).filename().string();
  }
  absl::StatusOr<RemoteLeaders> remote = RemoteLeadersOf(settings);
  if (!remote.ok()) return Fail(kExitBadFlags, std::string(remote.status().message()));
  return Serve(settings, *remote);
}

}  // namespace
}  // namespace dflash

int main(int argc, char** argv) {
  sigset_t blocked;
  sigemptyset(&blocked);
  for (int number : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&blocked, number);
  pthread_sigmask(SIG_BLOCK, &blocked, nullptr);  // before any thread exists
  // A write that fails says so; a log that may not grow is no reason to end.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  dflash::RaiseDescriptorLimit();
  dflash::SetUpLog(dflash::kProgram,
                   dflash::ParseLogFormat(dflash::EarlyLogFormat(argc, argv, dflash::Environment())),
                   spdlog::level::info);
  dflash::EndOnUncaughtExceptions(dflash::kExitNoWorker);
  dflash::TakeGrpcLog();
  return dflash::Main(argc, argv);
}
