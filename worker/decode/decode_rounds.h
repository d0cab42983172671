// The decode loop as the device runs it: a round is draft, verify, sample, accept, commit and ingest of every
// sequence in decode, enqueued as a whole. What the next round needs stays in device memory, so the host may
// enqueue a round before it has read the tokens of the last one (docs/adr/0008-round-on-the-device.md).
//
// In a group every rank runs the same rounds: the same calls with the same members. What the device decides
// in them is rank 0's: its states, rows and accepted counts are broadcast in the stream, so that one rank
// decides.
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/device/buffer.h"
#include "kernels/device/event.h"
#include "kernels/device/graph.h"
#include "kernels/device/pinned_buffer.h"
#include "kernels/device/stream.h"
#include "kernels/round/round.h"
#include "kernels/sampling/sharded_sampling.h"
#include "worker/model/row_processing.h"

namespace dflash {

class Drafter;
class SequenceTable;
struct Proposals;
class Target;

class DecodeRounds {
 public:
  struct Options {
    int64_t vocabulary = 0;  // real token ids: only [0, vocabulary) is ever emitted
    // Rounds are captured and replayed. A graph has one shape, so all drafting sequences then get as many
    // rows. Otherwise every round has just the rows that it needs.
    bool captured = Graph::IsCaptureCostly();
    int64_t max_in_flight = 1;  // rounds enqueued and not collected
  };
  // Nothing is owned; drafter may be null. Rounds of a drafter or a communicator that cannot be captured are
  // not. Errors: ResourceExhausted.
  static absl::StatusOr<std::unique_ptr<DecodeRounds>> Create(const Options& options, Target* target,
                                                              Drafter* drafter, SequenceTable* table,
                                                              const Stream& stream);
  ~DecodeRounds();  // waits for what is in flight

  // Captures the rounds of up to `sequences` sequences, so that no request pays for it. Before the first
  // sequence; does nothing where rounds are not captured. Other shapes are captured as they come.
  absl::Status WarmUp(int64_t sequences);
  int64_t graphs() const { return static_cast<int64_t>(graphs_.size()); }

  // A sequence begins to decode: its prompt is in the stores, its first token is the anchor. Rank 0's say
  // counts.
  absl::Status Start(int32_t slot, const DecodeState& state);

  struct Member {
    int32_t slot = 0;
    int64_t max_drafts = 0;                      // of this round
    SamplingReach reach = SamplingReach::kBest;  // of its sampling parameters
    bool has_rules = false;                      // its logits are processed before they are sampled
    int32_t log_probs = 0;                       // RowProcessing
    // Drafts that the drafter itself gives less than this probability, together with all before them, are not
    // verified, but for the first. Only in rounds that are not captured, and by rank 0's say. 0: all are.
    double least_survival = 0;
  };
  // Writes the rules of the rows of members[member] to batch.rows from `first_row` on: the anchor's, then one
  // per draft, and returns for how many rows, at least one: no draft behind them is accepted, so they change
  // no token. Called inside Enqueue, for members that have rules and not ended.
  using DescribeRules = std::function<size_t(size_t member, std::span<const int32_t> drafts, size_t first_row,
                                             RuleBatch& batch)>;
  // Enqueues one round of the members (at least one, each slot once). The plan says who takes part and how
  // many drafts at most; how many rows are used, and what is accepted, is decided on the device. A member
  // that an earlier round has ended runs an empty round. No member has more than max_rows - 1 drafts; 0: a
  // whole block of rows. (Captured rounds give every drafting member so many, whatever it uses.) With rules
  // or log probabilities the round is no captured one, and Enqueue waits for its drafts, or its tokens.
  absl::Status Enqueue(const std::vector<Member>& members, int64_t max_rows = 0,
                       const DescribeRules& describe_rules = {});

  int64_t in_flight() const { return static_cast<int64_t>(in_flight_.size()); }
  bool is_in_flight(int32_t slot) const;  // a member of such a round
  bool captured() const { return options_.captured; }

  struct SequenceOutcome {
    Member member;
    RoundResult result;
    std::vector<int32_t> emitted;
    std::vector<TokenLogProbs> log_probs;  // of these, where some member wants them
    std::vector<float> confidences = {};   // of the drafts; empty where the drafter has none
    int64_t cut_drafts = 0;                // that were proposed and not verified (Member::least_survival)
  };
  struct Outcome {
    std::vector<SequenceOutcome> sequences;  // as they were enqueued
    // On the device. Commit: acceptance and the target's stores; ingest: the drafter's context.
    absl::Duration draft_time, forward_time, sample_time, commit_time, ingest_time;
    // It took as long as such rounds take: not the first of its shape where rounds are captured.
    bool is_settled = true;
    absl::Duration device_time() const {
      return draft_time + forward_time + sample_time + commit_time + ingest_time;
    }
  };
  // Waits for the oldest round in flight, takes the lengths of its members over into the table and checks
  // that all stores of each end at its anchor (Internal). Errors of the communicator that a captured round
  // cannot return itself.
  absl::StatusOr<Outcome> Collect();

  // Waits for the rounds in flight and forgets them.
  void Abandon();

 private:
  // What a captured graph is made for.
  struct Shape {
    int64_t sequences = 0;
    int64_t drafting = 0;
    int64_t depth = 0;  // tokens wanted of every proposal
    int64_t rows = 0;
    SamplingReach reach = SamplingReach::kBest;  // in a group of ranks; one rank alone does not need it
    auto operator<=>(const Shape&) const = default;
  };
  struct InFlight {
    std::vector<Member> members;
    std::vector<int32_t> first_rows;
    std::vector<TokenLogProbs> log_probs;  // per row
    std::vector<int32_t> proposals;        // of the drafter, -1: none
    std::vector<int64_t> cut_drafts;
    int64_t depth = 0;  // of these
    PinnedBuffer report, lengths;
    Event done;
    bool is_settled = true;
  };
  enum Mark { kStart, kDrafted, kVerified, kSampled, kCommitted, kIngested, kMarks };

  DecodeRounds(const Options& options, Target* target, Drafter* drafter, SequenceTable* table,
               const Stream* stream)
      : options_(options), target_(target), drafter_(drafter), table_(table), stream_(stream) {}
  absl::Status Allocate();
  int64_t block_rows() const;
  // Of a round whose logits are processed: in, how; out, what came of it.
  struct Processing {
    RowProcessing how;
    const std::vector<Member>* members = nullptr;
    const DescribeRules* describe = nullptr;
    std::vector<TokenLogProbs> log_probs;
  };
  absl::StatusOr<bool> Run(const Shape& shape, Processing& processing, InFlight& round);
  // `round`: that is not captured.
  absl::Status EnqueueWork(Shape shape, Processing* processing = nullptr, InFlight* round = nullptr);
  // Leaves out the drafts that are not worth their rows (Member::least_survival); waits for the proposals.
  absl::Status CutBlocks(const Proposals& proposals, InFlight& round, Shape& shape);
  // What rank 0 has there, on every rank.
  template <typename T>
  absl::Status Share(T* values, int64_t count) const;
  absl::Status RecordMark(Mark mark) const;

  DecodeStates states() const { return {.data = states_.As<DecodeState>(), .slots = slots_}; }
  VerifyArrays rows() const;
  // Parts of report_, which the host reads: times, results, sampled tokens, confidences of the proposals.
  int64_t* times() const { return report_.As<int64_t>(); }
  static int64_t ResultsOffset() { return int64_t{kMarks} * int64_t{sizeof(int64_t)}; }
  int64_t SampledOffset() const { return ResultsOffset() + slots_ * int64_t{sizeof(RoundResult)}; }
  int64_t ConfidencesOffset() const { return SampledOffset() + max_rows_ * int64_t{sizeof(int32_t)}; }
  RoundResult* results() const {
    return reinterpret_cast<RoundResult*>(report_.As<char>() + ResultsOffset());
  }
  int32_t* sampled() const { return reinterpret_cast<int32_t*>(report_.As<char>() + SampledOffset()); }
  float* confidences() const { return reinterpret_cast<float*>(report_.As<char>() + ConfidencesOffset()); }

  Options options_;
  Target* target_;
  Drafter* drafter_;
  SequenceTable* table_;
  const Stream* stream_;
  int64_t slots_ = 0;
  int64_t max_rows_ = 0;

  // Device memory.
  Buffer states_;
  Buffer entries_, draft_slots_;  // the plan
  Buffer proposals_;
  Buffer tokens_, positions_, sampling_, segments_, row_counts_;
  Buffer report_;

  std::vector<RoundEntry> planned_entries_;  // what entries_ and draft_slots_ hold
  std::vector<int32_t> planned_draft_slots_;
  // The first round of a shape runs as it is, the second is captured: what is used once is not worth it, and
  // everything that a backend loads at first use is there.
  std::map<Shape, std::optional<Graph>> graphs_;
  std::deque<InFlight> in_flight_;  // oldest first
  std::vector<InFlight> free_;
};

}  // namespace dflash
