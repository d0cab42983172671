// Decides what a step runs: pure functions of a snapshot, without clocks or threads.
//
// Importance orders everything that is scarce. More important is a request that is overdue (others that came
// later were admitted before it kMaxOvertaken times), then one of higher priority, then the one that came
// first. Pages go to the more important; when they run out, the least important sequence gives its own back
// and is run again later (preemption), so the most important one always moves on and nothing waits for ever.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "worker/engine/block_length.h"

namespace dflash {

inline constexpr int64_t kMaxOvertaken = 16;
inline constexpr int64_t kMaxPausedSteps = 3;

// What admission and steps know of a request.
struct ScheduledRequest {
  int64_t arrival = 0;  // its number in order of submission
  std::string client;   // whose it is
  int32_t priority = 0;
  int64_t overtaken = 0;  // how many that came later were admitted while it waited
  int64_t prompt_tokens = 0;
  int64_t max_tokens = 0;      // of the output
  int64_t emitted_tokens = 0;  // of the output, as far as the host knows
  // Requests with the same number (and none is -1) have the same prompt, and could share what the prefix
  // cache has not got yet.
  int64_t prompt = -1;
};

// A request with a state slot.
struct RunningSequence {
  ScheduledRequest request;
  // Tokens in its stores, as far as the host knows. Below prompt_tokens: the prompt is to be run. From there
  // to prompt_tokens + emitted_tokens - 1: emitted tokens are to be fed again, after a preemption. Equal to
  // that: it decodes, and the last emitted token is the anchor.
  int64_t stored = 0;
  int64_t rounds_in_flight = 0;  // each will emit at least one token
  int64_t max_drafts = 0;        // 0: speculation off for this request
  bool whole_blocks = false;     // it has max_drafts in every round, whatever the load
  int64_t pages = 0;             // that it holds
  int64_t released_pages = 0;    // of them, those that are free for others once it ends
  int64_t paused_steps = 0;      // the last steps, in a row, that had no rows of its prompt
  bool ended = false;            // keeps its slot only until the rounds in flight are over
};

// A request without a slot: new, or preempted.
struct WaitingRequest {
  ScheduledRequest request;
  int64_t cached_pages = 0;  // pages that it would share, at no cost to free_pages
};

struct SchedulerSnapshot {
  std::vector<RunningSequence> running;
  std::vector<WaitingRequest> waiting;
  int64_t free_slots = 0;
  int64_t free_pages = 0;        // free now, or as soon as somebody asks
  int64_t max_prefill_rows = 0;  // per step, a multiple of 64
  int64_t block_rows = 1;        // most rows of one sequence in a round: anchor and drafts
  int64_t max_verify_rows = 0;   // of a round, above which blocks get shorter; 0: no limit
  // What rounds cost and drafts gave, by which the block of a round gets its length; null: it has block_rows.
  const BlockStatistics* blocks = nullptr;  // not owned
};

// Which of the waiting requests get a slot now, by index, in this order. By importance; among requests of the
// same priority, those that have run before come first, then those of the client with the fewest sequences. A
// request needs pages for all that it has to run before it decodes on, and for two rounds; one that does not
// fit holds back those behind it, so that a long one is not starved by short ones. While
// one runs a prompt, others with the same prompt and no higher priority are passed over: they will find it in
// the prefix cache.
std::vector<int64_t> PlanAdmission(const SchedulerSnapshot& snapshot);

struct StepPlan {
  struct Rows {
    int64_t sequence = 0;  // index in running
    int64_t rows = 0;
  };
  struct Verify {
    int64_t sequence = 0;
    int64_t max_drafts = 0;  // at most this many drafts after the anchor; 0 = plain decoding
  };
  struct Reserve {
    int64_t sequence = 0;
    int64_t tokens = 0;  // positions [0, tokens) need pages
  };
  std::vector<int64_t> preempt;  // these give slot and pages back before anything else happens
  std::vector<Reserve> reserve;  // then these get the pages that they lack
  std::vector<Rows> prefill;     // next prompt tokens; a multiple of 64 unless it is the rest of the prompt
  std::vector<Rows> refeed;      // next emitted tokens, at most a block
  std::vector<Verify> verify;
  BlockChoice block;  // no member of the round has more rows

  bool empty() const { return prefill.empty() && refeed.empty() && verify.empty(); }
  // Its batch is described by the host, which must know what the rounds in flight have done.
  bool needs_results() const { return !prefill.empty() || !refeed.empty() || !preempt.empty(); }
};

// Every decoding sequence that has room verifies. Prompts share the prefill rows: the one with the fewest
// rows left first, so that a short one does not wait for a long one, and in the step in which one ends none
// that does not; but before them those that have waited for kMaxPausedSteps steps, the one that came first of
// them first, so that a long one does not wait for ever, however many short ones keep coming. A sequence that
// gets no pages pauses and keeps what it has.
StepPlan PlanStep(const SchedulerSnapshot& snapshot);

}  // namespace dflash
