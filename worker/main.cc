// dflash-worker: one rank of a worker group. All ranks join before they load their shares of the model. Rank
// 0 is the group's leader: it runs the engine on the main thread and answers the coordinator; the others
// carry out its plans. A group lives and dies as one: a rank that can no longer be sure of the others ends
// itself.
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/exit_codes.h"
#include "base/flag_parser.h"
#include "base/group_secret.h"
#include "base/grpc_log.h"
#include "base/host_limits.h"
#include "base/log.h"
#include "base/status.h"
#include "kernels/device/stream.h"
#include "spdlog/spdlog.h"
#include "worker/defects/defects.h"
#include "worker/fault_observer.h"
#include "worker/launcher.h"
#include "worker/load_group.h"
#include "worker/membership.h"
#include "worker/rank/follower.h"
#include "worker/rank/leader.h"
#include "worker/rpc/engine_metrics.h"
#include "worker/rpc/worker_server.h"
#include "worker/self_test/self_test.h"

namespace dflash {
namespace {

constexpr char kProgram[] = "dflash-worker";

struct Flags {
  GroupOptions group;
  std::string listen;
  std::string speculation = "dflash";
  std::string block_length = "by-load";
  std::string self_test = "auto";
  std::string golden;
  int64_t threads = 0;
  std::string instruction_set = "auto";
  int64_t device = 0;
  std::optional<int64_t> random_weights;
  std::optional<int64_t> prefix_checkpoints;
  bool probe = false;
  MembershipOptions membership;
  int64_t rank = 0;
  int64_t ranks = 1;
  int64_t epoch = 1;
  int64_t rank_timeout_seconds = 60;
  int64_t silence_timeout_seconds = 5;
  int64_t formation_timeout_seconds = 60;
  int64_t load_timeout_seconds = 600;
  std::string secret_file;
  bool launch = false;
  bool share_device = false;
  int64_t hosts = 1;
  int64_t host_index = 0;
  int64_t max_restart_delay_seconds = 60;
  std::string draft_placement = "rank0";
  std::string log_format = "text", log_level = "info";
};

FlagParser MakeParser(Flags& flags) {
  FlagParser parser(kProgram,
                    "One rank of a dflashd worker group, started by dflashd; with --launch: starts the ranks "
                    "of this host for a\n"
                    "dflashd on another one (dflashd --connect).");
  parser.Text("model", "DIR", "folder of the target's checkpoint", &flags.group.model);
  parser.Text("draft-model", "DIR", "folder of the drafter's checkpoint; empty: no drafter",
              &flags.group.draft_model);
  parser.AddressOrSocket("listen", "unix:PATH or HOST:PORT for the coordinator", &flags.listen);
  parser.Choice("speculation", {"dflash", "off"}, "what requests get that do not choose", &flags.speculation);
  parser.Choice(
      "self-test", {"auto", "off", "warn"},
      "golden prompts through the engine before it serves; auto: if there is a golden bundle, and no "
      "speculation\nwhere they fail; warn: speculation all the same",
      &flags.self_test);
  parser.Text("golden", "DIR", "golden bundle for --self-test; default: DRAFT-MODEL/golden, if there is one",
              &flags.golden);
  parser.Integer("threads", "N", "CPU threads; 0: one per core that it may use", 0, 256, &flags.threads);
  parser.Choice("instruction-set", {"auto", "scalar", "avx2", "avx512"},
                "instructions of the CPU backend; auto: the best that this machine has",
                &flags.instruction_set);
  parser.Integer("device", "N", "CUDA device ordinal", 0, 1023, &flags.device);
  parser.Integer("max-sequences", "N", "requests that run at a time", 1, 1024, &flags.group.max_sequences);
  parser.Integer("max-context-tokens", "N", "prompt and output of one request; 0: what the target allows", 0,
                 int64_t{1} << 30, &flags.group.max_context_tokens);
  parser.Integer("cache-tokens", "N", "tokens in the paged caches; 0: max-sequences whole contexts", 0,
                 int64_t{1} << 40, &flags.group.cache_tokens);
  parser.Number("memory-fraction", "X",
                "share of the device's memory for this worker in all; without --cache-tokens the caches take "
                "what is left of it. 0: not said",
                0, 1, &flags.group.memory_fraction);
  parser.IntegerOrZero("max-prefill-tokens", "N",
                       "prompt tokens in one step, at least 64; 0: what suits the backend", 64, 65536,
                       &flags.group.max_prefill_tokens);
  parser.Choice(
      "block-length", {"by-load", "whole"},
      "by-load: a round verifies as many drafts as give most tokens a second, whole: all of a block",
      &flags.block_length);
  parser.Integer("max-verify-rows", "N",
                 "anchors and drafts in one step above which blocks get shorter in any case; 0: no limit", 0,
                 65536, &flags.group.max_verify_rows);
  parser.Integer(
      "prefix-checkpoints", "N",
      "copies of recurrent states that the prefix cache keeps; 0: no prefix cache. Default: two for "
      "each of max-sequences, at most 32",
      0, 1 << 20, &flags.prefix_checkpoints);
  parser.Switch("allow-unlisted-config-keys",
                "accept keys of config.json that docs/config-keys.md does not list",
                &flags.group.allow_unlisted_keys);
  parser.Integer(
      "random-weights", "SEED",
      "make the weights of --model and --draft-model from a seed: folders with config.json and no weights", 0,
      int64_t{1} << 62, &flags.random_weights);
  parser.Text("inject-defect", "NAME", "plant a known integration defect (test builds only)",
              &flags.group.defect);
  parser.Integer("tp", "N", "tensor-parallel ranks of the group", 1, 8, &flags.ranks);
  parser.Integer("rank", "R", "which of them this is; 0 leads", 0, 7, &flags.rank);
  parser.Text("group-socket", "ADDRESS", "unix:PATH or tcp:HOST:PORT of the leader's rank channel",
              &flags.membership.channel.address);
  parser.Text("group-id", "NAME", "what all ranks of a group are told alike",
              &flags.membership.channel.group_id);
  parser.Integer("epoch", "N", "which life of the group this is; 0: whatever the leader says", 0,
                 int64_t{1} << 60, &flags.epoch);
  parser.Text("group-secret-file", "FILE", "its first line is the secret of the group; needed over TCP",
              &flags.secret_file);
  parser.Choice("communicator", {"auto", "host", "nccl"},
                "how ranks exchange data; auto: nccl with CUDA, host (shared memory) without",
                &flags.membership.communicator);
  parser.Choice(
      "all-reduce", {"auto", "peer", "communicator"},
      "how few rows are summed over the ranks: in one step through memory that all ranks reach, or by the\n"
      "communicator; auto: peer where devices reach each other and none is shared",
      &flags.membership.all_reduce);
  parser.Choice("draft-placement", {"rank0", "sharded"}, "which ranks run the drafter",
                &flags.draft_placement);
  parser.Integer("formation-timeout", "SECONDS", "until all ranks have joined", 1, 3600,
                 &flags.formation_timeout_seconds);
  parser.Integer("rank-timeout", "SECONDS", "of a collective, and of a plan without progress", 1, 3600,
                 &flags.rank_timeout_seconds);
  parser.Integer("load-timeout", "SECONDS", "until all ranks have loaded", 1, 86400,
                 &flags.load_timeout_seconds);
  parser.Integer("silence-timeout", "SECONDS",
                 "after which the coordinator, or a rank, that says nothing counts as dead", 1, 3600,
                 &flags.silence_timeout_seconds);
  parser.Switch("launch", "start and watch this host's ranks of a group; other flags go on to them",
                &flags.launch);
  parser.Integer("hosts", "N", "with --launch: hosts that the group is spread over", 1, 8, &flags.hosts);
  parser.Integer("host-index", "I", "with --launch: which of them this is; 0 has the leader", 0, 7,
                 &flags.host_index);
  parser.Switch("share-device", "with --launch: all ranks of this host use one GPU (tests)",
                &flags.share_device);
  parser.Integer("max-restart-delay", "SECONDS",
                 "with --launch: longest wait before lost ranks are started again", 1, 3600,
                 &flags.max_restart_delay_seconds);
  parser.Choice("log-format", {"text", "json"}, "of the log on standard error", &flags.log_format);
  parser.Choice("log-level", {"debug", "info", "warn", "error"}, "least that is logged", &flags.log_level);
  parser.Switch("probe", "only tell whether this backend finds its device", &flags.probe);
  return parser;
}

// The engine as the service sees it.
class EngineBackend final : public GenerationBackend {
 public:
  explicit EngineBackend(Engine* engine) : engine_(engine) {}
  void Submit(GenerationRequest request, std::unique_ptr<RequestSink> sink) override {
    engine_->Submit(std::move(request), std::move(sink));
  }
  void Cancel(const std::string& id, absl::Status reason) override { engine_->Cancel(id, std::move(reason)); }
  EngineGauges Gauges() const override { return engine_->Gauges(); }

 private:
  Engine* engine_;
};

std::string JoinTaps(const FeatureContract& contract) {
  return absl::StrJoin(contract.taps, ",",
                       [](std::string* out, LayerIndex tap) { absl::StrAppend(out, Number(tap)); });
}

std::string JoinMasks(const FeatureContract& contract) {
  return absl::StrJoin(contract.layers, ",", [](std::string* out, const DraftLayerMask& mask) {
    absl::StrAppend(out, mask.causal ? "causal" : "bidirectional");
    if (mask.window > 0) absl::StrAppend(out, ":", mask.window);
  });
}

EngineMetrics::Options MetricsOptions(const Group& group, bool speculate) {
  EngineMetrics::Options options;
  options.backend = BackendName();
  options.speculate_by_default = speculate;
  for (const MemoryPool& pool : group.memory.pools) options.memory_bytes[pool.kind] += pool.bytes;
  if (group.drafter == nullptr) return options;
  options.max_drafts = group.drafter->max_drafts();
  options.config = {{"method", "dflash"},
                    {"block_size", absl::StrCat(group.contract.block_size)},
                    {"taps", JoinTaps(group.contract)},
                    {"draft_layers", JoinMasks(group.contract)},
                    {"mask_token_id", absl::StrCat(group.contract.mask_token_id)},
                    {"target_revision", group.contract.target_revision},
                    {"drafter_revision", group.contract.drafter_revision},
                    {"contract", group.contract.ToLine()}};
  return options;
}

GroupIdentity Identity(const Group& group, bool speculate) {
  GroupIdentity identity;
  identity.ranks = group.target->communicator().size();
  identity.build = DFLASHD_VERSION;
  identity.backend = BackendName();
  if (group.drafter != nullptr) {
    identity.feature_contract = group.contract.ToLine();
    identity.dflash_block_size = group.contract.block_size;
  }
  identity.model = group.model;
  identity.fingerprints = group.fingerprints;
  identity.vocabulary_size = group.vocabulary;
  identity.max_context_tokens = group.max_context_tokens;
  identity.max_sequences = group.table->slots();
  // In both backends a verify row has the same bits in any company, whatever the step's size
  // (worker/engine/state_test.cc, kernels/linear/linear_cuda_test.cc): so up to as many rows as there can be.
  identity.same_text_rows =
      group.table->slots() * (1 + (group.drafter == nullptr ? 0 : group.drafter->max_drafts()));
  // Sums whose order depends on their size take that away.
  if (!group.target->communicator().sums_in_rank_order()) identity.same_text_rows = 0;
  identity.speculate_by_default = speculate;
  identity.eos_token_ids = group.generation.eos_token_ids;
  identity.default_temperature =
      group.generation.do_sample ? static_cast<float>(group.generation.temperature) : 0.0f;
  identity.default_top_k = static_cast<int32_t>(group.generation.top_k);
  identity.default_top_p = static_cast<float>(group.generation.top_p);
  identity.default_min_p = static_cast<float>(group.generation.min_p);
  return identity;
}

int Fail(ExitCode code, const absl::Status& status) {
  spdlog::error("{}", std::string(status.message()));
  return code;
}

bool IsUnixAddress(const std::string& address) { return address.rfind("unix:", 0) == 0; }

// What all ranks must have in common beyond the command line, in one line.
RankReady Readiness(const Group& group) {
  RankReady ready;
  if (!group.contract.taps.empty()) ready.feature_contract = group.contract.ToLine();
  ready.configuration =
      absl::StrCat("target=", group.model.target_revision, " drafter=", group.model.drafter_revision,
                   " vocabulary=", group.vocabulary, " context=", group.max_context_tokens,
                   " slots=", group.table->slots(), " pages=", group.table->pages());
  ready.bytes_read = group.bytes_read;
  return ready;
}

// Takes SIGTERM and SIGINT, which are blocked in every thread (main), until it goes out of scope. Until it is
// told what to do with them they end the process: a rank that waits for others, or loads, has nothing to end
// in order.
class SignalThread {
 public:
  SignalThread() : thread_([this] { Run(); }) {}
  ~SignalThread() {
    pthread_kill(thread_.native_handle(), SIGUSR1);
    thread_.join();
  }
  // No earlier action runs any more when this returns.
  void SetAction(std::function<void()> action) {
    absl::MutexLock lock(&mutex_);
    action_ = std::move(action);
  }

 private:
  void Run() {
    sigset_t set;
    sigemptyset(&set);
    for (int number : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&set, number);
    for (;;) {
      int number = 0;
      sigwait(&set, &number);
      if (number == SIGUSR1) return;
      absl::MutexLock lock(&mutex_);
      action_();
    }
  }

  absl::Mutex mutex_;
  std::function<void()> action_ ABSL_GUARDED_BY(mutex_) = [] {
    spdlog::info("ended by a signal before it served");
    spdlog::default_logger()->flush();
    _exit(kExitOk);
  };
  std::thread thread_;  // the last: it uses the others
};

// What the self-test is run with, or why it is not.
struct SelfTestBundle {
  std::optional<golden::GoldenBundle> bundle;
  std::string none_because;
};

absl::StatusOr<SelfTestBundle> BundleForSelfTest(const Flags& flags) {
  const auto none = [](std::string why) {
    return SelfTestBundle{.bundle = std::nullopt, .none_because = std::move(why)};
  };
  std::string folder = flags.golden;
  if (flags.self_test == "off") return none("--self-test off");
  if (flags.group.draft_model.empty()) return none("there is no drafter");
  if (folder.empty()) {
    folder = flags.group.draft_model + "/golden";
    std::error_code error;
    if (!std::filesystem::exists(folder + "/bundle.json", error) && !error)
      return none("no golden bundle was given (--golden), and none lies beside the drafter");
  }
  absl::StatusOr<golden::GoldenBundle> bundle = golden::GoldenBundle::Open(folder);
  if (!bundle.ok() && flags.self_test == "warn") {
    spdlog::error("SELF-TEST NOT RUN: {}", std::string(bundle.status().message()));
    return none(absl::StrCat("the golden bundle cannot be read: ", bundle.status().message()));
  }
  DFLASH_RETURN_IF_ERROR(bundle.status());
  return SelfTestBundle{.bundle = *std::move(bundle), .none_because = {}};
}

// A bundle that does not fit this pair is a failed test: it was given to be passed.
absl::StatusOr<SelfTestReport> RunSelfTestOf(const Flags& flags, const golden::GoldenBundle& bundle,
                                             const Group& group, Engine* engine) {
  DFLASH_ASSIGN_OR_RETURN(
      const TargetConfig config,
      TargetConfig::Load(flags.group.model, {.allow_unlisted_keys = flags.group.allow_unlisted_keys}));
  const auto test = [&]() -> absl::StatusOr<SelfTestReport> {
    DFLASH_RETURN_IF_ERROR(bundle.CheckFits(golden::SizesOf(config)));
    return RunSelfTest(bundle, group.contract, {.stop_token_ids = group.generation.eos_token_ids}, engine);
  };
  absl::StatusOr<SelfTestReport> report = test();
  if (absl::IsInvalidArgument(report.status())) {
    return SelfTestReport{
        .passed = false,
        .detail = absl::StrCat("the golden bundle does not fit: ", report.status().message())};
  }
  return report;
}

// Runs the self-test, if there is one to run. A failed one takes speculation from the engine unless
// overridden, and says so everywhere: log, metric, status.
absl::Status TestItself(const Flags& flags, const SelfTestBundle& with, const Group& group, Engine* engine,
                        EngineMetrics* metrics, GroupIdentity* identity) {
  const std::optional<golden::GoldenBundle>& bundle = with.bundle;
  SelfTestResult result = SelfTestResult::kSkipped;
  if (!bundle.has_value()) {
    identity->self_test_detail = with.none_because;
  } else {
    metrics->Mute();
    DFLASH_ASSIGN_OR_RETURN(const SelfTestReport report, RunSelfTestOf(flags, *bundle, group, engine));
    metrics->Unmute();
    identity->self_test_detail = report.detail;
    const bool overrides = flags.self_test == "warn";
    result = report.passed ? SelfTestResult::kPassed
             : overrides   ? SelfTestResult::kOverridden
                           : SelfTestResult::kFailed;
    if (report.passed) {
      spdlog::info("self-test passed: {}", report.detail);
    } else {
      spdlog::error("SELF-TEST FAILED: {}", report.detail);
      spdlog::error(
          "{} Which interface is to blame: dflashctl doctor --model {} --draft-model {} --golden {}",
          overrides ? "It drafts all the same (--self-test warn)."
                    : "No request is drafted for: the text is right, but slow (--self-test warn drafts).",
          flags.group.model, flags.group.draft_model, bundle->folder());
    }
  }
  identity->self_test = Name(result);
  metrics->SetSelfTest(result);
  if (result != SelfTestResult::kFailed) return absl::OkStatus();
  engine->RefuseSpeculation("self_test_failed");
  identity->dflash_block_size = 0;
  identity->speculate_by_default = false;
  return absl::OkStatus();
}

// A line of LoadGroup.
void LogFinding(const std::string& line) {
  constexpr std::string_view kWarning = "warning: ";
  if (line.starts_with(kWarning)) {
    spdlog::warn("{}", line.substr(kWarning.size()));
  } else {
    spdlog::info("{}", line);
  }
}

// Rank 0: loads, then runs the engine until the coordinator or a signal ends it.
int Lead(const Flags& flags, Membership& membership, SignalThread& signals) {
  const absl::Time load_deadline = absl::Now() + absl::Seconds(flags.load_timeout_seconds);
  const absl::StatusOr<SelfTestBundle> bundle = BundleForSelfTest(flags);
  if (!bundle.ok()) return Fail(kExitBadModel, bundle.status());
  absl::StatusOr<Group> group = LoadGroup(flags.group, LogFinding);
  if (!group.ok()) {
    return Fail(absl::IsUnavailable(group.status()) ? kExitNoDevice : kExitBadModel, group.status());
  }
  std::unique_ptr<RankLeader> ranks;
  if (membership.hub != nullptr) {
    const absl::Status ready = membership.hub->AwaitReady(Readiness(*group), load_deadline);
    if (!ready.ok()) return Fail(absl::IsFailedPrecondition(ready) ? kExitBadModel : kExitRankLost, ready);
    ranks = std::make_unique<RankLeader>(membership.hub.get());
  }
  const bool speculate = group->drafter != nullptr && flags.speculation == "dflash";
  EngineMetrics metrics(MetricsOptions(*group, speculate));
  FaultObserver observer(&metrics, &absl::Now, [](const std::string& line) { spdlog::warn("{}", line); });
  absl::StatusOr<std::unique_ptr<Engine>> engine =
      group->MakeEngine(flags.group.max_prefill_tokens, &observer, ranks.get());
  if (!engine.ok()) return Fail(kExitBadModel, engine.status());
  GroupIdentity identity = Identity(*group, speculate);
  metrics.Mute();
  const absl::Status computes = CheckTargetComputes(engine->get());
  metrics.Unmute();
  if (!computes.ok()) {
    return Fail(ReasonOf(computes) == "NUMERIC_FAULT" ? kExitBadModel : kExitEngineFailed, computes);
  }
  const absl::Status tested = TestItself(flags, *bundle, *group, engine->get(), &metrics, &identity);
  if (!tested.ok()) return Fail(kExitEngineFailed, Annotate(tested, "SELF-TEST FAILED"));
  EngineBackend backend(engine->get());

  std::atomic<bool> coordinator_lost = false;
  absl::StatusOr<std::unique_ptr<WorkerServer>> server =
      WorkerServer::Start({.listen = flags.listen,
                           .identity = std::move(identity),
                           .secret = IsUnixAddress(flags.listen) ? "" : flags.membership.channel.secret,
                           .silence_limit = absl::Seconds(flags.silence_timeout_seconds)},
                          &backend, &metrics, [&](const absl::Status& status) {
                            if (!status.ok()) {
                              spdlog::error("{}", std::string(status.message()));
                              coordinator_lost = true;
                            }
                            (*engine)->Stop();
                          });
  if (!server.ok()) return Fail(kExitCannotListen, server.status());
  signals.SetAction([&] { (*engine)->Stop(); });
  spdlog::info("loaded; waits for the coordinator on {}", flags.listen);
  const absl::Status ended = (*engine)->Run();
  signals.SetAction([] {});  // it ends already
  server->reset();
  if (membership.hub != nullptr) membership.hub->End(ended);
  if (!ended.ok()) return Fail(kExitEngineFailed, ended);
  return coordinator_lost ? kExitCoordinatorLost : kExitOk;
}

// Longer than the leader takes from one round to the next.
constexpr absl::Duration kPlanPatience = absl::Milliseconds(50);

// Any other rank: loads its share, then carries out plans until the leader ends the group.
int Follow(const Flags& flags, Membership& membership, SignalThread& signals) {
  const auto give_up = [&](ExitCode code, const absl::Status& status) {
    membership.link->Abort(status);
    return Fail(code, status);
  };
  absl::StatusOr<Group> group = LoadGroup(flags.group, LogFinding);
  if (!group.ok())
    return give_up(absl::IsUnavailable(group.status()) ? kExitNoDevice : kExitBadModel, group.status());
  absl::StatusOr<std::unique_ptr<RankFollower>> follower = group->MakeFollower();
  if (!follower.ok()) return give_up(kExitNoDevice, follower.status());
  if (absl::Status sent = membership.link->SendReady(Readiness(*group)); !sent.ok())
    return Fail(kExitRankLost, sent);
  if (absl::Status warm = (*follower)->WarmUp(Group::kWarmSequences); !warm.ok())
    return give_up(kExitEngineFailed, warm);
  signals.SetAction([] {});  // from now on the leader ends the group
  for (;;) {
    // The leader has nothing more to do for now: what still runs is waited for here.
    if ((*follower)->has_rounds_in_flight() && !membership.link->AwaitPlan(kPlanPatience)) {
      if (absl::Status ended = (*follower)->Finish(); !ended.ok()) return give_up(kExitEngineFailed, ended);
      membership.link->SetFinished((*follower)->last_plan());
    }
    absl::StatusOr<std::optional<RankPlan>> plan = membership.link->NextPlan();
    if (!plan.ok()) return Fail(kExitRankLost, plan.status());
    if (!plan->has_value()) return kExitOk;
    if (absl::Status ran = (*follower)->Run(**plan); !ran.ok()) return give_up(kExitEngineFailed, ran);
    membership.link->SetFinished((*follower)->last_plan());
  }
}

int Serve(Flags& flags) {
  const RankChannelOptions& channel = flags.membership.channel;
  SignalThread signals;
  if (channel.size > 1)
    spdlog::info("rank {} of {} waits for the others at {}", flags.rank, channel.size, channel.address);
  // Ranks have nothing to save: one that lost the others ends at once, whatever its threads wait for, and
  // whoever supervises the group starts it again.
  absl::StatusOr<Membership> membership =
      JoinGroup(flags.membership, flags.group.device, [](const absl::Status& fault) {
        spdlog::error("the group is lost: {}", std::string(fault.message()));
        spdlog::default_logger()->flush();
        _exit(kExitRankLost);
      });
  if (!membership.ok()) return Fail(kExitRankLost, membership.status());
  if (channel.size > 1) {
    spdlog::info("rank {} of {}, epoch {}, communicator {}", flags.rank, channel.size, channel.epoch,
                 membership->communicator->name());
    if (!membership->note.empty()) spdlog::info("{}", membership->note);
  }
  flags.group.communicator = membership->communicator.get();
  return flags.rank == 0 ? Lead(flags, *membership, signals) : Follow(flags, *membership, signals);
}

// The flags that make this process a rank, from text to what JoinGroup takes.
absl::Status FinishRankFlags(Flags& flags) {
  RankChannelOptions& channel = flags.membership.channel;
  channel.size = static_cast<int>(flags.ranks);
  channel.epoch = static_cast<uint64_t>(flags.epoch);
  channel.build = DFLASHD_VERSION;
  channel.formation_timeout = absl::Seconds(flags.formation_timeout_seconds);
  channel.silence_limit = absl::Seconds(flags.silence_timeout_seconds);
  channel.plan_timeout = absl::Seconds(flags.rank_timeout_seconds);
  flags.membership.rank = static_cast<int>(flags.rank);
  flags.group.drafter_digests = flags.rank == 0;
  flags.membership.collective_timeout = absl::Seconds(flags.rank_timeout_seconds);
  flags.group.draft_placement =
      flags.draft_placement == "sharded" ? DraftPlacement::kSharded : DraftPlacement::kRankZero;
  flags.group.adaptive_blocks = flags.block_length == "by-load";
  flags.group.checkpoints =
      flags.prefix_checkpoints.value_or(std::min<int64_t>(2 * flags.group.max_sequences, 32));
  // What decides about shapes and control flow; paths may differ between hosts.
  const GroupOptions& group = flags.group;
  channel.options =
      absl::StrCat("drafter=", !group.draft_model.empty(), " placement=", flags.draft_placement,
                   " sequences=", group.max_sequences, " context=", group.max_context_tokens,
                   " cache=", group.cache_tokens, " prefill=", group.max_prefill_tokens,
                   " fraction=", group.memory_fraction, " checkpoints=", group.checkpoints,
                   " random=", group.random_weights.has_value() ? absl::StrCat(*group.random_weights) : "no",
                   " defect=", group.defect, " communicator=", flags.membership.communicator,
                   " all-reduce=", flags.membership.all_reduce);
  if (flags.rank >= flags.ranks)
    return absl::InvalidArgumentError(absl::StrCat("--rank ", flags.rank, " of --tp ", flags.ranks));
  if (flags.ranks > 1 && channel.address.empty())
    return absl::InvalidArgumentError("--tp above 1 needs --group-socket");
  if (flags.rank == 0 && flags.listen.empty()) return absl::InvalidArgumentError("--listen is required");
  if (flags.rank == 0 && !IsUnixAddress(flags.listen) && channel.secret.empty())
    return absl::InvalidArgumentError("--listen over TCP needs --group-secret-file");
  // The ranks of a group usually share a host.
  if (flags.group.threads == 0 && flags.ranks > 1) {
    flags.group.threads = static_cast<int>(std::clamp<int64_t>(AvailableCores() / flags.ranks, 1, 256));
  }
  return absl::OkStatus();
}

// The command line of a rank: this one's, without what the launcher says itself.
std::vector<std::string> RankCommand(int argc, char** argv) {
  static const std::set<std::string> kWithValue = {
      "--tp", "--hosts", "--host-index", "--listen", "--device", "--group-socket", "--max-restart-delay"};
  static const std::set<std::string> kSwitches = {"--launch", "--share-device"};
  std::error_code error;
  std::vector<std::string> command = {std::filesystem::read_symlink("/proc/self/exe", error).string()};
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const std::string name = word.substr(0, word.find('='));
    if (kSwitches.count(name) > 0) continue;
    if (kWithValue.count(name) == 0) {
      command.push_back(word);
    } else if (name == word) {
      ++i;  // its value
    }
  }
  return command;
}

int LaunchRanks(const Flags& flags, const FlagParser& parser, int argc, char** argv) {
  const RankChannelOptions& channel = flags.membership.channel;
  for (const char* name : {"rank", "epoch", "group-id", "device"}) {
    if (parser.Given(name))
      return Fail(kExitBadFlags,
                  absl::InvalidArgumentError(absl::StrCat("--", name, " is the launcher's to say")));
  }
  std::string wrong;
  if (flags.ranks % flags.hosts != 0) {
    wrong = absl::StrCat("--tp ", flags.ranks, " does not divide by --hosts ", flags.hosts);
  } else if (flags.host_index >= flags.hosts) {
    wrong = absl::StrCat("--host-index ", flags.host_index, " of --hosts ", flags.hosts);
  } else if (flags.hosts > 1 && channel.address.rfind("tcp:", 0) != 0) {
    wrong =
        "--hosts above 1 needs --group-socket tcp:HOST:PORT, the same for all: where the leader's host "
        "listens";
  } else if (flags.hosts > 1 && channel.secret.empty()) {
    wrong = "--hosts above 1 needs --group-secret-file";
  } else if (flags.host_index == 0 && flags.listen.empty()) {
    wrong = "--listen is required";
  }
  if (!wrong.empty()) return Fail(kExitBadFlags, absl::InvalidArgumentError(wrong));
  absl::StatusOr<int> code = Launch({.command = RankCommand(argc, argv),
                                     .ranks = static_cast<int>(flags.ranks),
                                     .hosts = static_cast<int>(flags.hosts),
                                     .host_index = static_cast<int>(flags.host_index),
                                     .share_device = flags.share_device,
                                     .group_socket = channel.address,
                                     .listen = flags.listen,
                                     .max_delay = absl::Seconds(flags.max_restart_delay_seconds)});
  if (!code.ok()) return Fail(kExitEngineFailed, code.status());
  return *code;
}

int Main(int argc, char** argv) {
  Flags flags;
  FlagParser parser = MakeParser(flags);
  FlagParser::Outcome outcome = FlagParser::Outcome::kRun;
  if (absl::Status status = parser.Parse(argc, argv, &outcome); !status.ok())
    return Fail(kExitBadFlags, status);
  if (outcome == FlagParser::Outcome::kHelp) {
    std::fputs(parser.Help().c_str(), stdout);
    return kExitOk;
  }
  if (outcome == FlagParser::Outcome::kVersion) {
    std::puts("dflash-worker " DFLASHD_VERSION);
    return kExitOk;
  }
  SetUpLog(kProgram, ParseLogFormat(flags.log_format), ParseLogLevel(flags.log_level));
  if (absl::Status status = SelectInstructionSet(flags.instruction_set); !status.ok()) {
    return Fail(kExitBadFlags,
                absl::InvalidArgumentError(absl::StrCat("--instruction-set: ", status.message())));
  }
  flags.group.threads = static_cast<int>(flags.threads);
  flags.group.device = static_cast<int>(flags.device);
  if (flags.random_weights) flags.group.random_weights = static_cast<uint64_t>(*flags.random_weights);
  if (flags.probe) {
    const absl::Status status = Stream::Create({.threads = 1, .device = flags.group.device}).status();
    if (!status.ok()) return Fail(kExitNoDevice, status);
    spdlog::info("there is a device for backend {}", BackendName());
    return kExitOk;
  }
  if (flags.group.model.empty())
    return Fail(kExitBadFlags, absl::InvalidArgumentError("--model is required"));
  const std::vector<std::string> defects = DefectNames();
  if (!flags.group.defect.empty() &&
      std::find(defects.begin(), defects.end(), flags.group.defect) == defects.end()) {
    return Fail(
        kExitBadFlags,
        absl::InvalidArgumentError(absl::StrCat(
            "--inject-defect: ", defects.empty() ? "only in builds of the preset `defects`" : "unknown: ",
            defects.empty() ? "" : flags.group.defect)));
  }
  // A worker gets tokens: it would plant nothing.
  if (flags.group.defect == "thinking-flag")
    return Fail(kExitBadFlags,
                absl::InvalidArgumentError("--inject-defect: thinking-flag is one of the prompt, which "
                                           "no worker renders; only dflash-doctor plants it"));
  if (!flags.secret_file.empty()) {
    absl::StatusOr<std::string> secret = ReadGroupSecret(flags.secret_file);
    if (!secret.ok()) return Fail(kExitBadFlags, secret.status());
    flags.membership.channel.secret = *std::move(secret);
  }
  if (flags.launch) return LaunchRanks(flags, parser, argc, argv);
  if (absl::Status status = FinishRankFlags(flags); !status.ok()) return Fail(kExitBadFlags, status);
  return Serve(flags);
}

}  // namespace
}  // namespace dflash

int main(int argc, char** argv) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a worker never outlives the process that started it
  sigset_t blocked;
  sigemptyset(&blocked);
  for (int number : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&blocked, number);
  pthread_sigmask(SIG_BLOCK, &blocked, nullptr);  // before any thread exists
  // A log that nobody reads any more, or that may not grow, is no reason to end.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  dflash::SetUpLog(dflash::kProgram,
                   dflash::ParseLogFormat(dflash::EarlyValue(argc, argv, "log-format").value_or("")),
                   spdlog::level::info);
  dflash::EndOnUncaughtExceptions(dflash::kExitEngineFailed);
  dflash::TakeGrpcLog();
  return dflash::Main(argc, argv);
}
