#include "worker/decode/decode_rounds.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/timestamp.h"
#include "worker/cache/sequence_table.h"
#include "worker/draft/drafter.h"
#include "worker/model/target.h"

namespace dflash {
namespace {

template <typename T>
absl::Status AllocateArray(Buffer& buffer, int64_t count, const Stream& stream) {
  DFLASH_ASSIGN_OR_RETURN(buffer, Buffer::Allocate(count * int64_t{sizeof(T)}, stream));
  return absl::OkStatus();
}

template <typename T>
absl::Status Upload(const Buffer& buffer, const std::vector<T>& values, const Stream& stream) {
  return CopyToDevice(buffer.data(), values.data(), static_cast<int64_t>(values.size() * sizeof(T)), stream);
}

bool SameEntries(const std::vector<RoundEntry>& a, const std::vector<RoundEntry>& b) {
  static_assert(std::has_unique_object_representations_v<RoundEntry>);
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(RoundEntry)) == 0);
}

}  // namespace

absl::StatusOr<std::unique_ptr<DecodeRounds>> DecodeRounds::Create(const Options& options, Target* target,
                                                                   Drafter* drafter, SequenceTable* table,
                                                                   const Stream& stream) {
  if (options.max_in_flight < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("at least one round must be in flight, got ", options.max_in_flight));
  }
  std::unique_ptr<DecodeRounds> rounds(new DecodeRounds(options, target, drafter, table, &stream));
  if ((drafter != nullptr && !drafter->is_capturable()) || !target->communicator().capturable())
    rounds->options_.captured = false;
  DFLASH_RETURN_IF_ERROR(rounds->Allocate());
  return rounds;
}

DecodeRounds::~DecodeRounds() { Abandon(); }

int64_t DecodeRounds::block_rows() const { return 1 + (drafter_ == nullptr ? 0 : drafter_->max_drafts()); }

absl::Status DecodeRounds::Allocate() {
  slots_ = table_->slots();
  max_rows_ = slots_ * block_rows();
  DFLASH_RETURN_IF_ERROR(AllocateArray<DecodeState>(states_, slots_, *stream_));
  DFLASH_RETURN_IF_ERROR(AllocateArray<RoundEntry>(entries_, slots_, *stream_));
  DFLASH_RETURN_IF_ERROR(AllocateArray<int32_t>(draft_slots_, slots_, *stream_));
  DFLASH_RETURN_IF_ERROR(AllocateArray<int32_t>(proposals_, max_rows_, *stream_));
  DFLASH_RETURN_IF_ERROR(AllocateArray<int32_t>(tokens_, max_rows_, *stream_));
  DFLASH_RETURN_IF_ERROR(AllocateArray<int64_t>(positions_, max_rows_, *stream_));
  DFLASH_RETURN_IF_ERROR(AllocateArray<SamplingParams>(sampling_, max_rows_, *stream_));
  DFLASH_RETURN_IF_ERROR(AllocateArray<Segment>(segments_, slots_, *stream_));
  DFLASH_RETURN_IF_ERROR(AllocateArray<int32_t>(row_counts_, slots_, *stream_));
  const int64_t report_bytes = ConfidencesOffset() + max_rows_ * int64_t{sizeof(float)};
  DFLASH_RETURN_IF_ERROR(AllocateArray<char>(report_, report_bytes, *stream_));
  // Negative: none. What a drafter never writes stays so.
  const std::vector<float> none(static_cast<size_t>(max_rows_), -1.0f);
  DFLASH_RETURN_IF_ERROR(
      CopyToDevice(confidences(), none.data(), max_rows_ * int64_t{sizeof(float)}, *stream_));
  for (int64_t i = 0; i < options_.max_in_flight; ++i) {
    DFLASH_ASSIGN_OR_RETURN(Event done, Event::Create(Event::Timing::kOff, *stream_));
    DFLASH_ASSIGN_OR_RETURN(PinnedBuffer report, PinnedBuffer::Allocate(report_bytes, *stream_));
    DFLASH_ASSIGN_OR_RETURN(PinnedBuffer lengths, PinnedBuffer::Allocate(table_->LengthsBytes(), *stream_));
    free_.push_back({.members = {},
                     .first_rows = {},
                     .log_probs = {},
                     .proposals = {},
                     .cut_drafts = {},
                     .depth = 0,
                     .report = std::move(report),
                     .lengths = std::move(lengths),
                     .done = std::move(done),
                     .is_settled = true});
  }
  return absl::OkStatus();
}

VerifyArrays DecodeRounds::rows() const {
  return {.tokens = tokens_.As<int32_t>(),
          .positions = positions_.As<int64_t>(),
          .sampling = sampling_.As<SamplingParams>(),
          .segments = segments_.As<Segment>()};
}

// No slot is open, so every round is empty: it runs all its kernels and changes nothing.
absl::Status DecodeRounds::WarmUp(int64_t sequences) {
  if (!options_.captured) return absl::OkStatus();
  std::vector<Member> members;
  while (static_cast<int64_t>(members.size()) < std::min(sequences, slots_)) {
    members.push_back({.slot = static_cast<int32_t>(members.size())});
    for (const int64_t drafts : {int64_t{0}, block_rows() - 1}) {
      for (Member& member : members) member.max_drafts = drafts;
      for (int use = 0; use < 2; ++use) {  // the second is captured
        DFLASH_RETURN_IF_ERROR(Enqueue(members));
        DFLASH_RETURN_IF_ERROR(Collect().status());
      }
    }
  }
  return absl::OkStatus();
}

absl::Status DecodeRounds::Start(int32_t slot, const DecodeState& state) {
  return CopyToDevice(states_.As<DecodeState>() + slot, &state, sizeof(state), *stream_);
}

absl::Status DecodeRounds::Enqueue(const std::vector<Member>& members, int64_t max_rows,
                                   const DescribeRules& describe_rules) {
  const auto count = static_cast<int64_t>(members.size());
  if (max_rows == 0) max_rows = block_rows();
  for (const Member& member : members) {
    if (member.max_drafts < 0 || member.max_drafts >= max_rows || max_rows > block_rows()) {
      return absl::InvalidArgumentError(absl::StrCat("a member with ", member.max_drafts, " drafts in ",
                                                     max_rows, " rows; a block has ", block_rows()));
    }
  }
  if (count < 1 || count > slots_ || free_.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a round of ", count, " sequences with ", in_flight(), " rounds in flight"));
  }
  // The plan: who takes part and where the rows lie.
  bool drafts = false;
  for (const Member& member : members) drafts |= member.max_drafts > 0;
  InFlight round = std::move(free_.back());
  free_.pop_back();
  round.members = members;
  round.first_rows.clear();
  round.proposals.clear();
  round.cut_drafts.assign(members.size(), 0);
  std::vector<RoundEntry> entries;
  std::vector<int32_t> draft_slots;
  Shape shape;
  shape.sequences = count;
  Processing processing = {.how = {}, .members = &members, .describe = &describe_rules, .log_probs = {}};
  const bool needs_reach = target_->communicator().size() > 1;
  for (const Member& member : members) {
    if (needs_reach) shape.reach = std::max(shape.reach, member.reach);
    processing.how.has_rules |= member.has_rules;
    processing.how.log_probs = std::max(processing.how.log_probs, member.log_probs);
    const bool proposes = options_.captured ? drafts : member.max_drafts > 0;
    const int64_t capacity = !proposes ? 1 : options_.captured ? max_rows : 1 + member.max_drafts;
    entries.push_back({.slot = member.slot,
                       .first_row = static_cast<int32_t>(shape.rows),
                       .row_capacity = static_cast<int32_t>(capacity),
                       .max_drafts = static_cast<int32_t>(member.max_drafts),
                       .proposal = proposes ? static_cast<int32_t>(shape.drafting) : -1});
    round.first_rows.push_back(entries.back().first_row);
    round.proposals.push_back(entries.back().proposal);
    shape.rows += capacity;
    if (!proposes) continue;
    draft_slots.push_back(member.slot);
    ++shape.drafting;
    shape.depth = std::max(shape.depth, capacity - 1);
  }
  round.depth = shape.depth;
  if (!SameEntries(entries, planned_entries_)) {
    DFLASH_RETURN_IF_ERROR(Upload(entries_, entries, *stream_));
    planned_entries_ = std::move(entries);
  }
  if (draft_slots != planned_draft_slots_) {
    DFLASH_RETURN_IF_ERROR(Upload(draft_slots_, draft_slots, *stream_));
    planned_draft_slots_ = std::move(draft_slots);
  }
  DFLASH_ASSIGN_OR_RETURN(round.is_settled, Run(shape, processing, round));
  round.log_probs = std::move(processing.log_probs);
  // Behind the round and before the next one, so every round has memory of its own on the host only.
  DFLASH_RETURN_IF_ERROR(CopyToPinned(round.report, report_.data(), report_.bytes(), *stream_));
  DFLASH_RETURN_IF_ERROR(table_->CopyLengths(round.lengths));
  DFLASH_RETURN_IF_ERROR(round.done.Record(*stream_));
  in_flight_.push_back(std::move(round));
  return absl::OkStatus();
}

// Returns whether the round takes as long as those of its shape do.
absl::StatusOr<bool> DecodeRounds::Run(const Shape& shape, Processing& processing, InFlight& round) {
  if (processing.how.any()) {
    DFLASH_RETURN_IF_ERROR(EnqueueWork(shape, &processing, options_.captured ? nullptr : &round));
    return false;
  }
  if (!options_.captured) {
    DFLASH_RETURN_IF_ERROR(EnqueueWork(shape, nullptr, &round));
    return true;
  }
  const auto [entry, is_new] = graphs_.try_emplace(shape);
  if (is_new) {
    DFLASH_RETURN_IF_ERROR(EnqueueWork(shape));
    return false;
  }
  std::optional<Graph>& graph = entry->second;
  const bool is_captured = graph.has_value();
  if (!is_captured) {
    DFLASH_ASSIGN_OR_RETURN(graph, Graph::Capture(*stream_, [this, shape] { return EnqueueWork(shape); }));
  }
  DFLASH_RETURN_IF_ERROR(graph->Launch(*stream_));
  return is_captured;
}

absl::Status DecodeRounds::CutBlocks(const Proposals& proposals, InFlight& round, Shape& shape) {
  Communicator& communicator = target_->communicator();
  const bool cuts = std::any_of(round.members.begin(), round.members.end(),
                                [](const Member& member) { return member.least_survival > 0; });
  if (!cuts && communicator.size() == 1) return absl::OkStatus();  // another rank's may
  std::vector<RoundEntry> entries = planned_entries_;
  std::vector<int32_t> drafts;  // that stay
  for (const RoundEntry& entry : entries) drafts.push_back(entry.max_drafts);
  if (communicator.rank() == 0) {
    std::vector<float> confidences(static_cast<size_t>(shape.drafting * proposals.depth));
    DFLASH_RETURN_IF_ERROR(CopyToHost(confidences.data(), proposals.confidences,
                                      static_cast<int64_t>(confidences.size() * sizeof(float)), *stream_));
    for (size_t i = 0; i < entries.size(); ++i) {
      const double least = round.members[i].least_survival;
      if (entries[i].proposal < 0 || least <= 0) continue;
      const float* confidence = confidences.data() + entries[i].proposal * proposals.depth;
      if (*confidence < 0) continue;  // the drafter has none
      double survival = *confidence;
      int32_t kept = std::min(drafts[i], 1);
      while (kept < drafts[i] && (survival *= static_cast<double>(confidence[kept])) >= least) ++kept;
      drafts[i] = kept;
    }
  }
  if (communicator.size() > 1) {
    auto* shared = row_counts_.As<int32_t>();  // nothing is in it before rows are accepted
    const auto bytes = static_cast<int64_t>(drafts.size() * sizeof(int32_t));
    DFLASH_RETURN_IF_ERROR(CopyToDevice(shared, drafts.data(), bytes, *stream_));
    DFLASH_RETURN_IF_ERROR(Share(shared, static_cast<int64_t>(drafts.size())));
    DFLASH_RETURN_IF_ERROR(CopyToHost(drafts.data(), shared, bytes, *stream_));
  }
  shape.rows = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    round.cut_drafts[i] = entries[i].max_drafts - drafts[i];
    round.first_rows[i] = entries[i].first_row = static_cast<int32_t>(shape.rows);
    entries[i].max_drafts = drafts[i];
    entries[i].row_capacity = 1 + drafts[i];
    shape.rows += entries[i].row_capacity;
  }
  if (SameEntries(entries, planned_entries_)) return absl::OkStatus();
  DFLASH_RETURN_IF_ERROR(Upload(entries_, entries, *stream_));
  planned_entries_ = std::move(entries);
  return absl::OkStatus();
}

template <typename T>
absl::Status DecodeRounds::Share(T* values, int64_t count) const {
  Communicator& communicator = target_->communicator();
  if (communicator.size() == 1) return absl::OkStatus();
  return communicator.Broadcast(values, count * int64_t{sizeof(T)}, /*root=*/0, *stream_);
}

// The round itself. Without processing nothing here reads what the device computes: shapes and addresses
// depend on `shape` alone.
absl::Status DecodeRounds::EnqueueWork(Shape shape, Processing* processing, InFlight* round) {
  const RoundEntries entries = {.data = entries_.As<RoundEntry>(), .count = shape.sequences};
  const Proposals proposals = {
      .depth = shape.depth, .tokens = proposals_.As<int32_t>(), .confidences = confidences()};
  DFLASH_RETURN_IF_ERROR(RecordMark(kStart));

  DFLASH_RETURN_IF_ERROR(Share(states().data, slots_));
  if (shape.drafting > 0) {
    DFLASH_RETURN_IF_ERROR(
        drafter_->Propose(states(), draft_slots_.As<int32_t>(), shape.drafting, proposals));
    if (round != nullptr) DFLASH_RETURN_IF_ERROR(CutBlocks(proposals, *round, shape));
  }
  DFLASH_RETURN_IF_ERROR(MakeVerifyRows(states(), entries, proposals.tokens, proposals.depth,
                                        options_.vocabulary, rows(), *stream_));
  DFLASH_RETURN_IF_ERROR(RecordMark(kDrafted));

  DFLASH_RETURN_IF_ERROR(Share(tokens_.As<int32_t>(), shape.rows));
  DFLASH_RETURN_IF_ERROR(Share(segments_.As<Segment>(), shape.sequences));
  // The drafts, which rules depend on; what they say is written while the target runs.
  const bool has_rules = processing != nullptr && processing->how.has_rules;
  std::vector<int32_t> drafted(has_rules ? static_cast<size_t>(shape.rows) : 0);
  std::vector<Segment> segments(has_rules ? static_cast<size_t>(shape.sequences) : 0);
  if (has_rules) {
    DFLASH_RETURN_IF_ERROR(
        CopyToHost(drafted.data(), tokens_.data(), shape.rows * int64_t{sizeof(int32_t)}, *stream_));
    DFLASH_RETURN_IF_ERROR(
        CopyToHost(segments.data(), segments_.data(), shape.sequences * int64_t{sizeof(Segment)}, *stream_));
  }
  const VerifyRows verified = {.tokens = tokens_.As<int32_t>(),
                               .segments = {.data = segments_.As<Segment>(), .count = shape.sequences},
                               .rows = shape.rows};
  DFLASH_ASSIGN_OR_RETURN(const VerifyResult forward, target_->Verify(verified));
  DFLASH_RETURN_IF_ERROR(RecordMark(kVerified));

  if (processing == nullptr) {
    DFLASH_RETURN_IF_ERROR(target_->Sample(forward.logits, sampling_.As<SamplingParams>(),
                                           positions_.As<int64_t>(), options_.vocabulary, shape.reach,
                                           sampled()));
  } else {
    RuleBatch rules;
    rules.rows.resize(static_cast<size_t>(shape.rows));
    for (size_t i = 0; i < segments.size() && *processing->describe != nullptr; ++i) {
      const Segment& segment = segments[i];
      if (segment.row_count == 0 || !(*processing->members)[i].has_rules) continue;
      const auto first = static_cast<size_t>(segment.first_row);
      const size_t described = (*processing->describe)(
          i, std::span(drafted).subspan(first + 1, static_cast<size_t>(segment.row_count) - 1), first, rules);
      if (described == static_cast<size_t>(segment.row_count)) continue;
      constexpr int32_t kNoToken = -2;  // equal to none that is sampled: the walk ends before it
      DFLASH_RETURN_IF_ERROR(CopyToDevice(tokens_.As<int32_t>() + first + described, &kNoToken,
                                          int64_t{sizeof(kNoToken)}, *stream_));
    }
    if (has_rules) DFLASH_RETURN_IF_ERROR(Share(tokens_.As<int32_t>(), shape.rows));  // with what was cut
    // Rank 0 has the say; other ranks may not know the requests.
    processing->how.rules = has_rules && *processing->describe != nullptr ? &rules : nullptr;
    DFLASH_RETURN_IF_ERROR(target_->SampleProcessed(
        forward.logits, sampling_.As<SamplingParams>(), positions_.As<int64_t>(), options_.vocabulary,
        shape.reach, processing->how, sampled(), &processing->log_probs));
  }
  DFLASH_RETURN_IF_ERROR(RecordMark(kSampled));

  // All state of a sequence moves together: target stores, then drafter context.
  auto* row_counts = row_counts_.As<int32_t>();
  DFLASH_RETURN_IF_ERROR(AcceptRows(entries, rows(), sampled(), states(), row_counts, results(), *stream_));
  DFLASH_RETURN_IF_ERROR(Share(row_counts, shape.sequences));
  DFLASH_RETURN_IF_ERROR(target_->CommitVerified(verified, row_counts));
  DFLASH_RETURN_IF_ERROR(RecordMark(kCommitted));
  if (drafter_ != nullptr) {
    DFLASH_RETURN_IF_ERROR(drafter_->IngestVerified(forward.taps, verified.segments, row_counts));
  }
  return RecordMark(kIngested);
}

absl::Status DecodeRounds::RecordMark(Mark mark) const { return RecordTime(times() + mark, *stream_); }

absl::StatusOr<DecodeRounds::Outcome> DecodeRounds::Collect() {
  if (in_flight_.empty()) return absl::FailedPreconditionError("no round is in flight");
  InFlight round = std::move(in_flight_.front());
  in_flight_.pop_front();
  DFLASH_RETURN_IF_ERROR(round.done.Synchronize());
  // Before anything is believed: a rank that did not come is noticed by the device.
  if (Communicator& communicator = target_->communicator(); communicator.capturable())
    DFLASH_RETURN_IF_ERROR(communicator.Check());
  const auto* report = round.report.As<char>();
  const auto* times = round.report.As<int64_t>();
  const auto* results = reinterpret_cast<const RoundResult*>(report + ResultsOffset());
  const auto* tokens = reinterpret_cast<const int32_t*>(report + SampledOffset());
  const auto* confidences = reinterpret_cast<const float*>(report + ConfidencesOffset());
  const auto between = [&](Mark from, Mark to) { return absl::Nanoseconds(times[to] - times[from]); };
  Outcome outcome;
  outcome.draft_time = between(kStart, kDrafted);
  outcome.forward_time = between(kDrafted, kVerified);
  outcome.sample_time = between(kVerified, kSampled);
  outcome.commit_time = between(kSampled, kCommitted);
  outcome.ingest_time = between(kCommitted, kIngested);
  outcome.is_settled = round.is_settled;
  for (size_t i = 0; i < round.members.size(); ++i) {
    const Member& member = round.members[i];
    const int32_t* emitted = tokens + round.first_rows[i];
    outcome.sequences.push_back({.member = member,
                                 .result = results[i],
                                 .emitted = {emitted, emitted + results[i].emitted},
                                 .log_probs = {}});
    if (!round.log_probs.empty()) {
      const auto first = round.log_probs.begin() + round.first_rows[i];
      outcome.sequences.back().log_probs = {first, first + results[i].emitted};
    }
    const int32_t drafts = results[i].rows - 1;
    if (drafts > 0) {
      const float* first = confidences + round.proposals[i] * round.depth;
      if (*first >= 0) outcome.sequences.back().confidences.assign(first, first + drafts);
    }
    // Where less room was left than stayed, nothing was cut.
    if (drafts == member.max_drafts - round.cut_drafts[i])
      outcome.sequences.back().cut_drafts = round.cut_drafts[i];
    table_->TakeLengths(round.lengths, member.slot);
    DFLASH_RETURN_IF_ERROR(table_->CheckLengths(member.slot, results[i].position, drafter_ != nullptr));
  }
  free_.push_back(std::move(round));
  return outcome;
}

bool DecodeRounds::is_in_flight(int32_t slot) const {
  for (const InFlight& round : in_flight_) {
    for (const Member& member : round.members) {
      if (member.slot == slot) return true;
    }
  }
  return false;
}

void DecodeRounds::Abandon() {
  if (in_flight_.empty()) return;
  (void)stream_->Synchronize();  // whoever abandons rounds has an error already, or needs none
  for (InFlight& round : in_flight_) free_.push_back(std::move(round));
  in_flight_.clear();
}

}  // namespace dflash
