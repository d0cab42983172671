#include "daemon/worker_program.h"

#include <atomic>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/child_process.h"
#include "spdlog/spdlog.h"

namespace dflash {
namespace {

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
bool Probe(const std::filesystem::path& program, const Settings& settings) {
  absl::Notification ended;
  std::atomic<bool> found = false;
  auto child = ChildProcess::Start({program.string(), "--probe", "--log-format", settings.log_format},
                                   [&](const ExitReport& report) {
                                     found = !report.by_signal && report.code == 0;
                                     ended.Notify();
                                   });
  if (!child.ok()) return false;
  return ended.WaitForNotificationWithTimeout(absl::Seconds(60)) && found;
}

std::vector<std::string> WorkerCommand(const std::filesystem::path& worker, const Settings& settings) {
  std::vector<std::string> command = {worker.string(), "--model", settings.model, "--speculation",
                                      settings.speculation};
  if (!settings.draft_model.empty()) command.insert(command.end(), {"--draft-model", settings.draft_model});
  const std::pair<const char*, int64_t> numbers[] = {{"--threads", settings.threads},
                                                     {"--max-sequences", settings.max_sequences},
                                                     {"--max-context-tokens", settings.max_context_tokens},
                                                     {"--cache-tokens", settings.cache_tokens},
                                                     {"--max-prefill-tokens", settings.max_prefill_tokens},
                                                     {"--max-verify-rows", settings.max_verify_rows},
                                                     {"--silence-timeout", settings.silence_timeout_seconds}};
  for (const auto& [name, value] : numbers) command.insert(command.end(), {name, absl::StrCat(value)});
  command.insert(command.end(), {"--block-length", settings.block_length, "--log-format", settings.log_format,
                                 "--log-level", settings.log_level});
  if (settings.memory_fraction > 0)
    command.insert(command.end(), {"--memory-fraction", absl::StrCat(settings.memory_fraction)});
  if (settings.prefix_checkpoints)
    command.insert(command.end(), {"--prefix-checkpoints", absl::StrCat(*settings.prefix_checkpoints)});
  if (settings.instruction_set != "auto") {
    command.insert(command.end(), {"--instruction-set", settings.instruction_set});
  }
  if (settings.self_test != "auto") command.insert(command.end(), {"--self-test", settings.self_test});
  if (!settings.golden.empty()) command.insert(command.end(), {"--golden", settings.golden});
  if (settings.allow_unlisted_keys) command.emplace_back("--allow-unlisted-config-keys");
  if (settings.defect != "none") command.insert(command.end(), {"--inject-defect", settings.defect});
  return command;
}

}  // namespace

absl::StatusOr<std::filesystem::path> ChooseWorker(const Settings& settings) {
  if (!settings.worker.empty()) return settings.worker;
  if (settings.backend != "cpu") {
    const std::filesystem::path cuda = FindProgram("dflash-worker-cuda");
    if (settings.backend == "cuda") {
      if (cuda.empty())
        return absl::UnavailableError("--backend cuda: dflash-worker-cuda is not in this build");
      if (!Probe(cuda, settings)) return absl::UnavailableError("--backend cuda: no usable GPU was found");
      return cuda;
    }
    if (!cuda.empty()) {
      if (Probe(cuda, settings)) return cuda;
      spdlog::info("no usable GPU: the worker runs on the CPU");
    }
  }
  const std::filesystem::path cpu = FindProgram("dflash-worker");
  if (cpu.empty())
    return absl::NotFoundError("dflash-worker is not beside this program; name it with --worker");
  return cpu;
}

std::vector<std::vector<std::string>> WorkerCommands(const std::filesystem::path& worker,
                                                     const Settings& settings, int64_t group) {
  std::vector<std::vector<std::string>> commands;
  for (int64_t rank = 0; rank < settings.tp; ++rank) {
    std::vector<std::string>& command = commands.emplace_back(WorkerCommand(worker, settings));
    const int64_t device = settings.share_device ? 0 : group * settings.tp + rank;
    if (device != 0) command.insert(command.end(), {"--device", absl::StrCat(device)});
    if (settings.tp == 1) break;
    command.insert(command.end(), {"--communicator", settings.communicator, "--all-reduce",
                                   settings.all_reduce, "--draft-placement", settings.draft_placement,
                                   "--rank-timeout", absl::StrCat(settings.rank_timeout_seconds),
                                   "--formation-timeout", absl::StrCat(settings.formation_timeout_seconds),
                                   "--load-timeout", absl::StrCat(settings.load_timeout_seconds)});
  }
  return commands;
}

}  // namespace dflash
