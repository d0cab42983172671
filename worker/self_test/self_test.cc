#include "worker/self_test/self_test.h"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status.h"

namespace dflash {
namespace {

using golden::GoldenBundle;
using golden::GoldenPrompt;

struct Chosen {
  size_t number = 0;  // in the bundle
  const GoldenPrompt* prompt = nullptr;
};

struct Run {
  absl::Status status;
  std::vector<int32_t> tokens;
  int64_t rounds = 0, accepted = 0;
  bool done = false;
};

class RunSink final : public RequestSink {
 public:
  explicit RunSink(Run* run) : run_(run) {}
  void OnStarted(const StartedReport&) override {}
  void OnTokens(TokensReport report) override {
    run_->tokens.insert(run_->tokens.end(), report.tokens.begin(), report.tokens.end());
    for (const RoundReport& round : report.rounds) {
      ++run_->rounds;
      run_->accepted += round.accepted;
    }
  }
  void OnFinished(const FinishedReport&) override { run_->done = true; }
  void OnFailed(const absl::Status& status) override {
    run_->status = status;
    run_->done = true;
  }

 private:
  Run* run_;
};

double TokensPerRound(int64_t accepted, int64_t rounds) {
  return rounds == 0 ? 0 : 1 + static_cast<double>(accepted) / static_cast<double>(rounds);
}

double Recorded(const GoldenPrompt& prompt) {
  int64_t tokens = 0;
  for (const int64_t length : prompt.acceptance_lengths) tokens += length;
  return static_cast<double>(tokens) / static_cast<double>(prompt.acceptance_lengths.size());
}

// Of every kind in turn the prompt with the most tokens per round: where a loss shows.
std::vector<Chosen> Choose(const GoldenBundle& bundle, const SelfTestOptions& options,
                           int64_t max_context_tokens) {
  std::map<std::string, std::vector<Chosen>> kinds;
  for (size_t i = 0; i < bundle.prompts().size(); ++i) {
    const GoldenPrompt& prompt = bundle.prompts()[i];
    if (prompt.acceptance_lengths.empty() ||
        static_cast<int64_t>(prompt.prompt_ids.size()) + options.max_tokens > max_context_tokens) {
      continue;
    }
    kinds[prompt.kind].push_back({i, &prompt});
  }
  for (auto& [kind, prompts] : kinds) {
    std::sort(prompts.begin(), prompts.end(), [](const Chosen& a, const Chosen& b) {
      const auto more = Recorded(*a.prompt) <=> Recorded(*b.prompt);
      return more != 0 ? more > 0 : a.number < b.number;  // equal ones in the bundle's order
    });
  }
  std::vector<Chosen> chosen;
  for (size_t turn = 0; turn < bundle.prompts().size(); ++turn) {
    for (const auto& [kind, prompts] : kinds) {
      if (turn < prompts.size() && static_cast<int64_t>(chosen.size()) < options.max_prompts)
        chosen.push_back(prompts[turn]);
    }
  }
  return chosen;
}

// The recorded rounds that lie within the first tokens of an output, each as if it had had at most
// `most_rows` rows; the first token belongs to none, and the last round of a whole output is counted in more
// than one way.
void AddRecorded(const GoldenPrompt& prompt, int64_t max_tokens, int64_t most_rows, int64_t* accepted,
                 int64_t* rounds) {
  int64_t tokens = 1;
  for (size_t i = 0; i + 1 < prompt.acceptance_lengths.size(); ++i) {
    tokens += prompt.acceptance_lengths[i];
    if (tokens > max_tokens) return;
    *accepted += std::min<int64_t>(prompt.acceptance_lengths[i], most_rows) - 1;
    ++*rounds;
  }
}

// One at a time: rounds of many sequences may be given shorter blocks. Errors: those of Engine::Step; how the
// request ended is in `run`.
absl::Status RunAlone(GenerationRequest request, Engine* engine, Run* run) {
  engine->Submit(std::move(request), std::make_unique<RunSink>(run));
  while (!run->done) {
    DFLASH_ASSIGN_OR_RETURN(const bool worked, engine->Step());
    if (!worked && !run->done) return absl::InternalError("the self-test does not come to an end");
  }
  return absl::OkStatus();
}

// What is in flight must not write to the sinks any more.
absl::Status FinishRounds(Engine* engine) {
  for (bool worked = true; worked;) {
    DFLASH_ASSIGN_OR_RETURN(worked, engine->Step());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Run>> RunPrompts(const GoldenBundle& bundle, const std::vector<Chosen>& prompts,
                                            SpeculationMode mode, const SelfTestOptions& options,
                                            Engine* engine) {
  std::vector<Run> runs(prompts.size());
  for (size_t i = 0; i < prompts.size(); ++i) {
    GenerationRequest request;
    request.id = absl::StrCat("self-test ", i);
    request.prompt_tokens = prompts[i].prompt->prompt_ids;
    request.max_tokens = options.max_tokens;
    request.stop_token_ids = options.stop_token_ids;
    request.speculation = mode;
    request.max_draft_tokens = std::numeric_limits<int32_t>::max();  // whole blocks, as they were recorded
    request.return_text = false;
    request.use_prefix_cache = false;
    DFLASH_RETURN_IF_ERROR(RunAlone(std::move(request), engine, &runs[i]));
    DFLASH_RETURN_IF_ERROR(
        Annotate(runs[i].status, absl::StrCat(bundle.folder(), ": prompt ", prompts[i].number)));
  }
  DFLASH_RETURN_IF_ERROR(FinishRounds(engine));
  return runs;
}

}  // namespace

absl::Status CheckTargetComputes(Engine* engine) {
  GenerationRequest request;
  request.id = "self-test of the target";
  request.prompt_tokens = {0};
  request.max_tokens = 2;  // one behind the prompt, one behind a token
  request.speculation = SpeculationMode::kOff;
  request.return_text = false;
  request.use_prefix_cache = false;
  Run run;
  DFLASH_RETURN_IF_ERROR(RunAlone(std::move(request), engine, &run));
  DFLASH_RETURN_IF_ERROR(FinishRounds(engine));
  return Annotate(run.status, "the target, given token 0");
}

absl::StatusOr<SelfTestReport> RunSelfTest(const GoldenBundle& bundle, const FeatureContract& contract,
                                           const SelfTestOptions& options, Engine* engine) {
  const auto fail = [](std::string detail) {
    return SelfTestReport{.passed = false, .detail = std::move(detail)};
  };
  const std::string differences = Differences(golden::ContractOf(contract), bundle.contract());
  if (!differences.empty())
    return fail(absl::StrCat("the drafter is read otherwise than recorded: ", differences));

  const std::vector<Chosen> prompts = Choose(bundle, options, engine->max_context_tokens());
  if (prompts.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(bundle.folder(), ": no prompt with acceptance_lengths fits into the context"));
  }
  DFLASH_ASSIGN_OR_RETURN(const std::vector<Run> drafted,
                          RunPrompts(bundle, prompts, SpeculationMode::kDFlash, options, engine));
  DFLASH_ASSIGN_OR_RETURN(const std::vector<Run> plain,
                          RunPrompts(bundle, prompts, SpeculationMode::kOff, options, engine));
  struct Kind {
    int64_t accepted = 0, rounds = 0, recorded_accepted = 0, recorded_rounds = 0;
  };
  std::map<std::string, Kind> kinds;
  // One sequence at a time: nothing else cuts a block.
  const int64_t limit = engine->max_verify_rows(), block_rows = bundle.contract().block_size;
  const bool cut = limit > 0 && limit < block_rows;
  int64_t other_texts = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    if (drafted[i].tokens != plain[i].tokens)
      return fail(absl::StrCat("drafts change the text of golden prompt ", prompts[i].number));
    const std::vector<int32_t>& golden = prompts[i].prompt->output_ids;
    const auto common = static_cast<int64_t>(std::min(golden.size(), plain[i].tokens.size()));
    other_texts += !std::equal(golden.begin(), golden.begin() + common, plain[i].tokens.begin());
    Kind& kind = kinds[prompts[i].prompt->kind];
    kind.accepted += drafted[i].accepted;
    kind.rounds += drafted[i].rounds;
    AddRecorded(*prompts[i].prompt, options.max_tokens, cut ? limit : block_rows, &kind.recorded_accepted,
                &kind.recorded_rounds);
  }
  std::vector<std::string> lines;
  bool passed = true;
  for (const auto& [name, kind] : kinds) {
    const double ours = TokensPerRound(kind.accepted, kind.rounds);
    const double recorded = TokensPerRound(kind.recorded_accepted, kind.recorded_rounds);
    passed = passed && ours >= (cut ? options.least_share_of_cut : options.least_share) * recorded;
    lines.push_back(absl::StrFormat("%s %.2f, recorded %.2f", name, ours, recorded));
  }
  std::string detail =
      absl::StrCat("tokens per round of ", prompts.size(), " golden prompts: ", absl::StrJoin(lines, "; "));
  if (cut)
    absl::StrAppend(&detail, "; blocks, also the recorded ones, cut to ", limit, " of ", block_rows,
                    " rows by --max-verify-rows");
  if (other_texts > 0)
    absl::StrAppend(&detail, "; ", other_texts, " of the target's own texts are not the recorded ones");
  return SelfTestReport{.passed = passed, .detail = std::move(detail)};
}

}  // namespace dflash
