#include "worker/engine/engine.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/cache/prefix_cache.h"
#include "worker/cache/sequence_table.h"
#include "worker/decode/decode_rounds.h"
#include "worker/draft/drafter.h"
#include "worker/engine/constraint_cache.h"
#include "worker/engine/prompt_sampler.h"
#include "worker/engine/scheduler.h"
#include "worker/engine/sequence.h"
#include "worker/model/target.h"
#include "worker/rank/leader.h"
#include "worker/rank/open_slot.h"

namespace dflash {
namespace {

// Adds the time since the last call to whatever part of the step it is charged to.
class StepClock {
 public:
  void Charge(absl::Duration& part) {
    const absl::Time now = absl::Now();
    part += now - last_;
    last_ = now;
  }

 private:
  absl::Time last_ = absl::Now();
};

}  // namespace

class Engine::Impl {
 public:
  Impl(const EngineOptions& options, Target* target, Drafter* drafter, SequenceTable* table,
       const Tokenizer* tokenizer, const Stream* stream)
      : options_(options),
        target_(target),
        drafter_(drafter),
        table_(table),
        tokenizer_(tokenizer),
        content_marks_(tokenizer),
        stream_(stream),
        constraints_(tokenizer) {}
  absl::Status Allocate();

  void Submit(GenerationRequest request, std::unique_ptr<RequestSink> sink);
  void Cancel(const std::string& id, absl::Status reason);
  absl::Status WarmUp(int64_t sequences);
  void RefuseSpeculation(std::string reason) { refused_ = std::move(reason); }
  absl::Status Run();
  absl::StatusOr<bool> Step();
  void Stop();
  EngineGauges Gauges() const {
    absl::MutexLock lock(&mutex_);
    return gauges_;
  }
  int64_t max_context_tokens() const { return options_.max_context_tokens; }
  int64_t max_verify_rows() const { return options_.max_verify_rows; }

 private:
  bool TakeInbox();
  void DropEnded();
  absl::Status Admit();
  absl::Status Open(Sequence& sequence);
  SchedulerSnapshot Snapshot() const;
  void NumberPrompts(const std::vector<PrefixCache::Hit>& hits, SchedulerSnapshot& snapshot) const;
  absl::StatusOr<StepPlan> Plan(StepReport& report);
  absl::Status MakeRoom(const StepPlan& plan, StepReport& report);
  absl::Status ReservePages(const Sequence& sequence, int64_t tokens);
  absl::Status ReleaseEnded();
  KnownRows DescribeRows(const StepPlan& plan);
  absl::Status TellRanks(const StepPlan& plan, const KnownRows& known);
  absl::Status RunKnownRows(const KnownRows& known, StepReport& report);
  RowProcessing ProcessingOf(const std::vector<StepPlan::Verify>& verify) const;
  absl::Status EnqueueRound(const StepPlan& plan);
  absl::Status CollectRound(StepReport& report);
  struct RoundInFlight {
    std::vector<Sequence*> sequences;
    BlockChoice block;
    int64_t rows = 0;      // planned
    int64_t drafting = 0;  // sequences that may have drafts
  };
  void Learn(const RoundInFlight& round, const DecodeRounds::Outcome& outcome, absl::Duration host_time);
  const char* ReasonNotToSpeculate(const Sequence& sequence, const BlockChoice& block) const;
  absl::Status Release(Sequence& sequence);
  void FailAll(const absl::Status& status);
  absl::Status CheckRequest(const GenerationRequest& request) const;
  bool WantsWholeBlocks(const Sequence& sequence) const {
    return drafter_ != nullptr && sequence.request.max_draft_tokens >= drafter_->max_drafts();
  }
  int64_t block_rows() const { return 1 + (drafter_ == nullptr ? 0 : drafter_->max_drafts()); }
  bool Speculates(const Sequence& sequence) const {
    return drafter_ != nullptr && refused_.empty() && sequence.request.speculation != SpeculationMode::kOff;
  }
  void PublishGauges();

  EngineOptions options_;
  Target* target_;
  Drafter* drafter_;  // null: plain decoding only
  SequenceTable* table_;
  const Tokenizer* tokenizer_;
  const ContentMarks content_marks_;
  std::string refused_;  // why nobody gets drafts; empty: not so
  const Stream* stream_;
  ConstraintCache constraints_;  // engine thread only
  PromptSampler prompt_sampler_;
  std::unique_ptr<DecodeRounds> rounds_;
  std::unique_ptr<PrefixCache> prefixes_;  // null: there is none
  // Since the last report of a step.
  std::vector<PrefixReport> prefixes_looked_up_;
  int64_t reported_evicted_pages_ = 0, reported_evicted_checkpoints_ = 0;
  std::deque<RoundInFlight> rounds_in_flight_;  // in their order
  BlockStatistics blocks_;

  // Engine thread only.
  int64_t arrivals_ = 0;
  std::vector<std::unique_ptr<Sequence>> waiting_;
  std::vector<std::unique_ptr<Sequence>> running_;  // have a slot

  // Shared with the callers of Submit, Cancel and Stop.
  struct NewRequest {
    GenerationRequest request;
    std::unique_ptr<RequestSink> sink;
  };
  mutable absl::Mutex mutex_;
  std::vector<NewRequest> submitted_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::pair<std::string, absl::Status>> cancelled_ ABSL_GUARDED_BY(mutex_);
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  EngineGauges gauges_ ABSL_GUARDED_BY(mutex_);
};

absl::Status Engine::Impl::Allocate() {
  DFLASH_ASSIGN_OR_RETURN(prompt_sampler_,
                          PromptSampler::Create(table_->slots(), options_.vocabulary, target_, *stream_));
  const DecodeRounds::Options rounds = {.vocabulary = options_.vocabulary,
                                        .captured = options_.captured_rounds,
                                        .max_in_flight = options_.rounds_ahead + 1};
  DFLASH_ASSIGN_OR_RETURN(rounds_, DecodeRounds::Create(rounds, target_, drafter_, table_, *stream_));
  blocks_.uniform_rows = rounds_->captured();
  if (target_->checkpoints() > 0) {
    prefixes_ =
        std::make_unique<PrefixCache>(PrefixCache::Options{.checkpoints = target_->checkpoints(),
                                                           .turn_end_tokens = options_.turn_end_tokens},
                                      table_);
  }
  PublishGauges();
  return absl::OkStatus();
}

// --- requests in and out
// ---------------------------------------------------------------------------------------------

void Engine::Impl::Submit(GenerationRequest request, std::unique_ptr<RequestSink> sink) {
  absl::MutexLock lock(&mutex_);
  submitted_.push_back({std::move(request), std::move(sink)});
}

void Engine::Impl::Cancel(const std::string& id, absl::Status reason) {
  absl::MutexLock lock(&mutex_);
  cancelled_.emplace_back(id, std::move(reason));
}

void Engine::Impl::Stop() {
  absl::MutexLock lock(&mutex_);
  stop_ = true;
}

absl::Status Engine::Impl::CheckRequest(const GenerationRequest& request) const {
  const auto prompt = static_cast<int64_t>(request.prompt_tokens.size());
  if (prompt == 0) return absl::InvalidArgumentError("the prompt is empty");
  if (request.max_tokens < 1) return absl::InvalidArgumentError("max_tokens must be at least 1");
  if (prompt > options_.max_context_tokens || request.max_tokens > options_.max_context_tokens - prompt) {
    return absl::InvalidArgumentError(absl::StrCat("prompt of ", prompt, " tokens and max_tokens ",
                                                   request.max_tokens, " exceed the context of ",
                                                   options_.max_context_tokens));
  }
  if ((prompt + request.max_tokens + kPageTokens - 1) / kPageTokens > table_->pages()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the request needs more than the ", table_->pages() * kPageTokens, " tokens that the cache holds"));
  }
  if (static_cast<int64_t>(request.output_tokens.size()) > request.max_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("an output of ", request.output_tokens.size(),
                                                   " tokens goes on, of at most ", request.max_tokens));
  }
  if (static_cast<int64_t>(request.stop_token_ids.size()) > kMaxStopTokens) {
    return absl::InvalidArgumentError(absl::StrCat(request.stop_token_ids.size(), " stop token ids, at most ",
                                                   kMaxStopTokens, " are possible"));
  }
  for (const std::vector<int32_t>* tokens : {&request.prompt_tokens, &request.output_tokens}) {
    for (int32_t token : *tokens) {
      if (token < 0 || token >= target_->config().vocab_size) {
        return absl::InvalidArgumentError(absl::StrCat("token id ", token, " is outside the vocabulary"));
      }
    }
  }
  return absl::OkStatus();
}

// Moves what other threads left into the engine's own lists. Returns false when the engine shall stop.
bool Engine::Impl::TakeInbox() {
  std::vector<NewRequest> submitted;
  std::vector<std::pair<std::string, absl::Status>> cancelled;
  {
    absl::MutexLock lock(&mutex_);
    if (stop_) return false;
    submitted.swap(submitted_);
    cancelled.swap(cancelled_);
  }
  const SequenceParts parts = {.tokenizer = tokenizer_,
                               .content_marks = &content_marks_,
                               .constraints = &constraints_,
                               .vocabulary = options_.vocabulary};
  for (NewRequest& entry : submitted) {
    auto sequence = std::make_unique<Sequence>();
    sequence->request = std::move(entry.request);
    sequence->sink = std::move(entry.sink);
    if (absl::Status status = CheckRequest(sequence->request); !status.ok()) {
      sequence->sink->OnFailed(status);
      continue;
    }
    if (absl::Status status = sequence->Prepare(parts); !status.ok()) {
      sequence->sink->OnFailed(status);
      continue;
    }
    sequence->arrival = arrivals_++;
    if (sequence->TakeEarlierOutput()) waiting_.push_back(std::move(sequence));
  }
  for (const auto& [id, reason] : cancelled) {
    for (auto& sequence : waiting_) {
      if (sequence->request.id == id) sequence->Fail(reason);
    }
    for (auto& sequence : running_) {
      if (sequence->request.id == id) sequence->Fail(reason);
    }
  }
  const absl::Time now = absl::Now();
  const auto expire = [&](Sequence& sequence) {
    if (!sequence.done && now >= sequence.request.deadline) {
      sequence.Fail(absl::DeadlineExceededError("the request's deadline passed"));
    }
  };
  for (auto& sequence : waiting_) expire(*sequence);
  for (auto& sequence : running_) expire(*sequence);
  return true;
}

// Those that have ended go; those that were preempted wait again.
void Engine::Impl::DropEnded() {
  for (auto& sequence : running_) {
    if (sequence->slot < 0 && !sequence->done) waiting_.push_back(std::move(sequence));
  }
  std::erase(running_, nullptr);
  std::erase_if(waiting_, [](const auto& sequence) { return sequence->done; });
  std::erase_if(running_, [](const auto& sequence) { return sequence->done && sequence->slot < 0; });
  constraints_.DropUnused();
}

absl::Status Engine::Impl::Release(Sequence& sequence) {
  if (options_.ranks != nullptr) options_.ranks->OnClose(sequence.slot);
  if (prefixes_ != nullptr) {
    prefixes_->Close(sequence.slot);
    // Whatever was the cause, it may be in what others would begin with.
    if (sequence.had_fault) prefixes_->Clear();
  }
  return table_->Close(std::exchange(sequence.slot, -1));
}

// A slot is given back when no round in flight has a part of it.
absl::Status Engine::Impl::ReleaseEnded() {
  for (auto& sequence : running_) {
    if (sequence->done && sequence->rounds_in_flight == 0 && sequence->slot >= 0)
      DFLASH_RETURN_IF_ERROR(Release(*sequence));
  }
  DropEnded();
  return absl::OkStatus();
}

void Engine::Impl::FailAll(const absl::Status& status) {
  rounds_->Abandon();
  rounds_in_flight_.clear();
  for (auto& sequence : waiting_) sequence->Fail(status);
  for (auto& sequence : running_) sequence->Fail(status);
  std::vector<NewRequest> submitted;
  {
    absl::MutexLock lock(&mutex_);
    submitted.swap(submitted_);
  }
  for (NewRequest& entry : submitted) entry.sink->OnFailed(status);
  for (auto& sequence : running_) {
    if (sequence->slot >= 0) (void)Release(*sequence);  // the group is going away
  }
  waiting_.clear();
  running_.clear();
  PublishGauges();
}

// --- one step
// --------------------------------------------------------------------------------------------------------

SchedulerSnapshot Engine::Impl::Snapshot() const {
  SchedulerSnapshot snapshot;
  const auto describe = [](const Sequence& sequence) {
    return ScheduledRequest{.arrival = sequence.arrival,
                            .client = sequence.request.client,
                            .priority = sequence.request.priority,
                            .overtaken = sequence.overtaken,
                            .prompt_tokens = sequence.prompt_size(),
                            .max_tokens = sequence.request.max_tokens,
                            .emitted_tokens = sequence.emitted()};
  };
  for (const auto& sequence : running_) {
    int64_t drafts = 0;
    if (Speculates(*sequence)) {
      drafts = drafter_->max_drafts();
      if (sequence->request.max_draft_tokens > 0)
        drafts = std::min<int64_t>(drafts, sequence->request.max_draft_tokens);
    }
    const auto pages = static_cast<int64_t>(table_->pages_of(sequence->slot).size());
    snapshot.running.push_back(
        {.request = describe(*sequence),
         .stored = sequence->stored,
         .rounds_in_flight = sequence->rounds_in_flight,
         .max_drafts = drafts,
         .whole_blocks = drafts > 0 && WantsWholeBlocks(*sequence),
         .pages = pages,
         .released_pages = prefixes_ == nullptr ? pages : prefixes_->PagesAfter(sequence->slot),
         .paused_steps = sequence->paused_steps,
         .ended = sequence->done});
  }
  std::vector<PrefixCache::Hit> hits(waiting_.size());
  const bool looks_up = prefixes_ != nullptr && table_->free_slots() > 0;
  for (size_t i = 0; i < waiting_.size(); ++i) {
    const GenerationRequest& request = waiting_[i]->request;
    if (looks_up && waiting_[i]->begins_with_cached())
      hits[i] = prefixes_->Find(request.cache_salt, request.prompt_tokens);
    // Pages that others hold anyway come at no cost.
    snapshot.waiting.push_back({.request = describe(*waiting_[i]), .cached_pages = hits[i].pinned_pages});
  }
  if (looks_up) NumberPrompts(hits, snapshot);
  snapshot.free_slots = table_->free_slots();
  snapshot.free_pages = table_->free_pages() + (prefixes_ == nullptr ? 0 : prefixes_->evictable_pages());
  snapshot.max_prefill_rows = options_.max_prefill_tokens;
  snapshot.block_rows = block_rows();
  snapshot.max_verify_rows = options_.max_verify_rows;
  if (options_.adaptive_blocks && drafter_ != nullptr) snapshot.blocks = &blocks_;
  return snapshot;
}

// Several outputs of one prompt may have been asked for, or many ask the same. Behind one that runs it, the
// others have only the rows since its last page to run. `hits` are what the waiting ones would find now.
void Engine::Impl::NumberPrompts(const std::vector<PrefixCache::Hit>& hits,
                                 SchedulerSnapshot& snapshot) const {
  for (size_t i = 0; i < waiting_.size(); ++i) {
    const GenerationRequest& request = waiting_[i]->request;
    const bool could_find_more = waiting_[i]->prompt_size() - 1 - hits[i].tokens >= kPageTokens;
    if (!request.use_prefix_cache || !could_find_more || snapshot.waiting[i].request.prompt >= 0) continue;
    const auto is_same = [&](const Sequence& other) {
      return other.request.use_prefix_cache && other.request.cache_salt == request.cache_salt &&
             other.request.prompt_tokens == request.prompt_tokens;
    };
    const auto number = static_cast<int64_t>(i);
    for (size_t j = i; j < waiting_.size(); ++j) {
      if (is_same(*waiting_[j])) snapshot.waiting[j].request.prompt = number;
    }
    for (size_t j = 0; j < running_.size(); ++j) {
      if (is_same(*running_[j])) snapshot.running[j].request.prompt = number;
    }
  }
}

absl::Status Engine::Impl::Admit() {
  const std::vector<int64_t> admitted = PlanAdmission(Snapshot());
  for (const int64_t index : admitted) {
    std::unique_ptr<Sequence> sequence = std::move(waiting_[static_cast<size_t>(index)]);
    DFLASH_RETURN_IF_ERROR(Open(*sequence));
    for (const auto& other : waiting_) {
      if (other != nullptr && other->arrival < sequence->arrival) ++other->overtaken;
    }
    running_.push_back(std::move(sequence));
  }
  std::erase(waiting_, nullptr);
  return absl::OkStatus();
}

// Gives a waiting request a slot, and in it what the prefix cache has of its prompt. One that was preempted
// starts over, and nobody is told.
absl::Status Engine::Impl::Open(Sequence& sequence) {
  DFLASH_ASSIGN_OR_RETURN(sequence.slot, table_->Open());
  const GenerationRequest& request = sequence.request;
  StateCheckpoint begin;
  if (prefixes_ != nullptr && request.use_prefix_cache) {
    DFLASH_ASSIGN_OR_RETURN(const PrefixCache::Hit hit,
                            prefixes_->Open(sequence.slot, request.cache_salt, request.prompt_tokens,
                                            sequence.begins_with_cached()));
    begin = {.position = hit.tokens, .index = hit.checkpoint};
    if (sequence.begins_with_cached()) {
      prefixes_looked_up_.push_back({.prompt_tokens = sequence.prompt_size(),
                                     .page_tokens = hit.page_tokens,
                                     .state_tokens = hit.state_tokens,
                                     .tokens = hit.tokens});
    }
  }
  if (options_.ranks != nullptr) {
    options_.ranks->OnOpen(sequence.slot, request.sampling, begin);
    if (begin.position > 0) options_.ranks->OnGrow(sequence.slot, table_->pages_of(sequence.slot));
  }
  DFLASH_RETURN_IF_ERROR(OpenSlot(sequence.slot, begin, target_, drafter_, table_));
  sequence.stored = begin.position;
  sequence.paused_steps = 0;
  sequence.origin = sequence.started     ? ContextOrigin::kResumed
                    : begin.position > 0 ? ContextOrigin::kPrefix
                                         : ContextOrigin::kCold;
  if (std::exchange(sequence.started, true)) return absl::OkStatus();
  sequence.prefill_start = sequence.first_token = absl::Now();
  sequence.sink->OnStarted({.prompt_tokens = sequence.prompt_size(),
                            .cached_tokens = begin.position,
                            .sent_text = std::move(sequence.sent_text)});
  return absl::OkStatus();
}

// The plan of this step, once nothing that it depends on is still running.
absl::StatusOr<StepPlan> Engine::Impl::Plan(StepReport& report) {
  StepPlan plan = PlanStep(Snapshot());
  // Rules depend on all that was emitted.
  const bool needs_results = plan.needs_results() || ProcessingOf(plan.verify).has_rules;
  if (!needs_results || rounds_->in_flight() == 0) return plan;
  // Such rows run between rounds; tokens that are there already do not wait for them.
  while (rounds_->in_flight() > 0) DFLASH_RETURN_IF_ERROR(CollectRound(report));
  DFLASH_RETURN_IF_ERROR(ReleaseEnded());
  return PlanStep(Snapshot());
}

// Takes slots and pages from those that the plan preempts and gives pages to those that run.
absl::Status Engine::Impl::MakeRoom(const StepPlan& plan, StepReport& report) {
  for (const int64_t index : plan.preempt) {
    DFLASH_RETURN_IF_ERROR(Release(*running_[static_cast<size_t>(index)]));
    ++report.preemptions;
  }
  for (const StepPlan::Reserve& reserve : plan.reserve) {
    DFLASH_RETURN_IF_ERROR(ReservePages(*running_[static_cast<size_t>(reserve.sequence)], reserve.tokens));
  }
  return absl::OkStatus();
}

absl::Status Engine::Impl::ReservePages(const Sequence& sequence, int64_t tokens) {
  const std::vector<int32_t>& pages = table_->pages_of(sequence.slot);
  const size_t before = pages.size();
  if (prefixes_ != nullptr)
    prefixes_->MakeRoom((tokens + kPageTokens - 1) / kPageTokens - static_cast<int64_t>(before));
  DFLASH_RETURN_IF_ERROR(table_->Reserve(sequence.slot, tokens));
  if (options_.ranks != nullptr && pages.size() > before)
    options_.ranks->OnGrow(sequence.slot, {pages.begin() + static_cast<int64_t>(before), pages.end()});
  return absl::OkStatus();
}

absl::StatusOr<bool> Engine::Impl::Step() {
  StepClock clock;
  const absl::Time start = absl::Now();
  StepReport report;
  const int64_t constraint_work = constraints_.work_done();
  if (!TakeInbox()) return false;
  DFLASH_RETURN_IF_ERROR(ReleaseEnded());
  DFLASH_RETURN_IF_ERROR(Admit());
  DFLASH_ASSIGN_OR_RETURN(const StepPlan plan, Plan(report));
  DFLASH_RETURN_IF_ERROR(MakeRoom(plan, report));
  const KnownRows known = DescribeRows(plan);
  clock.Charge(report.schedule_time);
  // Pages that two preempted sequences shared count as free only when both have left.
  if (plan.empty() && plan.preempt.empty() && rounds_->in_flight() == 0 && !running_.empty())
    return absl::InternalError("no sequence can go on");
  for (auto& sequence : running_) ++sequence->paused_steps;
  for (Sequence* sequence : known.sequences) sequence->paused_steps = 0;
  if (!plan.empty()) DFLASH_RETURN_IF_ERROR(TellRanks(plan, known));
  if (!known.sequences.empty()) DFLASH_RETURN_IF_ERROR(RunKnownRows(known, report));
  if (!plan.verify.empty()) DFLASH_RETURN_IF_ERROR(EnqueueRound(plan));
  const int64_t stay = plan.verify.empty() ? 0 : options_.rounds_ahead;
  bool worked = !plan.empty() || !plan.preempt.empty();
  while (rounds_->in_flight() > stay) {
    DFLASH_RETURN_IF_ERROR(CollectRound(report));
    worked = true;
  }
  DFLASH_RETURN_IF_ERROR(ReleaseEnded());
  PublishGauges();
  report.total_time = absl::Now() - start;
  report.constraint_work = constraints_.work_done() - constraint_work;
  const bool has_news = report.prefill_rows + report.refed_rows + report.verify_rows > 0;
  if (has_news) report.prefixes = std::exchange(prefixes_looked_up_, {});
  if (has_news && prefixes_ != nullptr) {
    const auto since = [](int64_t now, int64_t& reported) { return now - std::exchange(reported, now); };
    report.evicted_pages = since(prefixes_->evicted_pages(), reported_evicted_pages_);
    report.evicted_checkpoints = since(prefixes_->evicted_checkpoints(), reported_evicted_checkpoints_);
  }
  if (has_news && options_.observer != nullptr) options_.observer->OnStep(report, Gauges());
  return worked;
}

KnownRows Engine::Impl::DescribeRows(const StepPlan& plan) {
  KnownRows known;
  known.batch.vocabulary = options_.vocabulary;
  const auto add = [&](const StepPlan::Rows& rows, Phase phase, const std::vector<int32_t>& tokens,
                       int64_t first) {
    Sequence& sequence = *running_[static_cast<size_t>(rows.sequence)];
    const auto begin = tokens.begin() + first;
    const bool ends_prompt = phase == Phase::kPrefill && first + rows.rows == sequence.prompt_size();
    known.sequences.push_back(&sequence);
    known.batch.sequences.push_back({.slot = sequence.slot,
                                     .phase = phase,
                                     .start_position = sequence.stored,
                                     .tokens = {begin, begin + rows.rows},
                                     .parents = {},
                                     .last_logits = ends_prompt && sequence.output.empty()});
  };
  for (const StepPlan::Rows& rows : plan.prefill) {
    const Sequence& sequence = *running_[static_cast<size_t>(rows.sequence)];
    add(rows, Phase::kPrefill, sequence.request.prompt_tokens, sequence.stored);
    SequenceRows& added = known.batch.sequences.back();
    const int64_t end = sequence.stored + rows.rows;
    if (sequence.scores_prompt() && std::min(end, sequence.prompt_size() - 1) > sequence.scored) {
      added.log_probs = sequence.request.prompt_log_probs;
      if (end < sequence.prompt_size())
        added.next_token = sequence.request.prompt_tokens[static_cast<size_t>(end)];
    }
    if (prefixes_ == nullptr) continue;
    added.checkpoints =
        prefixes_->PlanCheckpoints(sequence.slot, sequence.stored, sequence.stored + rows.rows);
  }
  for (const StepPlan::Rows& rows : plan.refeed) {
    const Sequence& sequence = *running_[static_cast<size_t>(rows.sequence)];
    add(rows, Phase::kVerify, sequence.output, sequence.stored - sequence.prompt_size());
  }
  return known;
}

// Sends the step's control flow to the other ranks, if there are any, before anything of it runs.
absl::Status Engine::Impl::TellRanks(const StepPlan& plan, const KnownRows& known) {
  if (options_.ranks == nullptr) return absl::OkStatus();
  std::vector<RankLeader::VerifyRows> verify;
  int64_t draft_sequences = 0;
  for (const StepPlan::Verify& planned : plan.verify) {
    verify.push_back(
        {.slot = running_[static_cast<size_t>(planned.sequence)]->slot, .max_rows = 1 + planned.max_drafts});
    draft_sequences += planned.max_drafts > 0;
  }
  return options_.ranks->Begin(known.batch.sequences, known.Processing(), verify, ProcessingOf(plan.verify),
                               draft_sequences, plan.block.rows);
}

// Runs rows whose tokens are known, commits all of them and makes their taps drafter context. A new prompt
// that is through gets its first token, which becomes the anchor; where all that was emitted has been fed
// again, decoding goes on.
absl::Status Engine::Impl::RunKnownRows(const KnownRows& known, StepReport& report) {
  StepClock clock;
  report.sequences += static_cast<int64_t>(known.sequences.size());
  DFLASH_ASSIGN_OR_RETURN(ForwardResult forward, target_->Forward(known.batch));
  DFLASH_RETURN_IF_ERROR(stream_->Synchronize());  // for the times: a moment among milliseconds
  clock.Charge(report.forward_time);
  DFLASH_ASSIGN_OR_RETURN(const PromptSampler::Tokens sampled, prompt_sampler_.Sample(known, forward));
  clock.Charge(report.sample_time);
  std::vector<Target::Accepted> refed;
  std::vector<Drafter::CommittedRows> committed;
  for (size_t i = 0; i < known.sequences.size(); ++i) {
    const SequenceRows& rows = known.batch.sequences[i];
    const int64_t count = forward.rows[i].count;
    if (rows.phase == Phase::kVerify) refed.push_back({.slot = rows.slot, .rows = count});
    (rows.phase == Phase::kVerify ? report.refed_rows : report.prefill_rows) += count;
    committed.push_back({.slot = rows.slot,
                         .phase = rows.phase,
                         .first_row = forward.rows[i].first,
                         .row_count = count,
                         .start_position = rows.start_position});
  }
  if (!refed.empty()) DFLASH_RETURN_IF_ERROR(target_->Commit(refed));
  if (drafter_ != nullptr) DFLASH_RETURN_IF_ERROR(drafter_->Ingest(forward.taps, committed));
  clock.Charge(report.commit_time);
  for (size_t i = 0; i < known.sequences.size(); ++i) {
    Sequence& sequence = *known.sequences[i];
    sequence.stored += forward.rows[i].count;
    const SequenceRows& rows = known.batch.sequences[i];
    if (prefixes_ != nullptr && rows.phase == Phase::kPrefill)
      prefixes_->OnPrefilled(sequence.slot, sequence.stored, rows.checkpoints);
    sequence.EmitPromptLogProbs(rows.start_position, std::move(forward.log_probs[i]));
    if (known.batch.sequences[i].last_logits) {
      sequence.first_token = absl::Now();
      sequence.report.prefill_time = sequence.first_token - sequence.prefill_start;
      const auto row = static_cast<size_t>(forward.logits_rows[i].first);
      std::vector<TokenLogProbs> log_probs;
      if (!sampled.log_probs.empty()) log_probs.push_back(sampled.log_probs[row]);
      sequence.Emit({sampled.tokens[row]}, log_probs, nullptr);
      report.numeric_faults += sequence.had_fault;
    }
    if (sequence.done || !sequence.at_anchor()) continue;
    DFLASH_RETURN_IF_ERROR(table_->CheckLengths(sequence.slot, sequence.stored, drafter_ != nullptr));
    DFLASH_RETURN_IF_ERROR(rounds_->Start(sequence.slot, sequence.ToDecodeState()));
  }
  clock.Charge(report.detokenize_time);
  return absl::OkStatus();
}

// As KnownRows::Processing, of a decode round.
RowProcessing Engine::Impl::ProcessingOf(const std::vector<StepPlan::Verify>& verify) const {
  RowProcessing processing;
  for (const StepPlan::Verify& member : verify) {
    const Sequence& sequence = *running_[static_cast<size_t>(member.sequence)];
    processing.has_rules |= sequence.rules != nullptr;
    processing.log_probs = std::max(processing.log_probs, sequence.request.log_probs);
  }
  return processing;
}

absl::Status Engine::Impl::EnqueueRound(const StepPlan& plan) {
  std::vector<DecodeRounds::Member> members;
  RoundInFlight round = {.sequences = {}, .block = plan.block};
  for (const StepPlan::Verify& verify : plan.verify) {
    Sequence& sequence = *running_[static_cast<size_t>(verify.sequence)];
    members.push_back({.slot = sequence.slot,
                       .max_drafts = verify.max_drafts,
                       .reach = ReachOf(sequence.request.sampling),
                       .has_rules = sequence.rules != nullptr,
                       .log_probs = sequence.request.log_probs,
                       .least_survival = WantsWholeBlocks(sequence) ? 0 : options_.least_survival});
    round.sequences.push_back(&sequence);
    round.rows += 1 + verify.max_drafts;
    round.drafting += verify.max_drafts > 0;
    ++sequence.rounds_in_flight;
  }
  rounds_in_flight_.push_back(std::move(round));
  ++blocks_.rounds_since_probe;
  if (plan.block.reason == BlockReason::kBest) {
    blocks_.rows = plan.block.rows;
  } else if (plan.block.reason == BlockReason::kProbe) {
    blocks_.rounds_since_probe = 0;
    blocks_.seconds_since_probe = 0;
  }
  const std::vector<Sequence*>& sequences = rounds_in_flight_.back().sequences;
  const auto describe_rules = [&sequences](size_t member, std::span<const int32_t> drafts, size_t first_row,
                                           RuleBatch& batch) {
    return sequences[member]->rules->Describe(drafts, first_row, batch);
  };
  return rounds_->Enqueue(members, plan.block.rows, describe_rules);
}

// Takes over what a round has shown of its length.
void Engine::Impl::Learn(const RoundInFlight& round, const DecodeRounds::Outcome& outcome,
                         absl::Duration host_time) {
  for (const DecodeRounds::SequenceOutcome& what : outcome.sequences) {
    // What was cut counts as refused: a longer block would have been cut, too.
    if (what.result.rows > 1)
      blocks_.survival.Observe(what.result.rows - 1 + what.cut_drafts, what.result.accepted);
  }
  if (round.block.rows == 1 && round.block.reason == BlockReason::kBest) blocks_.survival.Fade();
  const auto sequences = static_cast<int64_t>(round.sequences.size());
  // Where the host reads behind the device, the device's time is all that counts.
  double seconds = absl::ToDoubleSeconds(outcome.device_time() +
                                         (options_.rounds_ahead == 0 ? host_time : absl::ZeroDuration()));
  if (options_.round_cost) seconds = options_.round_cost(round.block.rows, sequences);
  blocks_.seconds_since_probe += seconds;
  if (!outcome.is_settled) return;
  if (round.drafting == 0) {
    blocks_.costs.Observe(1, sequences, seconds);
    return;
  }
  // What it would have cost if all had drafted; of few who do it says little.
  const double share = static_cast<double>(round.drafting) / static_cast<double>(sequences);
  if (share < 0.25) return;
  seconds = (seconds - (1 - share) * blocks_.costs.Estimate(1, sequences)) / share;
  const int64_t drafting_rows = round.rows - (sequences - round.drafting);
  const int64_t rows =
      blocks_.uniform_rows ? round.block.rows : (2 * drafting_rows + round.drafting) / (2 * round.drafting);
  if (seconds > 0) blocks_.costs.Observe(rows, sequences, seconds);
}

// Rounds of no open slot run all their kernels and change nothing.
absl::Status Engine::Impl::WarmUp(int64_t sequences) {
  DFLASH_RETURN_IF_ERROR(rounds_->WarmUp(sequences));
  const bool can_run_alone = options_.ranks == nullptr && target_->communicator().size() == 1;
  if (!options_.adaptive_blocks || drafter_ == nullptr || !can_run_alone) return absl::OkStatus();
  for (const int64_t rows : BlockLengths(block_rows())) {
    double least = 0;
    for (int use = 0; use < 4; ++use) {
      DFLASH_RETURN_IF_ERROR(rounds_->Enqueue({{.slot = 0, .max_drafts = rows - 1}}, rows));
      DFLASH_ASSIGN_OR_RETURN(const DecodeRounds::Outcome outcome, rounds_->Collect());
      const double seconds =
          options_.round_cost ? options_.round_cost(rows, 1) : absl::ToDoubleSeconds(outcome.device_time());
      if (outcome.is_settled && (least == 0 || seconds < least)) least = seconds;
    }
    blocks_.costs.Assume(rows, 1, least);
  }
  return absl::OkStatus();
}

// Reads what the oldest round in flight has done and hands the tokens out.
absl::Status Engine::Impl::CollectRound(StepReport& report) {
  DFLASH_ASSIGN_OR_RETURN(DecodeRounds::Outcome outcome, rounds_->Collect());
  const RoundInFlight round = std::move(rounds_in_flight_.front());
  rounds_in_flight_.pop_front();
  report.draft_time += outcome.draft_time;
  report.forward_time += outcome.forward_time;
  report.sample_time += outcome.sample_time;
  report.commit_time += outcome.commit_time + outcome.ingest_time;
  report.captured = rounds_->captured();
  report.blocks.push_back({.rows = round.block.rows, .reason = round.block.reason});
  StepClock clock;
  absl::Duration host_time;
  for (size_t i = 0; i < round.sequences.size(); ++i) {
    Sequence& sequence = *round.sequences[i];
    DecodeRounds::SequenceOutcome& what = outcome.sequences[i];
    --sequence.rounds_in_flight;
    sequence.stored = what.result.position;
    report.verify_rows += what.result.rows;
    // It had ended before: on the device, or by a stop string, a cancellation or its deadline.
    if (what.result.rows == 0 || sequence.done) continue;
    ++report.sequences;
    if (std::min(what.member.max_drafts, sequence.room() - 1) == 0) {
      report.not_speculated.emplace_back(ReasonNotToSpeculate(sequence, round.block));
    }
    const RoundReport of_sequence = {.drafted = what.result.rows - 1, .accepted = what.result.accepted};
    DecodedRound decoded = {
        .round = of_sequence,
        .emitted = what.result.emitted,
        .confidences = std::move(what.confidences),
        .cut_drafts = what.cut_drafts,
        .temperature = sequence.request.sampling.temperature,
        .other_law = sequence.rules != nullptr && sequence.rules->ChangesLaw(what.result.rows),
        .content = sequence.content.current(),
        .origin = sequence.origin,
        .context_tokens = what.result.position - what.result.emitted};
    if (drafter_ != nullptr) {
      decoded.context_missing =
          std::min<int64_t>(table_->lengths(sequence.slot).draft_context_start, decoded.context_tokens);
    }
    report.rounds.push_back(std::move(decoded));
    sequence.report.draft_time += outcome.draft_time;
    sequence.report.verify_time += outcome.forward_time;
    sequence.Emit(what.emitted, what.log_probs, &of_sequence);
    report.numeric_faults += sequence.had_fault;
  }
  clock.Charge(host_time);
  report.detokenize_time += host_time;
  Learn(round, outcome, host_time);
  return absl::OkStatus();
}

const char* Engine::Impl::ReasonNotToSpeculate(const Sequence& sequence, const BlockChoice& block) const {
  if (drafter_ == nullptr) return "disabled_server";
  if (!refused_.empty()) return refused_.c_str();
  if (!Speculates(sequence)) return "disabled_request";
  if (sequence.room() == 1) return "near_max_len";
  return block.low_acceptance ? "auto_low_accept" : "auto_batch";
}

void Engine::Impl::PublishGauges() {
  absl::MutexLock lock(&mutex_);
  gauges_ = {.running = static_cast<int64_t>(running_.size()),
             .waiting = static_cast<int64_t>(waiting_.size()),
             .state_slots = table_->slots(),
             .pages_total = table_->pages(),
             .pages_free = table_->free_pages(),
             .constraint_bytes = constraints_.bytes()};
  if (prefixes_ == nullptr) return;
  gauges_.pages_evictable = prefixes_->evictable_pages();
  gauges_.checkpoints_total = prefixes_->checkpoints();
  gauges_.checkpoints_used = prefixes_->used_checkpoints();
}

absl::Status Engine::Impl::Run() {
  while (true) {
    absl::StatusOr<bool> worked = Step();
    if (!worked.ok()) {
      FailAll(absl::UnavailableError(absl::StrCat("the worker group failed: ", worked.status().message())));
      return worked.status();
    }
    absl::MutexLock lock(&mutex_);
    if (stop_) break;
    if (*worked) continue;
    // Nothing to run: wait for a request, a cancellation, Stop, or the deadline of a request that waits for
    // room.
    absl::Time wake = absl::InfiniteFuture();
    for (const auto& sequence : waiting_) wake = std::min(wake, sequence->request.deadline);
    mutex_.AwaitWithDeadline(absl::Condition(
                                 +[](Impl* self) ABSL_EXCLUSIVE_LOCKS_REQUIRED(self->mutex_) {
                                   return self->stop_ || !self->submitted_.empty() ||
                                          !self->cancelled_.empty();
                                 },
                                 this),
                             wake);
    if (stop_) break;
  }
  FailAll(absl::UnavailableError("the worker group is shutting down"));
  return absl::OkStatus();
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() = default;

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options, Target* target,
                                                       Drafter* drafter, SequenceTable* table,
                                                       const Tokenizer* tokenizer, const Stream& stream) {
  EngineOptions checked = options;
  if (checked.max_context_tokens == 0) checked.max_context_tokens = target->config().max_position_embeddings;
  if (checked.max_context_tokens < 2 ||
      checked.max_context_tokens > target->config().max_position_embeddings) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_context_tokens must be in [2, ", target->config().max_position_embeddings, "]"));
  }
  checked.max_prefill_tokens = checked.max_prefill_tokens / kPageTokens * kPageTokens;
  if (checked.max_prefill_tokens < kPageTokens)
    return absl::InvalidArgumentError("max_prefill_tokens must be at least 64");
  if (checked.rounds_ahead < 0 || checked.rounds_ahead > 3)
    return absl::InvalidArgumentError("rounds_ahead must be in [0, 3]");
  if (checked.vocabulary < 1 || checked.vocabulary > target->config().vocab_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("vocabulary must be in [1, ", target->config().vocab_size, "]"));
  }
  if (!target->communicator().capturable()) {
    // Its calls wait for the other ranks, so nothing is gained.
    checked.captured_rounds = false;
    checked.rounds_ahead = 0;
  }
  auto impl = std::make_unique<Impl>(checked, target, drafter, table, tokenizer, &stream);
  DFLASH_RETURN_IF_ERROR(impl->Allocate());
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

void Engine::Submit(GenerationRequest request, std::unique_ptr<RequestSink> sink) {
  impl_->Submit(std::move(request), std::move(sink));
}
void Engine::Cancel(const std::string& id, absl::Status reason) { impl_->Cancel(id, std::move(reason)); }
absl::Status Engine::WarmUp(int64_t sequences) { return impl_->WarmUp(sequences); }
void Engine::RefuseSpeculation(std::string reason) { impl_->RefuseSpeculation(std::move(reason)); }
absl::Status Engine::Run() { return impl_->Run(); }
absl::StatusOr<bool> Engine::Step() { return impl_->Step(); }
void Engine::Stop() { impl_->Stop(); }
EngineGauges Engine::Gauges() const { return impl_->Gauges(); }
int64_t Engine::max_context_tokens() const { return impl_->max_context_tokens(); }
int64_t Engine::max_verify_rows() const { return impl_->max_verify_rows(); }

}  // namespace dflash
