#include "worker/model/step_batch.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace dflash {
namespace {

// Cuts the rows of one PREFILL sequence at its checkpoints. Part i of the rows gets what lies before the
// sequence's i-th checkpoint.
void CutAtCheckpoints(const Segment& segment, const std::vector<StateCheckpoint>& checkpoints,
                      PhaseRows& rows) {
  const int32_t end = segment.start_position + segment.row_count;
  int32_t from = segment.start_position;
  for (size_t i = 0; i <= checkpoints.size() && from < end; ++i) {
    const int32_t to = i < checkpoints.size() ? static_cast<int32_t>(checkpoints[i].position) : end;
    if (rows.parts.size() <= i) rows.parts.emplace_back();
    PhaseRows::Part& part = rows.parts[i];
    part.segments.push_back({.slot = segment.slot,
                             .first_row = segment.first_row + from - segment.start_position,
                             .row_count = to - from,
                             .start_position = from});
    if (i < checkpoints.size()) {
      part.copies.push_back({.slot = segment.slot, .checkpoint = checkpoints[i].index});
      rows.checkpoints.push_back({.slot = checkpoints[i].index,
                                  .first_row = segment.first_row,
                                  .row_count = to - segment.start_position,
                                  .start_position = segment.start_position});
    }
    from = to;
  }
}

absl::Status CheckCheckpoints(const SequenceRows& sequence, const StepLimits& limits) {
  if (sequence.checkpoints.empty()) return absl::OkStatus();
  const int64_t end = sequence.start_position + static_cast<int64_t>(sequence.tokens.size());
  bool ok = sequence.phase == Phase::kPrefill && sequence.start_position % kPageTokens == 0 &&
            static_cast<int64_t>(sequence.checkpoints.size()) <= kMaxCheckpoints;
  int64_t last = sequence.start_position;
  for (const StateCheckpoint& checkpoint : sequence.checkpoints) {
    ok &= checkpoint.position > last && checkpoint.position <= end && checkpoint.position % kPageTokens == 0;
    ok &= checkpoint.index >= 0 && checkpoint.index < limits.checkpoints;
    last = checkpoint.position;
  }
  if (ok) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("slot ", sequence.slot, ": rows [", sequence.start_position,
                                                 ", ", end,
                                                 ") cannot leave the checkpoints that they should"));
}

}  // namespace

absl::Status CheckBatch(const StepBatch& batch, const StepLimits& limits, const SequenceTable& table) {
  std::vector<char> seen(static_cast<size_t>(table.slots()), 0);
  int64_t rows[2] = {0, 0};
  int64_t logits = 0;
  for (const SequenceRows& sequence : batch.sequences) {
    const std::string who = absl::StrCat("slot ", sequence.slot);
    if (sequence.slot < 0 || sequence.slot >= table.slots())
      return absl::InvalidArgumentError(absl::StrCat(who, " does not exist"));
    if (std::exchange(seen[static_cast<size_t>(sequence.slot)], 1))
      return absl::InvalidArgumentError(absl::StrCat(who, " occurs twice"));
    const SequenceLengths& lengths = table.lengths(sequence.slot);
    if (sequence.start_position != lengths.target_kv) {
      return absl::InvalidArgumentError(
          absl::StrCat(who, " starts at ", sequence.start_position, ", committed are ", lengths.target_kv));
    }
    const auto count = static_cast<int64_t>(sequence.tokens.size());
    if (count == 0) return absl::InvalidArgumentError(absl::StrCat(who, " has no rows"));
    for (int32_t token : sequence.tokens) {
      if (token < 0 || token >= limits.vocabulary)
        return absl::InvalidArgumentError(
            absl::StrCat(who, ": token id ", token, " is outside the vocabulary"));
    }
    if (sequence.phase == Phase::kVerify) {
      if (count > limits.block_rows)
        return absl::InvalidArgumentError(
            absl::StrCat(who, " verifies ", count, " rows, at most ", limits.block_rows));
      for (size_t row = 0; row < sequence.parents.size(); ++row) {
        if (sequence.parents[row] != static_cast<int32_t>(row) - 1)
          return absl::UnimplementedError("verify plans that are not chains");
      }
      logits += count;
    } else {
      if (lengths.gdn_pending != 0)
        return absl::InvalidArgumentError(
            absl::StrCat(who, " has pending delta records: fold them before prefill"));
      logits += sequence.last_logits ? 1 : 0;
    }
    DFLASH_RETURN_IF_ERROR(CheckCheckpoints(sequence, limits));
    const bool can_score = sequence.phase == Phase::kPrefill && sequence.next_token < limits.vocabulary &&
                           batch.vocabulary >= 1 && batch.vocabulary <= limits.vocabulary;
    if (sequence.log_probs != 0 && !can_score)
      return absl::InvalidArgumentError(absl::StrCat(who, ": its rows can have no log probabilities"));
    rows[sequence.phase == Phase::kVerify] += count;
  }
  if (rows[0] > limits.prefill_rows || rows[1] > limits.verify_rows || logits > limits.logits_rows) {
    return absl::InvalidArgumentError(absl::StrCat("a step of ", rows[0], " prefill rows, ", rows[1],
                                                   " verify rows and ", logits,
                                                   " rows of logits is too large"));
  }
  return absl::OkStatus();
}

PhaseRows RowsOfPhase(const StepBatch& batch, Phase phase) {
  PhaseRows rows;
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    const SequenceRows& sequence = batch.sequences[i];
    if (sequence.phase != phase) continue;
    const auto first = static_cast<int32_t>(rows.tokens.size());
    const auto count = static_cast<int32_t>(sequence.tokens.size());
    rows.members.push_back(i);
    rows.segments.push_back({.slot = sequence.slot,
                             .first_row = first,
                             .row_count = count,
                             .start_position = static_cast<int32_t>(sequence.start_position)});
    if (phase == Phase::kPrefill) CutAtCheckpoints(rows.segments.back(), sequence.checkpoints, rows);
    rows.tokens.insert(rows.tokens.end(), sequence.tokens.begin(), sequence.tokens.end());
    for (int32_t row = 0; row < count; ++row) {
      const bool wanted = phase == Phase::kVerify || (sequence.last_logits && row == count - 1);
      if (wanted) rows.logits_of.push_back(first + row);
    }
  }
  return rows;
}

}  // namespace dflash
