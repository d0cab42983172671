#include "tools/dflash_bench/steps.h"

#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "daemon/frontend/checkpoint_prompts.h"
#include "kernels/device/cpu/thread_pool.h"
#include "tools/dflash_bench/linear_layers.h"
#include "tools/dflash_bench/sgemm.h"
#include "tools/dflash_bench/timing.h"
#include "worker/draft/drafter.h"
#include "worker/model/draft_config.h"
#include "worker/model/target_config.h"

namespace dflash::bench {
namespace {

// The parts of all steps of one kind.
struct StepTimes {
  std::vector<double> schedule, draft, forward, sample, commit, detokenize, total;
  double committed = 0;

  void Add(const StepReport& report) {
    const auto add = [](std::vector<double>& to, absl::Duration time) {
      to.push_back(absl::ToDoubleSeconds(time));
    };
    add(schedule, report.schedule_time);
    add(draft, report.draft_time);
    add(forward, report.forward_time);
    add(sample, report.sample_time);
    add(commit, report.commit_time);
    add(detokenize, report.detokenize_time);
    add(total, report.total_time);
    committed += report.rounds[0].round.accepted + 1;
  }

  Row ToRow(const std::string& name) const {
    const auto us = [](const std::vector<double>& values) { return 1e6 * Median(values); };
    return {name,
            {{"total us", us(total)},
             {"schedule", us(schedule)},
             {"draft", us(draft)},
             {"target", us(forward)},
             {"sample", us(sample)},
             {"commit", us(commit)},
             {"text", us(detokenize)}}};
  }
};

// Sorts steps by kind; those with prompt rows or a part of a block are left out.
class StepRecorder final : public StepObserver {
 public:
  explicit StepRecorder(int64_t block) : block_(block) {}
  void OnStep(const StepReport& report, const EngineGauges&) override {
    if (report.prefill_rows > 0 || report.rounds.size() != 1) return;
    if (report.verify_rows == 1) plain.Add(report);
    if (report.verify_rows == block_ && block_ > 1) round.Add(report);
  }
  StepTimes plain, round;

 private:
  const int64_t block_;
};

class Outcome final : public RequestSink {
 public:
  explicit Outcome(absl::Status* status) : status_(status) {}
  void OnStarted(const StartedReport&) override {}
  void OnTokens(TokensReport) override {}
  void OnFinished(const FinishedReport&) override {}
  void OnFailed(const absl::Status& status) override { *status_ = status; }

 private:
  absl::Status* const status_;
};

}  // namespace

absl::Status MeasureSteps(const StepOptions& options, const TargetConfig& target, const DraftConfig* draft,
                          Report& report) {
  DFLASH_ASSIGN_OR_RETURN(const Group group, LoadGroup(options.group, [](const std::string&) {}));
  const int64_t block = group.drafter == nullptr ? 1 : group.drafter->max_drafts() + 1;
  StepRecorder recorder(block);
  DFLASH_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                          group.MakeEngine(options.group.max_prefill_tokens, &recorder));
  DFLASH_ASSIGN_OR_RETURN(const CheckpointPrompts prompts, CheckpointPrompts::Load(options.group.model));
  ChatPrompt chat;
  chat.messages.push_back(
      {.role = "user", .content = options.message, .reasoning_content = std::nullopt, .tool_calls = {}});
  chat.enable_thinking = false;
  GenerationRequest request;
  DFLASH_ASSIGN_OR_RETURN(request.prompt_tokens, prompts.EncodeChat(chat, Tokenizer::kMaxTextBytes));
  request.max_tokens = options.max_tokens;
  request.stop_token_ids = group.generation.eos_token_ids;

  const int threads = ThreadsOf(*group.stream).threads();
  SetSgemmThreads(threads);
  for (int pass = 0; pass < options.passes; ++pass) {
    for (const SpeculationMode mode : {SpeculationMode::kOff, SpeculationMode::kDFlash}) {
      absl::Status status;
      request.speculation = mode;
      engine->Submit(request, std::make_unique<Outcome>(&status));
      while (true) {
        DFLASH_ASSIGN_OR_RETURN(const bool worked, engine->Step());
        if (!worked) break;
      }
      DFLASH_RETURN_IF_ERROR(status);
    }
  }

  report.Section(absl::StrCat("steps, one sequence, ", threads, threads == 1 ? " thread" : " threads",
                              ": medians of ", recorder.plain.total.size(), " plain steps and ",
                              recorder.round.total.size(), " rounds"));
  report.Add(recorder.plain.ToRow("plain step, 1 row"));
  if (draft == nullptr) return absl::OkStatus();
  report.Add(recorder.round.ToRow(absl::StrCat("round, ", block, " rows verified")));
  const auto rounds = static_cast<double>(recorder.round.total.size());
  if (rounds == 0) return absl::NotFoundError("no step of this answer verified a whole block");
  const double tokens = recorder.round.committed / rounds;
  const double round = Median(recorder.round.total), plain = Median(recorder.plain.total);
  const LayerStack stack(RoundCalls(target, *draft, std::lround(tokens)), *group.stream);
  std::vector<Pass> passes = {{[&] { stack.RunLinear(); }, 1, [] {}}};
  if (!SgemmLibrary().empty()) passes.push_back({[&] { stack.RunSgemm(); }, 1, SettleSgemm});
  const std::vector<Timing> timings = TimeInTurn(passes, 5 * options.passes);
  const double linear = timings[0].median();
  Row row = {"round and its linear layers",
             {{"linear us", 1e6 * linear},
              {"round/linear", round / linear},
              {"tokens", tokens},
              {"speed-up", tokens * plain / round}}};
  if (timings.size() > 1) {
    const double sgemm = timings[1].median();
    row.figures.push_back({"sgemm us", 1e6 * sgemm});
    row.figures.push_back({"round/sgemm", round / sgemm});
  }
  report.Add(std::move(row));
  return absl::OkStatus();
}

}  // namespace dflash::bench
