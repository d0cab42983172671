// dflash-worker: one rank of a worker group. Rank 0, the only one so far, is the group's leader: it loads
// target and drafter, runs the engine on the main thread and answers the coordinator.
#include <sys/prctl.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/flag_parser.h"
#include "kernels/device/stream.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"
#include "worker/load_group.h"
#include "worker/rpc/engine_metrics.h"
#include "worker/rpc/worker_server.h"

namespace dflash {
namespace {

// What the exit status tells the coordinator.
enum ExitCode : int {
  kExitOk = 0,
  kExitBadFlags = 64,
  kExitBadModel = 65,
  kExitNoDevice = 69,
  kExitCannotListen = 74,
  kExitEngineFailed = 75,
  kExitCoordinatorLost = 77,
};

struct Flags {
  GroupOptions group;
  std::string listen;
  std::string speculation = "dflash";
  int64_t threads = 0;
  std::string instruction_set = "auto";
  int64_t device = 0;
  std::optional<int64_t> random_weights;
  bool probe = false;
};

FlagParser MakeParser(Flags& flags) {
  FlagParser parser("dflash-worker", "One rank of a dflashd worker group. Started by dflashd.");
  parser.Text("model", "DIR", "folder of the target's checkpoint", &flags.group.model);
  parser.Text("draft-model", "DIR", "folder of the drafter's checkpoint; empty: no drafter",
              &flags.group.draft_model);
  parser.Text("listen", "ADDRESS", "unix:PATH or HOST:PORT for the coordinator", &flags.listen);
  parser.Choice("speculation", {"dflash", "off"}, "what requests get that do not choose", &flags.speculation);
  parser.Integer("threads", "N", "CPU threads; 0: one per core", 0, 256, &flags.threads);
  parser.Choice("instruction-set", {"auto", "scalar", "avx2", "avx512"},
                "instructions of the CPU backend; auto: the best that this machine has",
                &flags.instruction_set);
  parser.Integer("device", "N", "CUDA device ordinal", 0, 1023, &flags.device);
  parser.Integer("max-sequences", "N", "requests that run at a time", 1, 1024, &flags.group.max_sequences);
  parser.Integer("max-context-tokens", "N", "prompt and output of one request; 0: what the target allows", 0,
                 int64_t{1} << 30, &flags.group.max_context_tokens);
  parser.Integer("cache-tokens", "N", "tokens in the paged caches; 0: max-sequences whole contexts", 0,
                 int64_t{1} << 40, &flags.group.cache_tokens);
  parser.Integer("max-prefill-tokens", "N", "prompt tokens in one step", 64, 65536,
                 &flags.group.max_prefill_tokens);
  parser.Switch("allow-unlisted-config-keys",
                "accept keys of config.json that docs/config-keys.md does not list",
                &flags.group.allow_unlisted_keys);
  parser.Integer(
      "random-weights", "SEED",
      "make the weights of --model and --draft-model from a seed: folders with config.json and no weights", 0,
      int64_t{1} << 62, &flags.random_weights);
  parser.Text("inject-defect", "NAME", "plant a known integration defect (test builds only)",
              &flags.group.defect);
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
  identity.build = DFLASHD_VERSION;
  identity.backend = BackendName();
  if (group.drafter != nullptr) {
    identity.feature_contract = group.contract.ToLine();
    identity.dflash_block_size = group.contract.block_size;
  }
  identity.vocabulary_size = group.vocabulary;
  identity.max_context_tokens = group.max_context_tokens;
  identity.max_sequences = group.table->slots();
  // In both backends a verify row has the same bits in any company, whatever the step's size
  // (worker/engine/state_test.cc, kernels/linear/linear_cuda_test.cc): so up to as many rows as there can be.
  identity.same_text_rows =
      group.table->slots() * (1 + (group.drafter == nullptr ? 0 : group.drafter->max_drafts()));
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

int Serve(const Flags& flags) {
  absl::StatusOr<Group> group =
      LoadGroup(flags.group, [](const std::string& line) { spdlog::info("{}", line); });
  if (!group.ok()) {
    return Fail(absl::IsUnavailable(group.status()) ? kExitNoDevice : kExitBadModel, group.status());
  }
  const bool speculate = group->drafter != nullptr && flags.speculation == "dflash";
  EngineMetrics metrics(MetricsOptions(*group, speculate));
  absl::StatusOr<std::unique_ptr<Engine>> engine =
      group->MakeEngine(flags.group.max_prefill_tokens, &metrics);
  if (!engine.ok()) return Fail(kExitBadModel, engine.status());
  EngineBackend backend(engine->get());

  std::atomic<bool> coordinator_lost = false;
  absl::StatusOr<std::unique_ptr<WorkerServer>> server =
      WorkerServer::Start({.listen = flags.listen, .identity = Identity(*group, speculate)}, &backend,
                          &metrics, [&](const absl::Status& status) {
                            if (!status.ok()) {
                              spdlog::error("{}", std::string(status.message()));
                              coordinator_lost = true;
                            }
                            (*engine)->Stop();
                          });
  if (!server.ok()) return Fail(kExitCannotListen, server.status());

  // SIGTERM and SIGINT are blocked in every thread (main); this one takes them.
  std::thread signals([&] {
    sigset_t set;
    sigemptyset(&set);
    for (int number : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&set, number);
    int number = 0;
    sigwait(&set, &number);
    if (number != SIGUSR1) (*engine)->Stop();
  });
  spdlog::info("serving on {}", flags.listen);
  const absl::Status ended = (*engine)->Run();
  pthread_kill(signals.native_handle(), SIGUSR1);
  signals.join();
  server->reset();
  if (!ended.ok()) return Fail(kExitEngineFailed, ended);
  return coordinator_lost ? kExitCoordinatorLost : kExitOk;
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
    std::puts(BackendName());
    return kExitOk;
  }
  for (const auto& [name, value] :
       {std::pair("--model", &flags.group.model), std::pair("--listen", &flags.listen)}) {
    if (value->empty())
      return Fail(kExitBadFlags, absl::InvalidArgumentError(absl::StrCat(name, " is required")));
  }
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
  spdlog::set_default_logger(spdlog::stderr_logger_mt("dflash-worker"));
  spdlog::set_pattern("%Y-%m-%dT%H:%M:%S.%eZ %^%l%$ %n: %v", spdlog::pattern_time_type::utc);
  try {
    return dflash::Main(argc, argv);
  } catch (const std::exception& error) {  // a library's exception that nobody converted
    spdlog::critical("unexpected exception: {}", error.what());
    return dflash::kExitEngineFailed;
  }
}
