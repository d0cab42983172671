// The group's leader at work: takes requests, runs steps, reports tokens. One step is schedule, prompts, a
// decode round, tokens of an earlier one (docs/life-of-a-request.md walks through it).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/device/graph.h"
#include "worker/engine/block_length.h"
#include "worker/engine/request.h"

namespace dflash {

class Drafter;
class RankLeader;
class SequenceTable;
class Stream;
class Target;
class Tokenizer;

// What the prefix cache had for a request that got its slot, in prompt tokens.
struct PrefixReport {
  int64_t prompt_tokens = 0;
  int64_t page_tokens = 0;   // keys and values, and with them the drafter's context
  int64_t state_tokens = 0;  // recurrent states
  int64_t tokens = 0;        // the least of these: what the request began with
};

// The length that a decode round's blocks had.
struct BlockReport {
  int64_t rows = 1;  // anchor and drafts; 1: plain decoding
  BlockReason reason = BlockReason::kWhole;
};

// A round as metrics see it: with what tells hard text from a broken integration.
struct DecodedRound {
  RoundReport round;
  int32_t emitted = 0;  // tokens; equal to the accepted drafts where one of them ended the output
  std::vector<float> confidences = {};  // of the drafts, by the drafter itself; empty where it has none
  int64_t cut_drafts = 0;               // that were not verified (EngineOptions::least_survival)
  float temperature = 0;
  // Penalties, a constraint and the like changed what the target says, which the drafter does not know of.
  bool other_law = false;
  ContentClass content = ContentClass::kText;  // at the anchor
  ContextOrigin origin = ContextOrigin::kCold;
  int64_t context_tokens = 0;   // before the anchor
  int64_t context_missing = 0;  // of them not in the drafter's context
};

// What one step did and how long its parts took; for metrics. A decode round counts in the step that reads
// its tokens, with the times that the device measured.
struct StepReport {
  int64_t prefill_rows = 0;
  int64_t refed_rows = 0;  // emitted tokens of resumed requests
  int64_t verify_rows = 0;
  int64_t sequences = 0;         // that had rows in this step
  int64_t constraint_work = 0;   // done by the automata of constraints (text/grammar/grammar.h)
  int64_t preemptions = 0;       // requests that gave slot and pages back, to be resumed later
  int64_t numeric_faults = 0;    // requests that ended since logits were no numbers
  bool captured = false;         // its rounds were captured graphs
  absl::Duration schedule_time;  // planning and bookkeeping
  absl::Duration draft_time;
  absl::Duration forward_time;  // target forward of all rows
  absl::Duration sample_time;
  absl::Duration commit_time;          // acceptance, commit of caches and ingestion of taps
  absl::Duration detokenize_time;      // tokens to text and events
  absl::Duration total_time;           // of the host
  std::vector<DecodedRound> rounds;    // one per sequence in decode
  std::vector<BlockReport> blocks;     // one per decode round
  std::vector<PrefixReport> prefixes;  // of requests that looked into the prefix cache
  std::vector<std::string>
      not_speculated;         // reason per decoding sequence that had no drafts: "disabled_request", ...
  int64_t evicted_pages = 0;  // of the prefix cache
  int64_t evicted_checkpoints = 0;  // likewise
};

// State of the pools and the queue, after a step.
struct EngineGauges {
  int64_t running = 0;  // sequences with a state slot
  int64_t waiting = 0;  // accepted or preempted, not holding a slot
  int64_t state_slots = 0;
  int64_t pages_total = 0;
  int64_t pages_free = 0;
  int64_t pages_evictable = 0;  // hold cached prefixes that nobody uses
  int64_t checkpoints_total = 0;
  int64_t checkpoints_used = 0;
  int64_t constraint_bytes = 0;  // of compiled constraints, in use or kept
};

// Called on the engine's thread; must not block.
class StepObserver {
 public:
  virtual ~StepObserver() = default;
  virtual void OnStep(const StepReport& report, const EngineGauges& gauges) = 0;
};

struct EngineOptions {
  int64_t max_context_tokens = 0;    // prompt and output of one request; 0: what the target allows
  int64_t max_prefill_tokens = 512;  // prefill rows in one step; rounded down to a multiple of 64
  // The block of every round gets the length that gives most tokens a second, by what rounds have cost and
  // how many drafts were accepted (worker/engine/block_length.h). Otherwise all blocks are whole ones.
  bool adaptive_blocks = false;
  // Drafts that their drafter gives less than this probability, together with all before them, are not
  // verified, in rounds that are not captured: there a row costs what it costs
  // (docs/adr/0022-unsure-drafts.md). 0: all are verified, as are those of requests that want whole blocks
  // (GenerationRequest::max_draft_tokens).
  double least_survival = 0;
  int64_t max_verify_rows = 0;  // of a round, above which blocks get shorter in any case; 0: no limit
  // Tests: what a round of so many rows a sequence, and so many sequences, is taken to have cost, in seconds.
  std::function<double(int64_t, int64_t)> round_cost;
  // Tokens that end a turn of a conversation: where the prefix cache keeps states
  // (worker/cache/prefix_cache.h). There is a prefix cache if the target has checkpoints.
  std::vector<int32_t> turn_end_tokens;
  int64_t vocabulary = 0;  // real token ids: only [0, vocabulary) is ever emitted
  // How decode rounds run; the defaults are the backend's. The text is the same either way.
  bool captured_rounds = Graph::IsCaptureCostly();
  // Rounds that the device may have been given before the tokens of the one that runs are read, so that it
  // never waits for the host. A sequence whose end the host cannot foresee runs as many empty rounds.
  int64_t rounds_ahead = Graph::IsCaptureCostly() ? 1 : 0;
  StepObserver* observer = nullptr;  // not owned, may be null
  RankLeader* ranks = nullptr;       // the group's other ranks; not owned, null: there are none
};

class Engine {
 public:
  // Target, drafter (null: speculation impossible), table, tokenizer (null: no text) and stream are not owned
  // and outlive the engine; only the engine's thread uses target, drafter and table. At most table->slots()
  // requests run at a time. InvalidArgument: options out of range. ResourceExhausted: no memory.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options, Target* target,
                                                        Drafter* drafter, SequenceTable* table,
                                                        const Tokenizer* tokenizer, const Stream& stream);
  ~Engine();

  // Makes ready what the first requests would otherwise wait for: captured rounds of up to `sequences`
  // sequences, and what a round of one sequence costs. Before the first step.
  absl::Status WarmUp(int64_t sequences);

  // Hands a request over; any thread. Never blocks and never fails itself: refusals arrive at the sink.
  // Requests wait here only for a slot or pages; the coordinator's queue is the real one.
  void Submit(GenerationRequest request, std::unique_ptr<RequestSink> sink);
  // Ends a request with OnFailed(reason) within one step; unknown or finished ids are ignored. Any thread.
  void Cancel(const std::string& id, absl::Status reason);

  // Runs steps until Stop(), sleeping while there is nothing to do. The calling thread becomes the engine's
  // thread. Returns non-OK when the group cannot go on (device lost, broken invariant); every request has
  // then been failed.
  absl::Status Run();
  // Runs one step if there is work and returns whether there was (tests; same thread rules as Run).
  absl::StatusOr<bool> Step();
  // Makes Run() return after the current step; requests left are failed with Unavailable. Any thread.
  void Stop();

  // From now on no request is drafted for, whatever it chooses; `reason` is what StepReport::not_speculated
  // says. Not while a round is in flight.
  void RefuseSpeculation(std::string reason);

  EngineGauges Gauges() const;  // any thread
  int64_t max_context_tokens() const;
  // EngineOptions::max_verify_rows.
  int64_t max_verify_rows() const;

 private:
  class Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dflash
