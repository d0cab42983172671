#include "tools/step_bench/steps.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "tools/dflash_bench/timing.h"
#include "tools/step_bench/synthetic_drafter.h"
#include "worker/engine/block_length.h"

namespace dflash::bench {
namespace {

constexpr int64_t kWarmUpRounds = 3;  // the first runs as it is, the second is captured

double Seconds(absl::Time from) { return absl::ToDoubleSeconds(absl::Now() - from); }

std::vector<int32_t> RandomTokens(int64_t count, int64_t vocabulary, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % static_cast<uint32_t>(vocabulary));
  return tokens;
}

// A prompt in the stores of a slot of its own.
class Prompt {
 public:
  static absl::StatusOr<Prompt> Prefill(const Group& group, Drafter* drafter,
                                        const std::vector<int32_t>& tokens, int64_t room,
                                        int64_t max_prefill_tokens) {
    DFLASH_ASSIGN_OR_RETURN(const int32_t slot, group.table->Open());
    Prompt prompt(group, slot);
    const auto length = static_cast<int64_t>(tokens.size());
    DFLASH_RETURN_IF_ERROR(group.table->Reserve(slot, length + room));
    DFLASH_RETURN_IF_ERROR(group.target->Open(slot));
    if (drafter != nullptr) DFLASH_RETURN_IF_ERROR(drafter->Open(slot, 0));
    for (int64_t done = 0; done < length;) {
      const int64_t rows = std::min(max_prefill_tokens, length - done);
      DFLASH_ASSIGN_OR_RETURN(
          const ForwardResult forward,
          group.target->Forward(
              {.sequences = {{.slot = slot,
                              .phase = Phase::kPrefill,
                              .start_position = done,
                              .tokens = {tokens.begin() + done, tokens.begin() + done + rows},
                              .parents = {},
                              .last_logits = done + rows == length}}}));
      if (drafter != nullptr) {
        DFLASH_RETURN_IF_ERROR(drafter->Ingest(forward.taps, {{.slot = slot,
                                                               .phase = Phase::kPrefill,
                                                               .first_row = 0,
                                                               .row_count = rows,
                                                               .start_position = done}}));
      }
      done += rows;
    }
    return prompt;
  }
  Prompt(Prompt&& other) noexcept : group_(other.group_), slot_(std::exchange(other.slot_, -1)) {}
  ~Prompt() {
    if (slot_ >= 0) (void)group_->table->Close(slot_);
  }
  int32_t slot() const { return slot_; }

 private:
  Prompt(const Group& group, int32_t slot) : group_(&group), slot_(slot) {}
  const Group* group_;
  int32_t slot_;
};

// Texts and what the drafts of the next rounds shall be. text[0] is the anchor of the first round.
struct Script {
  std::vector<std::vector<int32_t>> texts;
  std::vector<std::vector<int32_t>> accepted;  // per sequence, per round
};

// Such that 1 + p + p^2 + ... of a whole block is the mean.
double AcceptanceProbability(double tokens_per_round, int64_t max_drafts) {
  double low = 0, high = 1;
  for (int step = 0; step < 60; ++step) {
    const double middle = (low + high) / 2;
    double tokens = 0, power = 1;
    for (int64_t d = 0; d <= max_drafts; ++d, power *= middle) tokens += power;
    (tokens < tokens_per_round ? low : high) = middle;
  }
  return (low + high) / 2;
}

// Drafts to accept per round: the warm-up's, then every quantile of the distribution equally often.
std::vector<int32_t> AcceptanceSchedule(const RoundCase& c, int64_t max_drafts, uint32_t seed) {
  const auto mean = static_cast<int32_t>(std::lround(c.tokens_per_round - 1));
  std::mt19937 random(seed);
  std::vector<int32_t> schedule;
  if (c.acceptance == RoundCase::Acceptance::kGeometric) {
    const double probability = AcceptanceProbability(c.tokens_per_round, max_drafts);
    for (int64_t i = 0; i < c.rounds; ++i) {
      const double quantile = (static_cast<double>(i) + 0.5) / static_cast<double>(c.rounds);
      int32_t accepted = 0;  // at least so many with probability p^accepted
      for (double power = probability; accepted < max_drafts && power > quantile; power *= probability)
        ++accepted;
      schedule.push_back(accepted);
    }
    std::shuffle(schedule.begin(), schedule.end(), random);
  } else {
    const int64_t most = std::min<int64_t>(std::lround(2 * (c.tokens_per_round - 1)), max_drafts);
    std::vector<int32_t> values(static_cast<size_t>(most + 1));
    std::iota(values.begin(), values.end(), 0);
    while (static_cast<int64_t>(schedule.size()) < c.rounds) {
      std::shuffle(values.begin(), values.end(), random);
      schedule.insert(schedule.end(), values.begin(), values.end());
    }
    schedule.resize(static_cast<size_t>(c.rounds));
  }
  schedule.insert(schedule.begin(), kWarmUpRounds, mean);
  return schedule;
}

// Runs rounds, two in flight, and hands each result to `take`. `prepare` comes before a round is enqueued.
absl::Status RunRounds(DecodeRounds& rounds, const std::vector<DecodeRounds::Member>& members,
                       int64_t block_rows, int64_t count, const std::function<absl::Status(int64_t)>& prepare,
                       const std::function<absl::Status(int64_t, const DecodeRounds::Outcome&)>& take) {
  for (int64_t enqueued = 0, taken = 0; taken < count;) {
    if (enqueued < count && rounds.in_flight() < 2) {
      DFLASH_RETURN_IF_ERROR(prepare(enqueued));
      DFLASH_RETURN_IF_ERROR(rounds.Enqueue(members, block_rows));
      ++enqueued;
      continue;
    }
    DFLASH_ASSIGN_OR_RETURN(const DecodeRounds::Outcome outcome, rounds.Collect());
    DFLASH_RETURN_IF_ERROR(take(taken++, outcome));
  }
  return absl::OkStatus();
}

class RoundClock {
 public:
  void Add(int64_t round, const DecodeRounds::Outcome& outcome) {
    const absl::Time now = absl::Now();
    const absl::Time last = std::exchange(last_, now);
    if (round < kWarmUpRounds) return;
    times.draft.push_back(absl::ToDoubleSeconds(outcome.draft_time));
    times.target.push_back(absl::ToDoubleSeconds(outcome.forward_time));
    times.sample.push_back(absl::ToDoubleSeconds(outcome.sample_time));
    times.commit.push_back(absl::ToDoubleSeconds(outcome.commit_time));
    times.ingest.push_back(absl::ToDoubleSeconds(outcome.ingest_time));
    times.round.push_back(absl::ToDoubleSeconds(now - last));
  }
  RoundTimes times;

 private:
  absl::Time last_;
};

struct Decoding {
  std::vector<Prompt> prompts;
  std::vector<DecodeRounds::Member> members;
};

absl::StatusOr<Decoding> StartDecoding(const Group& group, const RoundCase& c, Drafter* drafter,
                                       DecodeRounds& rounds, int64_t block_rows, int64_t room,
                                       int64_t max_prefill_tokens) {
  Decoding decoding;
  for (int64_t i = 0; i < c.sequences; ++i) {
    const auto seed = static_cast<uint32_t>(100 + i);
    const std::vector<int32_t> tokens = RandomTokens(c.context_tokens + 1, group.vocabulary, seed);
    DFLASH_ASSIGN_OR_RETURN(Prompt prompt, Prompt::Prefill(group, drafter, {tokens.begin(), tokens.end() - 1},
                                                           room, max_prefill_tokens));
    DecodeState state;
    state.anchor = tokens.back();
    state.position = static_cast<int32_t>(c.context_tokens);
    state.room = static_cast<int32_t>(room);
    state.sampling = c.sampling;
    DFLASH_RETURN_IF_ERROR(rounds.Start(prompt.slot(), state));
    decoding.members.push_back({.slot = prompt.slot(), .max_drafts = block_rows - 1});
    decoding.prompts.push_back(std::move(prompt));
  }
  return decoding;
}

// The texts of plain decoding, and how long its rounds took.
absl::StatusOr<RoundTimes> DecodePlainly(const Group& group, const RoundCase& c, int64_t rounds_in_all,
                                         int64_t room, int64_t max_prefill_tokens, Script& script) {
  DFLASH_ASSIGN_OR_RETURN(
      const std::unique_ptr<DecodeRounds> rounds,
      DecodeRounds::Create({.vocabulary = group.vocabulary, .max_in_flight = 2}, group.target.get(), nullptr,
                           group.table.get(), *group.stream));
  DFLASH_ASSIGN_OR_RETURN(const Decoding decoding,
                          StartDecoding(group, c, nullptr, *rounds, 1, room, max_prefill_tokens));
  script.texts.resize(static_cast<size_t>(c.sequences));
  for (size_t i = 0; i < script.texts.size(); ++i) {
    script.texts[i].push_back(
        RandomTokens(c.context_tokens + 1, group.vocabulary, static_cast<uint32_t>(100 + i)).back());
  }
  RoundClock clock;
  const auto nothing = [](int64_t) { return absl::OkStatus(); };
  DFLASH_RETURN_IF_ERROR(RunRounds(*rounds, decoding.members, 1, rounds_in_all, nothing,
                                   [&](int64_t round, const DecodeRounds::Outcome& outcome) {
                                     clock.Add(round, outcome);
                                     for (size_t i = 0; i < script.texts.size(); ++i) {
                                       const std::vector<int32_t>& emitted = outcome.sequences[i].emitted;
                                       if (emitted.size() != 1 || emitted[0] < 0)
                                         return absl::DataLossError("a plain step did not give one token");
                                       script.texts[i].push_back(emitted[0]);
                                     }
                                     return absl::OkStatus();
                                   }));
  return std::move(clock.times);
}

absl::StatusOr<DraftedFigures> DecodeDrafting(const Group& group, const RoundCase& c, int64_t block_rows,
                                              int64_t rounds_in_all, int64_t room, int64_t max_prefill_tokens,
                                              const Script& script) {
  DFLASH_ASSIGN_OR_RETURN(const std::unique_ptr<SyntheticDrafter> drafter,
                          SyntheticDrafter::Create(group.drafter.get(), c.sequences, *group.stream));
  DFLASH_ASSIGN_OR_RETURN(
      const std::unique_ptr<DecodeRounds> rounds,
      DecodeRounds::Create({.vocabulary = group.vocabulary, .max_in_flight = 2}, group.target.get(),
                           drafter.get(), group.table.get(), *group.stream));
  DFLASH_ASSIGN_OR_RETURN(const Decoding decoding, StartDecoding(group, c, drafter.get(), *rounds, block_rows,
                                                                 room, max_prefill_tokens));
  const auto accepted_in = [&](size_t sequence, int64_t round) {
    const int64_t wanted = script.accepted[sequence][static_cast<size_t>(round)];
    return static_cast<size_t>(std::min(wanted, block_rows - 1));
  };
  std::vector<size_t> enqueued(script.texts.size(), 0),
      taken(script.texts.size(), 0);  // anchors in the texts
  const auto prepare = [&](int64_t round) {
    std::vector<std::vector<int32_t>> proposals(script.texts.size());
    for (size_t i = 0; i < proposals.size(); ++i) {
      const size_t accepted = accepted_in(i, round);
      for (size_t depth = 0; depth < static_cast<size_t>(drafter->max_drafts()); ++depth) {
        const int32_t right = script.texts[i][enqueued[i] + 1 + depth];
        const int32_t wrong = right == 0 ? 1 : right - 1;
        proposals[i].push_back(depth < accepted ? right : wrong);
      }
      enqueued[i] += accepted + 1;
    }
    return drafter->Schedule(proposals);
  };
  RoundClock clock;
  int64_t committed = 0;
  DFLASH_RETURN_IF_ERROR(RunRounds(
      *rounds, decoding.members, block_rows, rounds_in_all, prepare,
      [&](int64_t round, const DecodeRounds::Outcome& outcome) {
        clock.Add(round, outcome);
        for (size_t i = 0; i < script.texts.size(); ++i) {
          const std::vector<int32_t>& emitted = outcome.sequences[i].emitted;
          const size_t accepted = accepted_in(i, round);
          const auto expected = script.texts[i].begin() + static_cast<int64_t>(taken[i]) + 1;
          if (emitted.size() != accepted + 1 || !std::equal(emitted.begin(), emitted.end(), expected)) {
            return absl::DataLossError(absl::StrCat(c.sequences, " sequences, blocks of ", block_rows,
                                                    " rows, round ", round, ", sequence ", i, ": ",
                                                    emitted.size(), " tokens for ", accepted,
                                                    " right drafts, or not those of plain steps"));
          }
          taken[i] += emitted.size();
          if (round >= kWarmUpRounds) committed += static_cast<int64_t>(emitted.size());
        }
        return absl::OkStatus();
      }));
  return DraftedFigures{
      .block_rows = block_rows,
      .times = std::move(clock.times),
      .tokens_per_round = static_cast<double>(committed) / static_cast<double>(c.rounds * c.sequences)};
}

}  // namespace

absl::StatusOr<RoundFigures> MeasureRounds(const Group& group, const RoundCase& c,
                                           int64_t max_prefill_tokens) {
  const int64_t drafts = group.drafter->max_drafts();
  const int64_t rounds_in_all = c.rounds + kWarmUpRounds;
  Script script;
  RoundFigures figures;
  int64_t longest = 0;
  for (int64_t i = 0; i < c.sequences; ++i) {
    script.accepted.push_back(AcceptanceSchedule(c, drafts, static_cast<uint32_t>(i)));
    const std::vector<int32_t>& schedule = script.accepted.back();
    longest = std::max(longest, std::accumulate(schedule.begin(), schedule.end(), rounds_in_all));
    figures.acceptance.insert(figures.acceptance.end(), schedule.begin() + kWarmUpRounds, schedule.end());
  }
  // A last block looks past what it commits.
  const int64_t plain_rounds = longest + drafts + 1;
  const int64_t room = plain_rounds + 2 * (drafts + 1);
  DFLASH_ASSIGN_OR_RETURN(figures.plain,
                          DecodePlainly(group, c, plain_rounds, room, max_prefill_tokens, script));
  const std::vector<int64_t> lengths = c.block_rows.empty() ? std::vector<int64_t>{drafts + 1} : c.block_rows;
  for (const int64_t block_rows : lengths) {
    DFLASH_ASSIGN_OR_RETURN(DraftedFigures drafted, DecodeDrafting(group, c, block_rows, rounds_in_all, room,
                                                                   max_prefill_tokens, script));
    figures.drafted.push_back(std::move(drafted));
  }
  return figures;
}

LoadFigures SumUpLoad(const RoundCase& c, const RoundFigures& figures, int64_t whole_block_rows) {
  const auto sequences = static_cast<double>(c.sequences);
  std::map<int64_t, double> rates;  // by block rows
  BlockStatistics statistics;
  const double plain = Median(figures.plain.round);
  rates[1] = sequences / plain;
  statistics.costs.Observe(1, c.sequences, plain);
  for (const DraftedFigures& drafted : figures.drafted) {
    const double seconds = Median(drafted.times.round);
    rates[drafted.block_rows] = sequences * drafted.tokens_per_round / seconds;
    statistics.costs.Observe(drafted.block_rows, c.sequences, seconds);
  }
  for (const int32_t accepted : figures.acceptance)
    statistics.survival.Observe(whole_block_rows - 1, accepted);
  LoadFigures load;
  load.plain = rates[1];
  for (const auto& [rows, rate] : rates) {
    if (rate <= load.best) continue;
    load.best = rate;
    load.best_rows = rows;
  }
  const std::vector<int64_t> drafts(static_cast<size_t>(c.sequences), whole_block_rows - 1);
  load.chosen_rows = ChooseBlock(drafts, whole_block_rows, whole_block_rows, statistics).rows;
  load.chosen = rates[load.chosen_rows];
  return load;
}

absl::StatusOr<std::vector<double>> MeasurePrefill(const Group& group, int64_t tokens,
                                                   int64_t max_prefill_tokens, int repeats) {
  std::vector<double> seconds;
  for (int i = -1; i < repeats; ++i) {  // the first is not counted
    const std::vector<int32_t> prompt = RandomTokens(tokens, group.vocabulary, static_cast<uint32_t>(i + 1));
    DFLASH_RETURN_IF_ERROR(group.stream->Synchronize());
    const absl::Time start = absl::Now();
    DFLASH_ASSIGN_OR_RETURN(const Prompt prefilled,
                            Prompt::Prefill(group, group.drafter.get(), prompt, 0, max_prefill_tokens));
    DFLASH_RETURN_IF_ERROR(group.stream->Synchronize());
    if (i >= 0) seconds.push_back(Seconds(start));
  }
  return seconds;
}

absl::StatusOr<std::vector<double>> MeasureFirstToken(Engine& engine, int64_t vocabulary, int64_t tokens,
                                                      int repeats) {
  class FirstToken final : public RequestSink {
   public:
    FirstToken(absl::Time* first, absl::Status* failure) : first_(first), failure_(failure) {}
    void OnStarted(const StartedReport&) override {}
    void OnTokens(TokensReport) override { *first_ = std::min(*first_, absl::Now()); }
    void OnFinished(const FinishedReport&) override {}
    void OnFailed(const absl::Status& status) override { *failure_ = status; }

   private:
    absl::Time* first_;
    absl::Status* failure_;
  };
  std::vector<double> seconds;
  for (int i = -1; i < repeats; ++i) {
    GenerationRequest request;
    request.prompt_tokens = RandomTokens(tokens, vocabulary, static_cast<uint32_t>(i + 1));
    request.max_tokens = 2;
    absl::Time first = absl::InfiniteFuture();
    absl::Status failure;
    const absl::Time start = absl::Now();
    engine.Submit(std::move(request), std::make_unique<FirstToken>(&first, &failure));
    while (true) {
      DFLASH_ASSIGN_OR_RETURN(const bool worked, engine.Step());
      if (!worked) break;
    }
    DFLASH_RETURN_IF_ERROR(failure);
    if (i >= 0) seconds.push_back(absl::ToDoubleSeconds(first - start));
  }
  return seconds;
}

}  // namespace dflash::bench
