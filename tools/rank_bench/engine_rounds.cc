#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tools/dflash_bench/timing.h"
#include "tools/rank_bench/rank.h"
#include "worker/rank/follower.h"
#include "worker/rank/leader.h"

namespace dflash::bench {
namespace {

// Keeps the reports of steps that decode.
class Rounds final : public StepObserver {
 public:
  void OnStep(const StepReport& report, const EngineGauges&) override {
    if (report.prefill_rows == 0 && !report.rounds.empty()) steps_.push_back(report);
  }
  std::vector<StepReport> Take() { return std::exchange(steps_, {}); }

 private:
  std::vector<StepReport> steps_;
};

class Ending final : public RequestSink {
 public:
  Ending(bool* done, absl::Status* failed) : done_(done), failed_(failed) {}
  void OnStarted(const StartedReport&) override {}
  void OnTokens(TokensReport) override {}
  void OnFinished(const FinishedReport&) override { *done_ = true; }
  void OnFailed(const absl::Status& status) override {
    *done_ = true;
    *failed_ = status;
  }

 private:
  bool* done_;
  absl::Status* failed_;
};

Row RowOf(const std::string& name, const std::vector<StepReport>& steps) {
  Row row = {name, {}};
  const auto add = [&](const char* part, const auto& time_of) {
    std::vector<double> seconds;
    for (const StepReport& step : steps) seconds.push_back(absl::ToDoubleSeconds(time_of(step)));
    row.figures.push_back({part, 1e3 * Median(seconds)});
  };
  add("round ms", [](const StepReport& s) { return s.total_time; });
  add("draft", [](const StepReport& s) { return s.draft_time; });
  add("target", [](const StepReport& s) { return s.forward_time; });
  add("sample", [](const StepReport& s) { return s.sample_time; });
  add("commit", [](const StepReport& s) { return s.commit_time; });
  add("host", [](const StepReport& s) { return s.schedule_time + s.detokenize_time; });
  double tokens = 0;
  for (const StepReport& step : steps) tokens += 1 + step.rounds[0].round.accepted;
  row.figures.push_back({"tokens", steps.empty() ? 0 : tokens / static_cast<double>(steps.size())});
  return row;
}

absl::Status Lead(const RankOptions& options, Membership& membership, const Group& group, Report& report) {
  std::unique_ptr<RankLeader> ranks;
  if (membership.hub != nullptr) ranks = std::make_unique<RankLeader>(membership.hub.get());
  Rounds rounds;
  DFLASH_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                          group.MakeEngine(options.group.max_prefill_tokens, &rounds, ranks.get()));
  report.Section(absl::StrCat("the engine with one request behind ", options.context, " tokens"));
  for (const SpeculationMode mode : {SpeculationMode::kOff, SpeculationMode::kDFlash}) {
    GenerationRequest request;
    request.id = "measured";
    for (int64_t i = 0; i < options.context; ++i)
      request.prompt_tokens.push_back(
          static_cast<int32_t>((options.seed * 31 + i * 7919) % group.vocabulary));
    request.max_tokens = options.tokens;
    request.speculation = mode;
    request.return_text = false;
    request.use_prefix_cache = false;
    bool done = false;
    absl::Status failed;
    engine->Submit(std::move(request), std::make_unique<Ending>(&done, &failed));
    while (!done) DFLASH_RETURN_IF_ERROR(engine->Step().status());
    DFLASH_RETURN_IF_ERROR(failed);
    report.Add(RowOf(mode == SpeculationMode::kOff ? "plain step" : "draft and verify", rounds.Take()));
  }
  return absl::OkStatus();
}

absl::Status Follow(Membership& membership, const Group& group) {
  DFLASH_ASSIGN_OR_RETURN(const std::unique_ptr<RankFollower> follower, group.MakeFollower());
  DFLASH_RETURN_IF_ERROR(follower->WarmUp(Group::kWarmSequences));
  for (;;) {
    DFLASH_ASSIGN_OR_RETURN(const std::optional<RankPlan> plan, membership.link->NextPlan());
    if (!plan.has_value()) return follower->Finish();
    DFLASH_RETURN_IF_ERROR(follower->Run(*plan));
    membership.link->SetFinished(follower->last_plan());
  }
}

}  // namespace

absl::Status MeasureEngine(const RankOptions& options, Membership& membership, const Group& group,
                           Report& report) {
  if (membership.link != nullptr) return Follow(membership, group);
  const absl::Status status = Lead(options, membership, group, report);
  if (membership.hub != nullptr) membership.hub->End(status);
  return status;
}

}  // namespace dflash::bench
