#include "tools/doctor/doctor.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "kernels/device/buffer.h"
#include "kernels/device/describe.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/draft_reference.h"
#include "tools/doctor/probe.h"
#include "tools/doctor/ranks.h"
#include "tools/doctor/recorded_acceptance.h"
#include "tools/doctor/revisions.h"
#include "tools/doctor/weights_scan.h"
#include "worker/defects/defects.h"
#include "worker/engine/speculation_health.h"
#include "worker/load_group.h"
#include "worker/model/checkpoint.h"
#include "worker/model/draft_config.h"
#include "worker/model/generation_config.h"
#include "worker/model/target_config.h"

namespace dflash::doctor {
namespace {

constexpr int64_t kGoldenTokens = 128;  // of an output, at most

// Prompts when there is no bundle.
constexpr const char* kBuiltInPrompts[] = {
    "Count from 3 to 30 in steps of 3. 3, 6, 9, 12, 15, 18, 21, 24, 27, 30. Count from 5 to 50 in steps of "
    "5. 5, 10, 15, 20,",
    "def largest(numbers):\n    \"\"\"Returns the largest of a list of numbers.\"\"\"\n    best = "
    "numbers[0]\n    for number in",
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog. The quick "
    "brown"};

bool SameRounds(const EngineRun& a, const EngineRun& b) {
  return a.tokens == b.tokens && std::equal(a.rounds.begin(), a.rounds.end(), b.rounds.begin(),
                                            b.rounds.end(), [](const RoundReport& x, const RoundReport& y) {
                                              return x.accepted == y.accepted && x.drafted == y.drafted;
                                            });
}

// A run of the doctor over one pair.
class Examination {
 public:
  explicit Examination(const DoctorOptions& options) : options_(options) {}

  absl::Status Run();
  Report report;

 private:
  bool Stops() const { return options_.stop_at_first_failure && report.failed(); }
  void Log(const std::string& line) const {
    if (options_.log) options_.log(line);
  }
  absl::Status OpenBundle();
  // Files, weights, revisions, config. Leaves target_ and drafter_ when they can be examined.
  absl::Status CheckFiles();
  absl::Status CheckWeights();  // that they are numbers, and the recorded ones
  absl::Status CheckPrompts();
  absl::Status ChooseSequences();
  absl::Status ExamineDrafting();
  absl::Status ExamineRounds();
  absl::Status ExamineEngine();
  absl::Status ExaminePreemption(const std::vector<int32_t>& prompt);
  // Ends requests at a token inside a run of accepted drafts.
  absl::Status ExamineStops(const std::vector<std::vector<int32_t>>& prompts,
                            const std::vector<EngineRun>& runs);
  void CheckGoldenRuns(const std::vector<EngineRun>& runs, const std::vector<size_t>& prompts);
  void CheckCounters(const std::vector<std::vector<EngineRun>>& waves);
  void CheckCalibration(const std::vector<DecodedRound>& rounds);
  GenerationRequest Request(const std::vector<int32_t>& prompt, int64_t max_tokens, bool stop) const;

  const DoctorOptions& options_;
  std::optional<GoldenBundle> bundle_;
  std::optional<TargetConfig> target_config_;
  std::optional<DraftConfig> draft_config_;
  std::optional<TargetCheckpoint> target_;
  std::optional<DraftCheckpoint> drafter_;
  std::unique_ptr<DraftReference> reference_;
  std::unique_ptr<Ranks> ranks_;
  Checks checks_;

  // The prompts that are drafted from, their anchors, and which of the bundle's they are.
  std::vector<std::vector<int32_t>> prompts_;
  std::vector<int32_t> anchors_;
  std::vector<std::optional<size_t>> golden_;
  std::vector<int32_t> long_prompt_;
};

absl::Status Examination::OpenBundle() {
  std::string folder = options_.golden;
  if (folder.empty() && std::filesystem::exists(options_.draft_model + "/golden/bundle.json"))
    folder = options_.draft_model + "/golden";
  if (folder.empty()) {
    report.facts.emplace_back("golden", "none: config, taps, masks and positions cannot be checked");
    return absl::OkStatus();
  }
  DFLASH_ASSIGN_OR_RETURN(bundle_, GoldenBundle::Open(folder));
  report.advice = "The rows say what it would take.";
  report.facts.emplace_back("golden", absl::StrCat(folder, " (", bundle_->producer(), ")"));
  return absl::OkStatus();
}

absl::Status Examination::CheckFiles() {
  const ConfigOptions config_options = {.allow_unlisted_keys = options_.allow_unlisted_keys};
  const std::string of_target =
      absl::StrCat("--model ", options_.model, ": config.json and weights of the target");
  const std::string of_drafter =
      absl::StrCat("--draft-model ", options_.draft_model, ": config.json and weights of the drafter");
  const auto fail = [&](const char* id, const absl::Status& status, const std::string& where) {
    report.FailInput(absl::IsNotFound(status) ? "files" : id, std::string(status.message()), where);
    return absl::OkStatus();
  };
  absl::StatusOr<TargetConfig> target_config = TargetConfig::Load(options_.model, config_options);
  if (!target_config.ok()) return fail("config", target_config.status(), of_target);
  absl::StatusOr<DraftConfig> draft_config = DraftConfig::Load(options_.draft_model, config_options);
  if (!draft_config.ok()) return fail("config", draft_config.status(), of_drafter);
  if (absl::Status fits = draft_config->CheckFits(*target_config); !fits.ok())
    return fail("config", fits, absl::StrCat(of_drafter, "; is it the drafter of this target?"));
  target_config_ = *std::move(target_config);
  draft_config_ = *std::move(draft_config);
  absl::StatusOr<TargetCheckpoint> target = TargetCheckpoint::Open(options_.model, *target_config_);
  if (!target.ok()) return fail("files", target.status(), of_target);
  absl::StatusOr<DraftCheckpoint> drafter = DraftCheckpoint::Open(options_.draft_model, *draft_config_);
  if (!drafter.ok()) return fail("files", drafter.status(), of_drafter);
  target_ = *std::move(target);
  drafter_ = *std::move(drafter);
  report.facts.emplace_back("target",
                            absl::StrCat(options_.model, ", revision ", target_->revision().substr(0, 12)));
  report.facts.emplace_back(
      "drafter", absl::StrCat(options_.draft_model, ", revision ", drafter_->revision().substr(0, 12)));
  report.Pass("files", 0, 0, "the tensors that the configurations call for",
              absl::StrCat("target ", target_->Summary(), "; drafter ", drafter_->Summary()));
  reference_ = std::make_unique<DraftReference>(*draft_config_, *drafter_, *target_);
  checks_.reference = reference_.get();
  checks_.target_config = &*target_config_;
  checks_.own = ContractOf(*draft_config_);

  DFLASH_RETURN_IF_ERROR(CheckWeights());
  if (!bundle_) {
    report.NotChecked(
        "config",
        "needs a golden bundle: whoever reads the same keys with the same code shares its mistakes");
    return absl::OkStatus();
  }
  const std::string differences = Differences(checks_.own, bundle_->contract());
  report.Judge(
      "config", differences.empty() ? 0 : 1, 0, "literals of the golden bundle",
      differences.empty()
          ? std::string("taps, masks, windows, theta, mask id and block size are the recorded ones")
          : differences,
      differences.empty() ? std::string() : absl::StrCat("config.json says otherwise: ", differences));
  return absl::OkStatus();
}

absl::Status Examination::CheckWeights() {
  Log("reading all weights");
  const std::pair<const char*, const Checkpoint*> models[] = {{"target", &*target_}, {"drafter", &*drafter_}};
  report.Pass("weights", 0, 0, "finite numbers", "every element of every tensor");
  for (const auto& [whose, checkpoint] : models) {
    DFLASH_ASSIGN_OR_RETURN(const std::string found, FindNoNumbers(*checkpoint));
    if (found.empty()) continue;
    report.Fail("weights", absl::StrCat(whose, " ", found),
                absl::StrCat("weights of the ", whose, " are no numbers: ", found), Blame::kModel);
    break;
  }
  if (!bundle_) {
    report.NotChecked("revisions", "needs a golden bundle");
    return absl::OkStatus();
  }
  DFLASH_RETURN_IF_ERROR(bundle_->CheckFits(golden::SizesOf(*target_config_)));
  WeightsComparison comparisons[2];
  const std::map<std::string, std::string>* const recorded[] = {&bundle_->target_weights(),
                                                                &bundle_->drafter_weights()};
  for (size_t i = 0; i < 2; ++i) {
    const std::map<std::string, std::string>& own = models[i].second->fingerprints();
    for (const auto& [name, fingerprint] : *recorded[i]) {
      if (own.contains(name)) continue;
      return absl::InvalidArgumentError(absl::StrCat(bundle_->folder(), "/bundle.json: ", models[i].first,
                                                     "_weights: ", name.substr(0, 128), ": the ",
                                                     models[i].first, " has no such tensor"));
    }
    comparisons[i] = CompareWeights(own, *recorded[i]);
  }
  JudgeRevisions(comparisons[0], comparisons[1], &report);
  checks_.target_recorded = report.target_weights != Weights::kOther;
  checks_.drafter_recorded = report.drafter_weights != Weights::kOther;
  return absl::OkStatus();
}

absl::Status Examination::CheckPrompts() {
  const absl::StatusOr<Tokenizer> tokenizer = Tokenizer::Load(options_.model);
  if (!tokenizer.ok()) {
    report.FailInput("tokenizer", std::string(tokenizer.status().message()),
                     absl::StrCat("--model ", options_.model, ": tokenizer.json"));
    return absl::OkStatus();
  }
  checks_.vocabulary = tokenizer->vocabulary_size();
  if (!bundle_) {
    report.NotChecked("tokenizer", "needs a golden bundle");
    report.NotChecked("template", "needs a golden bundle");
    return absl::OkStatus();
  }
  int64_t texts = 0, wrong = 0;
  std::string first;
  for (size_t i = 0; i < bundle_->prompts().size(); ++i) {
    const GoldenPrompt& prompt = bundle_->prompts()[i];
    if (prompt.text.empty()) continue;
    ++texts;
    DFLASH_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                            tokenizer->Encode(prompt.text, AddedTokens::kParse));
    if (ids == prompt.prompt_ids) continue;
    const auto at =
        std::mismatch(ids.begin(), ids.end(), prompt.prompt_ids.begin(), prompt.prompt_ids.end()).first -
        ids.begin();
    if (wrong++ == 0) first = absl::StrCat("; prompt ", i, " differs from token ", at);
  }
  if (texts == 0) {
    report.NotChecked("tokenizer", "the bundle holds no texts");
  } else {
    report.Judge("tokenizer", static_cast<double>(wrong), 0,
                 absl::StrCat("token ids of ", texts, " prompts in the bundle"),
                 absl::StrCat(texts - wrong, " of ", texts, " prompts are the same tokens", first),
                 "tokenizer.json of another revision, or added tokens that are read as text");
  }

  absl::StatusOr<ChatTemplate> chat_template = ChatTemplate::Load(options_.model);
  int64_t chats = 0;
  wrong = 0;
  first.clear();
  std::string cause = "another chat template than the bundle's";
  for (size_t i = 0; i < bundle_->prompts().size(); ++i) {
    const GoldenPrompt& prompt = bundle_->prompts()[i];
    if (!prompt.chat || prompt.text.empty()) continue;
    if (!chat_template.ok()) {
      report.FailInput("template", std::string(chat_template.status().message()),
                       absl::StrCat("--model ", options_.model, ": chat_template.jinja"));
      return absl::OkStatus();
    }
    ++chats;
    const auto render = [&](std::optional<bool> thinking) -> absl::StatusOr<std::string> {
      ChatOptions chat_options;
      chat_options.enable_thinking = thinking;
      DFLASH_ASSIGN_OR_RETURN(RenderedChat rendered,
                              chat_template->Render(prompt.chat->messages, nullptr, chat_options));
      return std::move(rendered.text);
    };
    std::optional<bool> thinking = prompt.chat->enable_thinking;
    if (!options_.defect.empty()) DFLASH_RETURN_IF_ERROR(PlantDefect(options_.defect, thinking));
    DFLASH_ASSIGN_OR_RETURN(const std::string text, render(thinking));
    if (text == prompt.text) continue;
    if (wrong++ == 0) {
      const auto at = std::mismatch(text.begin(), text.end(), prompt.text.begin(), prompt.text.end()).first -
                      text.begin();
      first = absl::StrCat("; prompt ", i, " differs from byte ", at);
    }
    // Is it the prompt as the other thinking flag renders it?
    const bool flag = prompt.chat->enable_thinking.value_or(true);
    const absl::StatusOr<std::string> other = render(!flag);
    if (other.ok() && text == *other) {
      cause = absl::StrCat("the thinking flag is ", flag ? "off" : "on", " where the bundle has it ",
                           flag ? "on" : "off");
    }
  }
  if (chats == 0) {
    report.NotChecked("template", "the bundle holds no chats");
  } else {
    report.Judge("template", static_cast<double>(wrong), 0,
                 absl::StrCat("texts of ", chats, " chats in the bundle"),
                 absl::StrCat(chats - wrong, " of ", chats, " chats are rendered alike", first), cause);
  }
  return absl::OkStatus();
}

absl::Status Examination::ChooseSequences() {
  const int64_t block = draft_config_->block_size;
  const auto fits = [&](size_t length) {
    return static_cast<int64_t>(length) + block <= options_.max_context_tokens;
  };
  std::vector<int32_t> all;
  if (bundle_) {
    for (size_t i = 0; i < bundle_->prompts().size(); ++i) {
      const GoldenPrompt& prompt = bundle_->prompts()[i];
      all.insert(all.end(), prompt.prompt_ids.begin(), prompt.prompt_ids.end());
      if (!bundle_->HasTensors(i) || !fits(prompt.prompt_ids.size())) continue;
      prompts_.push_back(prompt.prompt_ids);
      anchors_.push_back(prompt.output_ids[0]);
      golden_.emplace_back(i);
    }
  } else {
    DFLASH_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::Load(options_.model));
    for (const char* text : kBuiltInPrompts) {
      DFLASH_ASSIGN_OR_RETURN(std::vector<int32_t> ids, tokenizer.Encode(text, AddedTokens::kAsText));
      all.insert(all.end(), ids.begin(), ids.end());
    }
  }
  // First a prompt that no window reaches, so that it shows causality alone.
  int64_t window = options_.max_context_tokens;
  int64_t longest_window = 0;
  for (const DraftLayerMask& mask : (bundle_ ? bundle_->contract() : checks_.own).layers) {
    if (mask.window > 0) window = std::min(window, mask.window);
    longest_window = std::max(longest_window, mask.window);
  }
  const int64_t brief = std::clamp<int64_t>(window - block, 2, 24);
  prompts_.insert(prompts_.begin(),
                  {all.begin(), all.begin() + std::min<int64_t>(brief, static_cast<int64_t>(all.size()))});
  anchors_.insert(anchors_.begin(), all[all.size() / 2]);
  golden_.insert(golden_.begin(), std::nullopt);
  // Then one that is longer than every window, not a whole number of pages, and in more than two pieces.
  const int64_t length =
      std::min(std::max<int64_t>(longest_window + 77, 147), options_.max_context_tokens - block);
  while (static_cast<int64_t>(long_prompt_.size()) < length) {
    const int64_t count = std::min<int64_t>(static_cast<int64_t>(all.size()),
                                            length - static_cast<int64_t>(long_prompt_.size()));
    long_prompt_.insert(long_prompt_.end(), all.begin(), all.begin() + count);
  }
  return absl::OkStatus();
}

absl::Status Examination::ExamineDrafting() {
  Log("draft passes");
  Checks::Sequences sequences;
  sequences.golden = golden_;
  for (size_t i = 0; i < prompts_.size(); ++i) {
    DFLASH_ASSIGN_OR_RETURN(SequenceRecord record, ranks_->Measure<SequenceRecord>([&](Probe& probe) {
      return probe.RunSequence(prompts_[i], anchors_[i], kPageTokens);
    }));
    sequences.records.push_back(std::move(record));
  }
  std::vector<int32_t> changed = prompts_[0];
  sequences.perturbed_at = static_cast<int64_t>(changed.size()) / 2;
  int32_t& token = changed[static_cast<size_t>(sequences.perturbed_at)];
  token = static_cast<int32_t>((token + 1) % checks_.vocabulary);
  DFLASH_ASSIGN_OR_RETURN(sequences.perturbed, ranks_->Measure<SequenceRecord>([&](Probe& probe) {
    return probe.RunSequence(changed, anchors_[0], kPageTokens);
  }));
  DFLASH_RETURN_IF_ERROR(checks_.CheckTarget(sequences));
  DFLASH_RETURN_IF_ERROR(checks_.CheckTaps(sequences));
  DFLASH_RETURN_IF_ERROR(checks_.CheckContext(sequences));
  DFLASH_RETURN_IF_ERROR(checks_.CheckBlock(sequences));
  if (Stops()) return absl::OkStatus();

  Log("long context, chunks, company");
  const int32_t anchor = long_prompt_.back();
  SequenceRecord whole, chunked;
  for (const bool in_one : {true, false}) {
    DFLASH_ASSIGN_OR_RETURN((in_one ? whole : chunked), ranks_->Measure<SequenceRecord>([&](Probe& probe) {
      return probe.RunSequence(long_prompt_, anchor,
                               in_one ? std::max<int64_t>(kPrefillTokens, kPageTokens) : kPageTokens);
    }));
  }
  DFLASH_RETURN_IF_ERROR(checks_.CheckLongContext(whole, chunked, sequences.records[0]));
  DFLASH_ASSIGN_OR_RETURN(const Rows output, checks_.OutputForMask());
  const bool forced = output.rows == 1;
  const Rows replacement = forced ? output : Rows(1, target_config_->hidden_size);
  const std::vector<const SequenceRecord*> alone = {&sequences.records[0], &chunked};
  DFLASH_ASSIGN_OR_RETURN(const Probe::Together together, ranks_->Measure<Probe::Together>([&](Probe& probe) {
    return probe.RunTogether(alone, replacement);
  }));
  DFLASH_RETURN_IF_ERROR(checks_.CheckTogether(together, alone, forced));
  return checks_.CheckDraftLogits(sequences);
}

absl::Status Examination::ExamineRounds() {
  Log("rounds with a wrong draft at every depth");
  DFLASH_ASSIGN_OR_RETURN(const RoundsRecord rounds, ranks_->Measure<RoundsRecord>([&](Probe& probe) {
    return probe.RunRounds(prompts_[0], anchors_[0]);
  }));
  std::vector<int32_t> rows = {anchors_[0]};
  rows.insert(rows.end(), rounds.continuation.begin(),
              rounds.continuation.begin() + draft_config_->block_size - 1);
  DFLASH_ASSIGN_OR_RETURN(
      const Probe::VerifyRecord verify,
      ranks_->Measure<Probe::VerifyRecord>([&](Probe& probe) { return probe.RunVerify(prompts_[0], rows); }));
  checks_.CheckVerifyRows(verify);
  checks_.CheckRounds(rounds, draft_config_->block_size);
  return absl::OkStatus();
}

GenerationRequest Examination::Request(const std::vector<int32_t>& prompt, int64_t max_tokens,
                                       bool stop) const {
  GenerationRequest request;
  request.prompt_tokens = prompt;
  request.max_tokens = max_tokens;
  if (stop) request.stop_token_ids = ranks_->leader().generation.eos_token_ids;
  return request;
}

void Examination::CheckGoldenRuns(const std::vector<EngineRun>& runs, const std::vector<size_t>& prompts) {
  RecordedAcceptance recorded;
  int64_t other_text = 0, bad_prompts = 0;
  double accepted = 0, rounds = 0, first_drafts = 0;
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto of_run = static_cast<int64_t>(runs[i].rounds.size());
    int64_t accepted_of_run = 0;
    for (const RoundReport& round : runs[i].rounds) {
      accepted_of_run += round.accepted;
      first_drafts += round.accepted > 0;
    }
    accepted += static_cast<double>(accepted_of_run);
    rounds += static_cast<double>(of_run);
    if (!bundle_) continue;
    const GoldenPrompt& golden = bundle_->prompts()[prompts[i]];
    other_text += runs[i].tokens != golden.output_ids;
    if (golden.acceptance_lengths.empty()) continue;
    recorded.Add(golden, of_run, accepted_of_run + of_run);
    const std::vector<int64_t>& lengths = golden.acceptance_lengths;
    const double mean = static_cast<double>(std::accumulate(lengths.begin(), lengths.end(), int64_t{0})) /
                        static_cast<double>(lengths.size());
    bad_prompts += runs[i].tokens_per_round() < 0.5 * mean;
  }
  const double mean = rounds == 0 ? 0 : 1 + accepted / rounds;
  const double first = rounds == 0 ? 0 : first_drafts / rounds;
  report.facts.emplace_back(
      "acceptance", absl::StrFormat("%.2f tokens per round over %.0f rounds, first draft accepted in %.0f%%",
                                    mean, rounds, 100 * first));
  if (recorded.empty()) {
    report.NotChecked("end-to-end",
                      absl::StrFormat("needs recorded acceptance; seen: %.2f tokens per round", mean));
    // Whatever the text, a drafter that knows this target guesses the next token better than that.
    if (rounds >= 20 && first < 0.05) {
      report.Fail(
          "end-to-end",
          absl::StrFormat("%.2f tokens per round; the first draft is accepted in %.0f%% of %.0f rounds", mean,
                          100 * first, rounds),
          absl::StrFormat("the drafter does not know this target: %.2f tokens per round", mean),
          Blame::kUnsettled);
      report.Of("end-to-end").compared = "chance";
    }
    return;
  }
  const std::string detail = absl::StrCat(
      "tokens per round: ", recorded.Describe(),
      other_text == 0 ? "" : absl::StrCat("; ", other_text, " prompts have another text"),
      bad_prompts == 0 ? "" : absl::StrCat("; ", bad_prompts, " prompts have less than half of it"));
  const bool same_text = checks_.gates.golden < 1e-2 && checks_.target_recorded;
  if (same_text && other_text > 0) {
    report.Fail("end-to-end", detail, "the target's text is not the recorded one",
                report.target_weights == Weights::kRecorded ? Blame::kIntegration : Blame::kUnsettled);
    return;
  }
  if (!report.Judge(
          "end-to-end", recorded.loss(), checks_.gates.acceptance,
          "recorded acceptance per kind of text, relative loss", detail,
          absl::StrFormat("this drafter drafts badly for this target: %.2f tokens per round", mean))) {
    report.Of("end-to-end").blame = Blame::kUnsettled;
  }
}

void Examination::CheckCounters(const std::vector<std::vector<EngineRun>>& waves) {
  int64_t requests = 0, wrong = 0;
  for (const auto& wave : waves) {
    for (const EngineRun& run : wave) {
      ++requests;
      int64_t drafted = 0, accepted = 0, rounds = 0;
      for (const RoundReport& round : run.rounds) {
        drafted += round.drafted;
        accepted += round.accepted;
        rounds += round.drafted > 0;
      }
      const FinishedReport& total = run.finished;
      const auto sum = [](const std::vector<int64_t>& list) {
        return std::accumulate(list.begin(), list.end(), int64_t{0});
      };
      wrong += total.drafted_tokens != drafted || total.accepted_tokens != accepted ||
               total.rounds != rounds || sum(total.drafted_per_position) != drafted ||
               sum(total.accepted_per_position) != accepted;
    }
  }
  report.Judge("metrics", static_cast<double>(wrong), 0,
               "sums over positions = drafts and accepted drafts, bonus left out",
               absl::StrCat(wrong, " of ", requests, " requests miscounted"),
               "per-position counters and totals disagree");
}

void Examination::CheckCalibration(const std::vector<DecodedRound>& rounds) {
  HealthMonitor monitor;
  for (const DecodedRound& round : rounds) monitor.Add(round);
  const SpeculationHealth health = monitor.Judge();
  const std::string detail =
      absl::StrFormat("%s (%s): first drafts: %.0f%% accepted where the drafter expected %.0f%%, %d rounds",
                      Name(health.verdict()), Name(health.reason), 100 * health.first_acceptance,
                      100 * health.first_confidence, health.rounds);
  if (health.verdict() == HealthVerdict::kUnknown) return report.NotChecked("calibration", detail);
  const bool broken = health.verdict() == HealthVerdict::kBroken;
  if (!broken)
    return report.Pass("calibration", health.gap(), std::numeric_limits<double>::quiet_NaN(),
                       "the drafter's own probabilities", detail);
  report.Fail("calibration", detail, "a drafter that is sure of what this target does not say",
              Blame::kUnsettled);
}

// Three requests that outgrow the pages together, and each of them alone; likewise two that fork from one
// prompt, as a request for two choices does.
absl::Status Examination::ExaminePreemption(const std::vector<int32_t>& prompt) {
  const Group& leader = ranks_->leader();
  std::vector<int32_t> start = prompt;
  start.resize(std::min<size_t>(start.size(), kPageTokens / 2));
  Probe::Wave together;
  std::vector<Probe::Wave> alone;
  for (size_t i = 0; i < 3; ++i) {
    start.back() = prompt[i % prompt.size()];
    together.push_back(Request(start, 2 * kPageTokens, false));
    alone.push_back({together.back()});
  }
  // A page each to begin with and one more: two of the three can finish only after another one gave way.
  constexpr int64_t kPages = 4;
  DFLASH_ASSIGN_OR_RETURN(const Probe::EngineRuns crowded,
                          ranks_->Measure<Probe::EngineRuns>([&](Probe& probe) {
                            return probe.RunEngine({together}, kPrefillTokens, kPages);
                          }));
  if (crowded.preemptions == 0) {
    report.NotChecked("preemption", "no request was preempted: the pages were not short");
    return absl::OkStatus();
  }
  DFLASH_ASSIGN_OR_RETURN(const Probe::EngineRuns single,
                          ranks_->Measure<Probe::EngineRuns>(
                              [&](Probe& probe) { return probe.RunEngine(alone, kPrefillTokens); }));
  int64_t different = 0;
  for (size_t i = 0; i < alone.size(); ++i) different += !SameRounds(crowded.waves[0][i], single.waves[i][0]);

  std::vector<Probe::Wave> forks(3);
  for (const uint64_t seed : {20, 21}) {
    const auto room = leader.max_context_tokens - static_cast<int64_t>(long_prompt_.size());
    GenerationRequest request = Request(long_prompt_, std::min<int64_t>(24, room), false);
    request.sampling = {.temperature = 1, .seed = seed};
    forks[2].push_back(request);
    request.use_prefix_cache = false;
    forks[seed - 20].push_back(request);
  }
  DFLASH_ASSIGN_OR_RETURN(const Probe::EngineRuns forked,
                          ranks_->Measure<Probe::EngineRuns>(
                              [&](Probe& probe) { return probe.RunEngine(forks, kPrefillTokens); }));
  int64_t other_forks = 0;
  for (size_t i = 0; i < 2; ++i) other_forks += forked.waves[2][i].tokens != forked.waves[i][0].tokens;
  report.Judge("preemption", static_cast<double>(different + other_forks), 0, "each request alone",
               absl::StrCat(different, " of ", alone.size(), " requests have another text or other rounds; ",
                            crowded.preemptions, " preemptions; ", other_forks,
                            " of 2 choices of one prompt have another text"),
               different > 0 ? "what is restored after a preemption is not what was given up"
                             : "choices of one prompt read each other's stores");
  return absl::OkStatus();
}

absl::Status Examination::ExamineStops(const std::vector<std::vector<int32_t>>& prompts,
                                       const std::vector<EngineRun>& runs) {
  // Tokens in the middle of what a round accepted, and nowhere before it.
  constexpr size_t kStops = 4;
  Probe::Wave requests;
  std::vector<std::vector<int32_t>> wanted;
  for (size_t i = 0; i < runs.size() && requests.size() < kStops; ++i) {
    const std::vector<int32_t>& tokens = runs[i].tokens;
    size_t begin = 1;
    for (const RoundReport& round : runs[i].rounds) {
      const size_t at = begin + static_cast<size_t>(round.accepted) / 2;
      begin += static_cast<size_t>(round.accepted) + 1;
      if (round.accepted < 3 || at >= tokens.size()) continue;
      const auto stop = tokens.begin() + static_cast<std::ptrdiff_t>(at);
      if (std::find(tokens.begin(), stop, *stop) != stop) continue;
      requests.push_back(Request(prompts[i], static_cast<int64_t>(tokens.size()), false));
      requests.back().stop_token_ids = {*stop};
      wanted.emplace_back(tokens.begin(), stop + 1);
      break;
    }
  }
  Finding& limits = report.Of("limits");
  if (requests.empty()) {
    absl::StrAppend(&limits.detail,
                    "; not checked: a stop inside an accepted run, for no run was long enough");
    return absl::OkStatus();
  }
  DFLASH_ASSIGN_OR_RETURN(const Probe::EngineRuns stopped,
                          ranks_->Measure<Probe::EngineRuns>(
                              [&](Probe& probe) { return probe.RunEngine({requests}, kPrefillTokens); }));
  int64_t wrong = 0;
  for (size_t i = 0; i < wanted.size(); ++i) wrong += stopped.waves[0][i].tokens != wanted[i];
  const std::string detail = absl::StrCat(limits.detail, "; ", wrong, " of ", wanted.size(),
                                          " stops inside an accepted run do not end the text there");
  if (limits.outcome == Outcome::kPass) {
    report.Judge("limits", static_cast<double>(wrong), 0, limits.compared, detail,
                 "drafts behind a stop that verification accepted are emitted");
  }
  return absl::OkStatus();
}

absl::Status Examination::ExamineEngine() {
  Log("generation");
  Group& leader = ranks_->leader();
  std::vector<std::vector<int32_t>> texts;
  std::vector<size_t> numbers;
  std::vector<int64_t> budgets;
  if (bundle_) {
    for (size_t i = 0;
         i < bundle_->prompts().size() && static_cast<int64_t>(texts.size()) < options_.max_prompts; ++i) {
      const GoldenPrompt& prompt = bundle_->prompts()[i];
      const auto budget = static_cast<int64_t>(prompt.output_ids.size());
      if (static_cast<int64_t>(prompt.prompt_ids.size()) + budget > leader.max_context_tokens) continue;
      texts.push_back(prompt.prompt_ids);
      numbers.push_back(i);
      budgets.push_back(budget);
    }
  } else {
    const auto length = static_cast<int64_t>(long_prompt_.size());
    for (const int64_t part : {length / 3, length / 2, length}) {
      texts.emplace_back(long_prompt_.begin(), long_prompt_.begin() + part);
      budgets.push_back(std::min<int64_t>(64, leader.max_context_tokens - part));
    }
  }
  if (texts.empty()) return absl::InvalidArgumentError("no golden prompt fits into the context");
  const int64_t block = draft_config_->block_size;
  const std::vector<int32_t>& brief = texts[0];
  const std::vector<int32_t>& other = texts.back();
  const int64_t room =
      std::min<int64_t>(block + 1, leader.max_context_tokens - static_cast<int64_t>(brief.size()));
  std::vector<Probe::Wave> waves(8);
  for (size_t i = 0; i < texts.size(); ++i) waves[0].push_back(Request(texts[i], budgets[i], true));
  // Cold, once more to leave its prefix, something else, and again: the prefix cache hits, as the prompt has
  // whole pages. Then another one that begins like it, cold and again.
  const std::vector<int32_t>& paged = long_prompt_;
  std::vector<int32_t> forked(paged.begin(), paged.begin() + kPageTokens + kPageTokens / 2);
  forked.insert(forked.end(), brief.begin(), brief.end());
  const auto of_paged = [&](int64_t size) { return std::min<int64_t>(64, leader.max_context_tokens - size); };
  const int64_t paged_budget = of_paged(static_cast<int64_t>(paged.size()));
  const int64_t forked_budget = of_paged(static_cast<int64_t>(forked.size()));
  waves[1] = {Request(paged, paged_budget, true), Request(forked, forked_budget, true)};
  for (GenerationRequest& request : waves[1]) request.use_prefix_cache = false;
  waves[2] = {Request(paged, 8, true), Request(brief, 8, true)};
  waves[3] = {Request(paged, paged_budget, true)};
  waves[6] = {Request(forked, forked_budget, true)};
  for (const SpeculationMode mode : {SpeculationMode::kDFlash, SpeculationMode::kOff}) {
    for (const std::vector<int32_t>* prompt : {&brief, &other}) {
      GenerationRequest request = Request(*prompt, std::min<int64_t>(32, budgets[0]), false);
      request.sampling = {.temperature = 0.7f, .top_k = 20, .top_p = 0.9f, .seed = 20};
      request.speculation = mode;
      waves[4].push_back(std::move(request));
    }
  }
  for (int64_t tokens = 1; tokens <= room; ++tokens) waves[5].push_back(Request(brief, tokens, false));
  waves[5].push_back(Request(brief, room, false));
  waves[5].back().speculation = SpeculationMode::kOff;
  DFLASH_ASSIGN_OR_RETURN(const Probe::EngineRuns measured,
                          ranks_->Measure<Probe::EngineRuns>(
                              [&](Probe& probe) { return probe.RunEngine(waves, kPrefillTokens); }));
  const std::vector<std::vector<EngineRun>>& runs = measured.waves;

  if (ranks_->size() == 1) {
    report.Skip("ranks", "one rank");
  } else {
    report.Judge("ranks", ranks_->others_agree() ? 0 : 1, 0,
                 absl::StrCat("tokens and rounds of rank 0, ", ranks_->size(), " ranks"),
                 "every request of the engine",
                 "ranks decide for themselves, or sums differ from rank to rank");
  }
  DFLASH_RETURN_IF_ERROR(ExaminePreemption(brief));

  const EngineRun& cold = runs[1][0];
  const EngineRun& again = runs[3][0];
  const EngineRun& partly = runs[6][0];
  if (report.Of("prefix").outcome == Outcome::kPass) {
    const int64_t different = int64_t{!SameRounds(cold, again)} + int64_t{!SameRounds(runs[1][1], partly)};
    const std::string detail = absl::StrFormat(
        "%.2f tokens per round cold, %.2f again; %d of %d prompt tokens came from a cache, and of a prompt "
        "that only "
        "begins alike %d of %d. Not tried: a prefix again after it was evicted",
        cold.tokens_per_round(), again.tokens_per_round(), again.started.cached_tokens,
        again.started.prompt_tokens, partly.started.cached_tokens, partly.started.prompt_tokens);
    if (different == 0 && (again.started.cached_tokens == 0 || partly.started.cached_tokens == 0)) {
      report.NotChecked("prefix", "nothing came from the prefix cache: " + detail);
    } else {
      report.Judge("prefix", static_cast<double>(different), 0,
                   "the same prompts without the cache, another one in between", detail,
                   "the restored prefix has no drafter context, or another request's");
    }
  }

  int64_t different = 0;
  for (size_t i = 0; i < 2; ++i) different += runs[4][i].tokens != runs[4][i + 2].tokens;
  report.Judge("sampling", static_cast<double>(different), 0, "the same seed without drafts",
               absl::StrCat(different, " of 2 sampled texts differ (temperature 0.7, top-k 20, top-p 0.9)"),
               "noise is not keyed by position, or accepted drafts are not what the target samples");
  const std::vector<int32_t>& plain = runs[5].back().tokens;
  int64_t cut = 0;
  for (int64_t tokens = 1; tokens <= room; ++tokens) {
    const std::vector<int32_t>& ours = runs[5][static_cast<size_t>(tokens - 1)].tokens;
    cut +=
        static_cast<int64_t>(ours.size()) != tokens || !std::equal(ours.begin(), ours.end(), plain.begin());
  }
  report.Judge("limits", static_cast<double>(cut), 0, "the same text without drafts",
               absl::StrCat(cut, " of ", room, " token limits, 1 to ", room, ", change the text"),
               "rows beyond the limit are emitted, or the block is cut before it is drafted");
  DFLASH_RETURN_IF_ERROR(ExamineStops(texts, runs[0]));
  CheckCounters(runs);
  CheckCalibration(measured.decoded);
  CheckGoldenRuns(runs[0], numbers);
  return absl::OkStatus();
}

absl::Status Examination::Run() {
  if (options_.ranks < 1 || options_.ranks > 8) return absl::InvalidArgumentError("ranks must be in [1, 8]");
  if (options_.max_context_tokens < 512)
    return absl::InvalidArgumentError("the doctor needs a context of 512 tokens");
  checks_.report = &report;
  DFLASH_RETURN_IF_ERROR(OpenBundle());
  if (bundle_) checks_.bundle = &*bundle_;
  DFLASH_RETURN_IF_ERROR(CheckFiles());
  report.facts.emplace_back("backend",
                            absl::StrCat(BackendName(), ", activations in ", Name(ActivationDType()), ", ",
                                         options_.ranks, options_.ranks == 1 ? " rank" : " ranks"));
  if (!options_.defect.empty()) report.facts.emplace_back("planted", options_.defect);
  if (!target_ || !drafter_ || report.Of("weights").outcome == Outcome::kFail) return absl::OkStatus();
  checks_.gates = GatesFor(ActivationDType());
  checks_.ranks = options_.ranks;
  DFLASH_RETURN_IF_ERROR(CheckPrompts());
  if (Stops() || checks_.vocabulary == 0) return absl::OkStatus();
  // A configuration that reads otherwise than recorded would have the masks of other layers compared.
  if (bundle_ && (bundle_->contract().layers.size() != checks_.own.layers.size() ||
                  bundle_->contract().block_size != checks_.own.block_size)) {
    return absl::OkStatus();
  }
  DFLASH_RETURN_IF_ERROR(ChooseSequences());
  Log("loading");
  DFLASH_ASSIGN_OR_RETURN(ranks_, Ranks::Load(options_));
  DFLASH_RETURN_IF_ERROR(ExamineDrafting());
  if (Stops()) return absl::OkStatus();
  DFLASH_RETURN_IF_ERROR(ExamineRounds());
  if (Stops()) return absl::OkStatus();
  return ExamineEngine();
}

}  // namespace

absl::StatusOr<Report> RunDoctor(const DoctorOptions& options) {
  const absl::Time start = absl::Now();
  Examination examination(options);
  DFLASH_RETURN_IF_ERROR(examination.Run());
  examination.report.Settle();
  examination.report.seconds = absl::ToDoubleSeconds(absl::Now() - start);
  return std::move(examination.report);
}

}  // namespace dflash::doctor
