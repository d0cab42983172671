#include "worker/engine/scheduler.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "kernels/batch/segments.h"

namespace dflash {
namespace {

int64_t PagesFor(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

bool IsOverdue(const ScheduledRequest& request) { return request.overtaken >= kMaxOvertaken; }

// Smaller is more important.
auto ImportanceKey(const ScheduledRequest& request) {
  return std::tuple(!IsOverdue(request), -int64_t{request.priority}, request.arrival);
}

// Tokens that a request ever stores: the last one that it emits is not fed.
int64_t MostStored(const ScheduledRequest& request) { return request.prompt_tokens + request.max_tokens - 1; }

// Tokens that a request has stored when it begins to decode, or decodes again.
int64_t StoredAtDecode(const ScheduledRequest& request) {
  return request.prompt_tokens + std::max<int64_t>(request.emitted_tokens - 1, 0);
}

// Tokens for which a request needs pages soon.
int64_t SoonStored(const ScheduledRequest& request, int64_t rounds, int64_t block_rows) {
  return std::min(StoredAtDecode(request) + rounds * block_rows, MostStored(request));
}

bool InPrompt(const RunningSequence& sequence) { return sequence.stored < sequence.request.prompt_tokens; }
bool InRefeed(const RunningSequence& sequence) {
  return !InPrompt(sequence) && sequence.stored < StoredAtDecode(sequence.request);
}
int64_t Room(const RunningSequence& sequence) {
  return sequence.request.max_tokens - sequence.request.emitted_tokens - sequence.rounds_in_flight;
}

// Indices of the sequences that can go on, the most important one first.
std::vector<int64_t> ByImportance(const std::vector<RunningSequence>& running) {
  std::vector<int64_t> order;
  for (size_t i = 0; i < running.size(); ++i) {
    if (!running[i].ended) order.push_back(static_cast<int64_t>(i));
  }
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return ImportanceKey(running[static_cast<size_t>(a)].request) <
           ImportanceKey(running[static_cast<size_t>(b)].request);
  });
  return order;
}

// Who gets prefill rows first.
enum class PrefillOrder : uint8_t { kShortestFirst, kByImportance };

// Prefill rows of each running sequence.
std::vector<int64_t> SharePrefillRows(const SchedulerSnapshot& snapshot, PrefillOrder order) {
  const auto at = [&](int64_t i) -> const RunningSequence& {
    return snapshot.running[static_cast<size_t>(i)];
  };
  const auto remaining = [&](int64_t i) { return at(i).request.prompt_tokens - at(i).stored; };
  const auto key = [&](int64_t i) {
    const ScheduledRequest& request = at(i).request;
    const bool waits_long = at(i).paused_steps >= kMaxPausedSteps && order == PrefillOrder::kShortestFirst;
    const bool is_short_first = order == PrefillOrder::kShortestFirst && !waits_long;
    return std::tuple(!waits_long && !IsOverdue(request), -int64_t{request.priority},
                      is_short_first ? remaining(i) : 0, request.arrival);
  };
  std::vector<int64_t> prompts;
  for (size_t i = 0; i < snapshot.running.size(); ++i) {
    if (!snapshot.running[i].ended && InPrompt(snapshot.running[i]))
      prompts.push_back(static_cast<int64_t>(i));
  }
  std::sort(prompts.begin(), prompts.end(), [&](int64_t a, int64_t b) { return key(a) < key(b); });
  std::vector<int64_t> rows(snapshot.running.size(), 0);
  int64_t rows_left = snapshot.max_prefill_rows;
  bool ends_one = false;
  for (int64_t i : prompts) {
    // A prompt that ends in this step does not wait for rows of one that does not.
    if (ends_one && remaining(i) > rows_left) break;
    // A chunk ends on the 64-token grid or at the prompt's end, so that no bit depends on how a prompt was
    // cut.
    const int64_t count = remaining(i) <= rows_left ? remaining(i) : rows_left / kPageTokens * kPageTokens;
    rows[static_cast<size_t>(i)] = count;
    ends_one |= count == remaining(i);
    rows_left -= count;
  }
  return rows;
}

// Rows of a block when all blocks together keep to the limit. `drafts` are the most of each sequence.
int64_t MostRows(const SchedulerSnapshot& snapshot, const std::vector<int64_t>& drafts) {
  if (snapshot.max_verify_rows == 0) return snapshot.block_rows;
  const auto drafting = std::count_if(drafts.begin(), drafts.end(), [](int64_t most) { return most > 0; });
  const int64_t plain = static_cast<int64_t>(drafts.size()) - drafting;
  return std::clamp<int64_t>((snapshot.max_verify_rows - plain) / std::max<int64_t>(drafting, 1), 1,
                             snapshot.block_rows);
}

BlockChoice BlockOf(const SchedulerSnapshot& snapshot, const std::vector<int64_t>& drafts) {
  if (std::all_of(drafts.begin(), drafts.end(), [](int64_t most) { return most == 0; }))
    return {.rows = 1, .reason = BlockReason::kNoDrafts};
  const int64_t most_rows = MostRows(snapshot, drafts);
  if (snapshot.blocks != nullptr)
    return ChooseBlock(drafts, snapshot.block_rows, most_rows, *snapshot.blocks);
  const BlockReason reason = most_rows < snapshot.block_rows ? BlockReason::kRowLimit : BlockReason::kWhole;
  return {.rows = most_rows, .reason = reason};
}

}  // namespace

std::vector<int64_t> PlanAdmission(const SchedulerSnapshot& snapshot) {
  // Pages that running sequences lack are theirs already.
  int64_t pages = snapshot.free_pages;
  std::map<std::string, int64_t> sequences_of;  // by client
  std::map<int64_t, int32_t> priority_of;       // of prompts that are run, the highest
  const auto runs_prompt = [&](const ScheduledRequest& request) {
    const auto [entry, is_new] = priority_of.try_emplace(request.prompt, request.priority);
    entry->second = std::max(entry->second, request.priority);
  };
  const auto awaits_prefix = [&](int64_t i) {
    const ScheduledRequest& request = snapshot.waiting[static_cast<size_t>(i)].request;
    const auto entry = request.prompt < 0 ? priority_of.end() : priority_of.find(request.prompt);
    return entry != priority_of.end() && entry->second >= request.priority;
  };
  for (const RunningSequence& sequence : snapshot.running) {
    if (sequence.ended) continue;
    if (InPrompt(sequence)) runs_prompt(sequence.request);
    ++sequences_of[sequence.request.client];
    const int64_t soon = SoonStored(sequence.request, 2 + sequence.rounds_in_flight, snapshot.block_rows);
    pages -= std::max<int64_t>(PagesFor(soon) - sequence.pages, 0);
  }
  std::vector<int64_t> left(snapshot.waiting.size());
  std::iota(left.begin(), left.end(), 0);
  std::vector<int64_t> admitted;
  while (static_cast<int64_t>(admitted.size()) < snapshot.free_slots) {
    std::erase_if(left, awaits_prefix);
    if (left.empty()) break;
    const auto key = [&](int64_t i) {
      const ScheduledRequest& request = snapshot.waiting[static_cast<size_t>(i)].request;
      return std::tuple(!IsOverdue(request), -int64_t{request.priority}, request.emitted_tokens == 0,
                        sequences_of[request.client], request.arrival);
    };
    const auto next =
        std::min_element(left.begin(), left.end(), [&](int64_t a, int64_t b) { return key(a) < key(b); });
    const WaitingRequest& waiting = snapshot.waiting[static_cast<size_t>(*next)];
    const int64_t needed =
        PagesFor(SoonStored(waiting.request, 2, snapshot.block_rows)) - waiting.cached_pages;
    if (needed > pages) break;
    pages -= needed;
    ++sequences_of[waiting.request.client];
    runs_prompt(waiting.request);
    admitted.push_back(*next);
    left.erase(next);
  }
  return admitted;
}

namespace {

StepPlan PlanStep(const SchedulerSnapshot& snapshot, PrefillOrder prefill_order) {
  StepPlan plan;
  const std::vector<int64_t> order = ByImportance(snapshot.running);
  const std::vector<int64_t> prefill_rows = SharePrefillRows(snapshot, prefill_order);
  int64_t free = snapshot.free_pages;
  std::vector<char> preempted(snapshot.running.size(), 0);
  size_t last = order.size();  // order[last, ..) have nothing more to give
  for (size_t n = 0; n < order.size(); ++n) {
    const int64_t index = order[n];
    if (preempted[static_cast<size_t>(index)]) continue;
    const RunningSequence& sequence = snapshot.running[static_cast<size_t>(index)];
    // What it would run, and how many tokens its stores then may have.
    int64_t rows = 0, stored = 0;
    if (InPrompt(sequence)) {
      rows = prefill_rows[static_cast<size_t>(index)];
      stored = sequence.stored + rows;
    } else if (InRefeed(sequence)) {
      rows = std::min(StoredAtDecode(sequence.request) - sequence.stored, snapshot.block_rows);
      stored = sequence.stored + rows;
    } else if (Room(sequence) > 0) {
      rows = 1;
      stored = SoonStored(sequence.request, 1 + sequence.rounds_in_flight, snapshot.block_rows);
    }
    if (rows == 0) continue;
    // Its pages: free ones, then those of the least important sequences.
    const auto lacks = [&] { return PagesFor(stored) - sequence.pages; };
    while (lacks() > free && last > n + 1) {
      const auto victim = static_cast<size_t>(order[--last]);
      if (snapshot.running[victim].pages == 0) continue;
      free += snapshot.running[victim].released_pages;
      preempted[victim] = 1;
      plan.preempt.push_back(order[last]);
    }
    if (lacks() > free && InPrompt(sequence)) {
      stored = (sequence.pages + free) * kPageTokens;
      rows = std::max<int64_t>(stored - sequence.stored, 0);
    } else if (lacks() > free) {
      rows = 0;
    }
    if (rows == 0) continue;
    if (lacks() > 0) {
      free -= lacks();
      plan.reserve.push_back({.sequence = index, .tokens = stored});
    }
    if (InPrompt(sequence)) {
      plan.prefill.push_back({.sequence = index, .rows = rows});
    } else if (InRefeed(sequence)) {
      plan.refeed.push_back({.sequence = index, .rows = rows});
    } else {
      // The last row always emits a token of the target's own, so at most room - 1 drafts can be used.
      plan.verify.push_back(
          {.sequence = index, .max_drafts = std::min(sequence.max_drafts, Room(sequence) - 1)});
    }
  }
  // By what requests allow, not by what is left of them, or every end of one would make the length change.
  std::vector<int64_t> drafts;
  for (const StepPlan::Verify& member : plan.verify)
    drafts.push_back(snapshot.running[static_cast<size_t>(member.sequence)].max_drafts);
  plan.block = BlockOf(snapshot, drafts);
  const int64_t chosen = plan.block.rows;
  for (StepPlan::Verify& member : plan.verify) {
    const RunningSequence& sequence = snapshot.running[static_cast<size_t>(member.sequence)];
    const int64_t most = sequence.whole_blocks ? MostRows(snapshot, drafts) : chosen;
    member.max_drafts = std::min(member.max_drafts, most - 1);
    if (sequence.max_drafts == 0 || most <= plan.block.rows) continue;
    plan.block = {.rows = most, .reason = BlockReason::kAsked};
  }
  return plan;
}

}  // namespace

StepPlan PlanStep(const SchedulerSnapshot& snapshot) {
  StepPlan plan = PlanStep(snapshot, PrefillOrder::kShortestFirst);
  // The prompt that would have gone first finds no pages, which nobody may wait for.
  if (plan.empty()) plan = PlanStep(snapshot, PrefillOrder::kByImportance);
  return plan;
}

}  // namespace dflash
