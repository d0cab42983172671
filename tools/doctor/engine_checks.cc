#include "tools/doctor/engine_checks.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "tools/doctor/recorded_acceptance.h"
#include "worker/engine/speculation_health.h"

namespace dflash::doctor {
namespace {

using Tokens = std::vector<int32_t>;
using Runs = std::vector<std::vector<EngineRun>>;  // [wave][request]

// Exactly as many tokens.
GenerationRequest Request(const Tokens& prompt, int64_t max_tokens) {
  GenerationRequest request;
  request.prompt_tokens = prompt;
  request.max_tokens = max_tokens;
  return request;
}

// The same, but the text may end before.
GenerationRequest RequestToEnd(Ranks& ranks, const Tokens& prompt, int64_t max_tokens) {
  GenerationRequest request = Request(prompt, max_tokens);
  request.stop_token_ids = ranks.leader().generation.eos_token_ids;
  return request;
}

// Tokens that the context has room for behind the prompt, at most `wanted`.
int64_t Room(Ranks& ranks, const Tokens& prompt, int64_t wanted) {
  return std::min(wanted, ranks.leader().max_context_tokens - static_cast<int64_t>(prompt.size()));
}

// pages: as in Probe::RunEngine.
absl::StatusOr<Probe::EngineRuns> Run(Ranks& ranks, const std::vector<Probe::Wave>& waves,
                                      int64_t pages = 0) {
  return ranks.Measure<Probe::EngineRuns>(
      [&](Probe& probe) { return probe.RunEngine(waves, kPrefillTokens, pages); });
}

bool SameRounds(const EngineRun& a, const EngineRun& b) {
  return a.tokens == b.tokens && std::equal(a.rounds.begin(), a.rounds.end(), b.rounds.begin(),
                                            b.rounds.end(), [](const RoundReport& x, const RoundReport& y) {
                                              return x.accepted == y.accepted && x.drafted == y.drafted;
                                            });
}

// --- what is generated

// One engine runs these waves, each when the one before it has ended.
enum WaveIndex : size_t {
  kTexts,        // all texts at once
  kUncached,     // the paged prompt and the forked one, which begins like it, without the prefix cache
  kLeavePrefix,  // the paged prompt once more, which leaves its prefix, and something else
  kCached,       // the paged prompt, all of whose whole pages come from the cache
  kSampled,      // two texts with drafts, and the same two without
  kLimited,      // every limit from 1 token to a block and one; last, the same text without drafts
  kForked,       // the forked prompt, of which one page comes from the cache
  kWaves
};

struct Texts {
  std::vector<Tokens> prompts;
  std::vector<int64_t> budgets;
  std::vector<size_t> golden;  // their numbers in the bundle; empty: they are none of its
};

Texts ChooseTexts(const Subject& subject, Ranks& ranks, const Tokens& long_prompt, int64_t max_prompts) {
  Texts texts;
  const size_t prompts = subject.bundle == nullptr ? 0 : subject.bundle->prompts().size();
  int64_t too_long = 0;
  for (size_t i = 0; i < prompts && static_cast<int64_t>(texts.prompts.size()) < max_prompts; ++i) {
    const GoldenPrompt& prompt = subject.bundle->prompts()[i];
    const auto budget = static_cast<int64_t>(prompt.output_ids.size());
    if (Room(ranks, prompt.prompt_ids, budget) < budget) {
      ++too_long;
      continue;
    }
    texts.prompts.push_back(prompt.prompt_ids);
    texts.budgets.push_back(budget);
    texts.golden.push_back(i);
  }
  if (too_long > 0) {
    subject.report->facts.emplace_back(
        "left out",
        absl::StrCat(too_long, " of ", prompts, " golden prompts: with their outputs they do not fit into ",
                     ranks.leader().max_context_tokens, " tokens (--max-context-tokens)"));
  }
  if (!texts.prompts.empty()) return texts;
  const auto length = static_cast<int64_t>(long_prompt.size());
  for (const int64_t part : {length / 3, length / 2, length}) {
    texts.prompts.emplace_back(long_prompt.begin(), long_prompt.begin() + part);
    texts.budgets.push_back(Room(ranks, texts.prompts.back(), 64));
  }
  return texts;
}

std::vector<Probe::Wave> MakeWaves(Ranks& ranks, const Texts& texts, const Tokens& paged,
                                   int64_t block_size) {
  std::vector<Probe::Wave> waves(kWaves);
  for (size_t i = 0; i < texts.prompts.size(); ++i)
    waves[kTexts].push_back(RequestToEnd(ranks, texts.prompts[i], texts.budgets[i]));
  const Tokens &brief = texts.prompts[0], &other = texts.prompts.back();

  Tokens forked(paged.begin(), paged.begin() + kPageTokens + kPageTokens / 2);
  forked.insert(forked.end(), brief.begin(), brief.end());
  const auto whole = [&](const Tokens& prompt) {
    return RequestToEnd(ranks, prompt, Room(ranks, prompt, 64));
  };
  waves[kUncached] = {whole(paged), whole(forked)};
  for (GenerationRequest& request : waves[kUncached]) request.use_prefix_cache = false;
  waves[kLeavePrefix] = {RequestToEnd(ranks, paged, 8), RequestToEnd(ranks, brief, 8)};
  waves[kCached] = {whole(paged)};
  waves[kForked] = {whole(forked)};

  for (const SpeculationMode mode : {SpeculationMode::kDFlash, SpeculationMode::kOff}) {
    for (const Tokens* prompt : {&brief, &other}) {
      GenerationRequest request = Request(*prompt, std::min<int64_t>(32, texts.budgets[0]));
      request.sampling = {.temperature = 0.7f, .top_k = 20, .top_p = 0.9f, .seed = 20};
      request.speculation = mode;
      waves[kSampled].push_back(std::move(request));
    }
  }
  const int64_t longest = Room(ranks, brief, block_size + 1);
  for (int64_t limit = 1; limit <= longest; ++limit) waves[kLimited].push_back(Request(brief, limit));
  waves[kLimited].push_back(Request(brief, longest));
  waves[kLimited].back().speculation = SpeculationMode::kOff;
  return waves;
}

// --- ranks

// Right after the waves: the ranks know of their last measurement only.
void CheckRanks(const Subject& subject, const Ranks& ranks) {
  if (ranks.size() == 1) return subject.report->Skip("ranks", "one rank");
  subject.report->Judge("ranks", ranks.others_agree() ? 0 : 1, 0,
                        absl::StrCat("tokens and rounds of rank 0, ", ranks.size(), " ranks"),
                        "every request of the engine",
                        "ranks decide for themselves, or sums differ from rank to rank");
}

// --- preemption

struct PreemptionRuns {
  int64_t requests = 0, preemptions = 0, different = 0;
};

// Three requests that outgrow the pages together, and each of them alone.
absl::StatusOr<PreemptionRuns> RunShortOfPages(Ranks& ranks, const Tokens& prompt) {
  Tokens start = prompt;
  start.resize(std::min<size_t>(start.size(), kPageTokens / 2));
  Probe::Wave together;
  std::vector<Probe::Wave> alone;
  for (size_t i = 0; i < 3; ++i) {
    start.back() = prompt[i % prompt.size()];
    together.push_back(Request(start, 2 * kPageTokens));
    alone.push_back({together.back()});
  }
  // A page each to begin with and one more: two of the three can finish only after another one gave way.
  constexpr int64_t kPages = 4;
  DFLASH_ASSIGN_OR_RETURN(const Probe::EngineRuns crowded, Run(ranks, {together}, kPages));
  PreemptionRuns runs = {.requests = static_cast<int64_t>(alone.size()), .preemptions = crowded.preemptions};
  if (runs.preemptions == 0) return runs;
  DFLASH_ASSIGN_OR_RETURN(const Probe::EngineRuns single, Run(ranks, alone));
  for (size_t i = 0; i < alone.size(); ++i)
    runs.different += !SameRounds(crowded.waves[0][i], single.waves[i][0]);
  return runs;
}

// Two that fork from one prompt, as a request for two choices does, and each of them without the prefix
// cache. How many have another text.
absl::StatusOr<int64_t> RunForks(Ranks& ranks, const Tokens& prompt) {
  constexpr size_t kChoices = 2;
  std::vector<Probe::Wave> waves(kChoices + 1);  // each alone, then all of them
  for (size_t i = 0; i < kChoices; ++i) {
    GenerationRequest request = Request(prompt, Room(ranks, prompt, 24));
    request.sampling = {.temperature = 1, .seed = 20 + i};
    waves[kChoices].push_back(request);
    request.use_prefix_cache = false;
    waves[i].push_back(request);
  }
  DFLASH_ASSIGN_OR_RETURN(const Probe::EngineRuns forked, Run(ranks, waves));
  int64_t different = 0;
  for (size_t i = 0; i < kChoices; ++i)
    different += forked.waves[kChoices][i].tokens != forked.waves[i][0].tokens;
  return different;
}

absl::Status CheckPreemption(const Subject& subject, Ranks& ranks, const Tokens& brief,
                             const Tokens& long_prompt) {
  DFLASH_ASSIGN_OR_RETURN(const PreemptionRuns runs, RunShortOfPages(ranks, brief));
  if (runs.preemptions == 0) {
    subject.report->NotChecked("preemption", "no request was preempted: the pages were not short");
    return absl::OkStatus();
  }
  DFLASH_ASSIGN_OR_RETURN(const int64_t other_forks, RunForks(ranks, long_prompt));
  subject.report->Judge(
      "preemption", static_cast<double>(runs.different + other_forks), 0, "each request alone",
      absl::StrCat(runs.different, " of ", runs.requests, " requests have another text or other rounds; ",
                   runs.preemptions, " preemptions; ", other_forks,
                   " of 2 choices of one prompt have another text"),
      runs.different > 0 ? "what is restored after a preemption is not what was given up"
                         : "choices of one prompt read each other's stores");
  return absl::OkStatus();
}

// --- prefix, sampling, limits

// Only where the context covers the prompt at all.
void CheckPrefixCache(const Subject& subject, const Runs& runs) {
  Report& report = *subject.report;
  if (report.Of("prefix").outcome != Outcome::kPass) return;
  const EngineRun &cold = runs[kUncached][0], &forked_cold = runs[kUncached][1];
  const EngineRun &again = runs[kCached][0], &forked = runs[kForked][0];
  const int64_t different = int64_t{!SameRounds(cold, again)} + int64_t{!SameRounds(forked_cold, forked)};
  const std::string detail = absl::StrFormat(
      "%.2f tokens per round cold, %.2f again; %d of %d prompt tokens came from a cache, and of a prompt "
      "that only begins alike %d of %d. Not tried: a prefix again after it was evicted",
      cold.tokens_per_round(), again.tokens_per_round(), again.started.cached_tokens,
      again.started.prompt_tokens, forked.started.cached_tokens, forked.started.prompt_tokens);
  if (different == 0 && (again.started.cached_tokens == 0 || forked.started.cached_tokens == 0))
    return report.NotChecked("prefix", "nothing came from the prefix cache: " + detail);
  report.Judge("prefix", static_cast<double>(different), 0,
               "the same prompts without the cache, another one in between", detail,
               "the restored prefix has no drafter context, or another request's");
}

void CheckSampling(const Subject& subject, const Runs& runs) {
  const std::vector<EngineRun>& wave = runs[kSampled];
  int64_t different = 0;
  for (size_t i = 0; i < 2; ++i) different += wave[i].tokens != wave[i + 2].tokens;
  subject.report->Judge(
      "sampling", static_cast<double>(different), 0, "the same seed without drafts",
      absl::StrCat(different, " of 2 sampled texts differ (temperature 0.7, top-k 20, top-p 0.9)"),
      "noise is not keyed by position, or accepted drafts are not what the target samples");
}

void CheckLimits(const Subject& subject, const Runs& runs) {
  const Tokens& plain = runs[kLimited].back().tokens;
  const size_t limits = runs[kLimited].size() - 1;
  int64_t wrong = 0;
  for (size_t limit = 1; limit <= limits; ++limit) {
    const Tokens& ours = runs[kLimited][limit - 1].tokens;
    wrong += ours.size() != limit || !std::equal(ours.begin(), ours.end(), plain.begin());
  }
  subject.report->Judge(
      "limits", static_cast<double>(wrong), 0, "the same text without drafts",
      absl::StrCat(wrong, " of ", limits, " token limits, 1 to ", limits, ", change the text"),
      "rows beyond the limit are emitted, or the block is cut before it is drafted");
}

// The other half of "limits": requests that stop at a token inside a run of accepted drafts, where the text
// has it for the first time.
absl::Status CheckStops(const Subject& subject, Ranks& ranks, const std::vector<Tokens>& prompts,
                        const std::vector<EngineRun>& runs) {
  constexpr size_t kStops = 4;
  Probe::Wave requests;
  std::vector<Tokens> wanted;
  for (size_t i = 0; i < runs.size() && requests.size() < kStops; ++i) {
    const Tokens& tokens = runs[i].tokens;
    size_t begin = 1;  // of the round: behind its anchor
    for (const RoundReport& round : runs[i].rounds) {
      const size_t at = begin + static_cast<size_t>(round.accepted) / 2;
      begin += static_cast<size_t>(round.accepted) + 1;
      if (round.accepted < 3 || at >= tokens.size()) continue;
      const auto stop = tokens.begin() + static_cast<std::ptrdiff_t>(at);
      if (std::find(tokens.begin(), stop, *stop) != stop) continue;
      requests.push_back(Request(prompts[i], static_cast<int64_t>(tokens.size())));
      requests.back().stop_token_ids = {*stop};
      wanted.emplace_back(tokens.begin(), stop + 1);
      break;
    }
  }
  Finding& limits = subject.report->Of("limits");
  if (requests.empty()) {
    absl::StrAppend(&limits.detail,
                    "; not checked: a stop inside an accepted run, for no run was long enough");
    return absl::OkStatus();
  }
  DFLASH_ASSIGN_OR_RETURN(const Probe::EngineRuns stopped, Run(ranks, {requests}));
  int64_t wrong = 0;
  for (size_t i = 0; i < wanted.size(); ++i) wrong += stopped.waves[0][i].tokens != wanted[i];
  if (limits.outcome == Outcome::kPass) {
    subject.report->Judge("limits", static_cast<double>(wrong), 0, limits.compared,
                          absl::StrCat(limits.detail, "; ", wrong, " of ", wanted.size(),
                                       " stops inside an accepted run do not end the text there"),
                          "drafts behind a stop that verification accepted are emitted");
  }
  return absl::OkStatus();
}

// --- metrics, calibration

void CheckCounters(const Subject& subject, const Runs& runs) {
  const auto sum = [](const std::vector<int64_t>& list) {
    return std::accumulate(list.begin(), list.end(), int64_t{0});
  };
  int64_t requests = 0, wrong = 0;
  for (const std::vector<EngineRun>& wave : runs) {
    for (const EngineRun& run : wave) {
      ++requests;
      int64_t drafted = 0, accepted = 0, rounds = 0;
      for (const RoundReport& round : run.rounds) {
        drafted += round.drafted;
        accepted += round.accepted;
        rounds += round.drafted > 0;
      }
      const FinishedReport& total = run.finished;
      wrong += total.drafted_tokens != drafted || total.accepted_tokens != accepted ||
               total.rounds != rounds || sum(total.drafted_per_position) != drafted ||
               sum(total.accepted_per_position) != accepted;
    }
  }
  subject.report->Judge("metrics", static_cast<double>(wrong), 0,
                        "sums over positions = drafts and accepted drafts, bonus left out",
                        absl::StrCat(wrong, " of ", requests, " requests miscounted"),
                        "per-position counters and totals disagree");
}

void CheckCalibration(const Subject& subject, const std::vector<DecodedRound>& rounds) {
  Report& report = *subject.report;
  HealthMonitor monitor;
  for (const DecodedRound& round : rounds) monitor.Add(round);
  const SpeculationHealth health = monitor.Judge();
  const std::string detail =
      absl::StrFormat("%s (%s): first drafts: %.0f%% accepted where the drafter expected %.0f%%, %d rounds",
                      Name(health.verdict()), Name(health.reason), 100 * health.first_acceptance,
                      100 * health.first_confidence, health.rounds);
  if (health.verdict() == HealthVerdict::kUnknown) return report.NotChecked("calibration", detail);
  if (health.verdict() == HealthVerdict::kBroken) {
    return report.Fail("calibration", detail, "a drafter that is sure of what this target does not say",
                       Blame::kUnsettled);
  }
  report.Pass("calibration", health.gap(), std::numeric_limits<double>::quiet_NaN(),
              "the drafter's own probabilities", detail);
}

// --- end-to-end

struct Generated {
  double rounds = 0, accepted = 0, first_drafts = 0;  // accepted drafts, and first ones among them
  RecordedAcceptance recorded;
  int64_t other_texts = 0;  // than the bundle's
  int64_t bad_prompts = 0;  // with less than half of the recorded tokens per round

  double tokens_per_round() const { return rounds == 0 ? 0 : 1 + accepted / rounds; }
  double first_acceptance() const { return rounds == 0 ? 0 : first_drafts / rounds; }
};

Generated Sum(const Subject& subject, const std::vector<EngineRun>& runs, const std::vector<size_t>& golden) {
  Generated sum;
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto rounds = static_cast<int64_t>(runs[i].rounds.size());
    int64_t accepted = 0;
    for (const RoundReport& round : runs[i].rounds) {
      accepted += round.accepted;
      sum.first_drafts += round.accepted > 0;
    }
    sum.accepted += static_cast<double>(accepted);
    sum.rounds += static_cast<double>(rounds);
    if (golden.empty()) continue;
    const GoldenPrompt& prompt = subject.bundle->prompts()[golden[i]];
    sum.other_texts += runs[i].tokens != prompt.output_ids;
    const std::vector<int64_t>& lengths = prompt.acceptance_lengths;
    if (lengths.empty()) continue;
    sum.recorded.Add(prompt, rounds, accepted + rounds);
    const double mean = static_cast<double>(std::accumulate(lengths.begin(), lengths.end(), int64_t{0})) /
                        static_cast<double>(lengths.size());
    sum.bad_prompts += runs[i].tokens_per_round() < 0.5 * mean;
  }
  return sum;
}

// Without a recorded acceptance nothing is too little but chance.
void CheckAgainstChance(const Subject& subject, const Generated& sum) {
  Report& report = *subject.report;
  report.NotChecked("end-to-end", absl::StrFormat("needs recorded acceptance; seen: %.2f tokens per round",
                                                  sum.tokens_per_round()));
  // Whatever the text, a drafter that knows this target guesses the next token better than that.
  if (sum.rounds < 20 || sum.first_acceptance() >= 0.05) return;
  report.Fail(
      "end-to-end",
      absl::StrFormat("%.2f tokens per round; the first draft is accepted in %.0f%% of %.0f rounds",
                      sum.tokens_per_round(), 100 * sum.first_acceptance(), sum.rounds),
      absl::StrFormat("the drafter does not know this target: %.2f tokens per round", sum.tokens_per_round()),
      Blame::kUnsettled);
  report.Of("end-to-end").compared = "chance";
}

void CheckEndToEnd(const Subject& subject, const Generated& sum) {
  Report& report = *subject.report;
  report.facts.emplace_back(
      "acceptance", absl::StrFormat("%.2f tokens per round over %.0f rounds, first draft accepted in %.0f%%",
                                    sum.tokens_per_round(), sum.rounds, 100 * sum.first_acceptance()));
  if (sum.recorded.empty()) return CheckAgainstChance(subject, sum);
  std::string detail = absl::StrCat("tokens per round: ", sum.recorded.Describe());
  if (sum.other_texts > 0) absl::StrAppend(&detail, "; ", sum.other_texts, " prompts have another text");
  if (sum.bad_prompts > 0)
    absl::StrAppend(&detail, "; ", sum.bad_prompts, " prompts have less than half of it");
  // Near ties of 16-bit arithmetic change texts; in float32 with the recorded weights nothing may.
  const bool same_text = subject.gates.golden < 1e-2 && subject.target_recorded;
  if (same_text) report.target_text = sum.other_texts > 0 ? TargetText::kOther : TargetText::kRecorded;
  if (same_text && sum.other_texts > 0) {
    report.Fail("end-to-end", detail, "the target's text is not the recorded one", Blame::kUnsettled);
    report.Of("end-to-end").look_at =
        "The target: its weights, config.json, worker/model/target.cc; what it says without drafts.";
    return;
  }
  if (!report.Judge("end-to-end", sum.recorded.loss(), LargestAcceptanceLoss(ActivationDType()),
                    "recorded acceptance per kind of text, relative loss", detail,
                    absl::StrFormat("this drafter drafts badly for this target: %.2f tokens per round",
                                    sum.tokens_per_round()))) {
    report.Of("end-to-end").blame = Blame::kUnsettled;
  }
}

}  // namespace

absl::Status CheckEngine(const Subject& subject, Ranks& ranks, const Tokens& long_prompt,
                         int64_t max_prompts) {
  const Texts texts = ChooseTexts(subject, ranks, long_prompt, max_prompts);
  const int64_t block_size = subject.reference->config().block_size;
  DFLASH_ASSIGN_OR_RETURN(const Probe::EngineRuns measured,
                          Run(ranks, MakeWaves(ranks, texts, long_prompt, block_size)));
  const Runs& runs = measured.waves;
  CheckRanks(subject, ranks);
  DFLASH_RETURN_IF_ERROR(CheckPreemption(subject, ranks, texts.prompts[0], long_prompt));
  CheckPrefixCache(subject, runs);
  CheckSampling(subject, runs);
  CheckLimits(subject, runs);
  DFLASH_RETURN_IF_ERROR(CheckStops(subject, ranks, texts.prompts, runs[kTexts]));
  CheckCounters(subject, runs);
  CheckCalibration(subject, measured.decoded);
  CheckEndToEnd(subject, Sum(subject, runs[kTexts], texts.golden));
  return absl::OkStatus();
}

}  // namespace dflash::doctor
