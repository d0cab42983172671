// verify-rows, acceptance, rollback, context-update: what verification leaves behind
#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/doctor/checks.h"

namespace dflash::doctor {
namespace {

void CheckAcceptance(const Subject& subject, const RoundsRecord& record, int64_t block_size) {
  int64_t wrong = 0;
  std::string first;
  for (const ScriptedRound& round : record.rounds) {
    const int64_t planned = round.planned;
    const auto begin = record.continuation.begin() + (round.anchor_position - record.start);
    const bool right = round.rows == block_size && round.accepted == planned &&
                       round.emitted == planned + 1 &&
                       round.position == round.anchor_position + planned + 1 &&
                       round.tokens == std::vector<int32_t>(begin, begin + planned + 1);
    if (right) continue;
    if (wrong++ == 0) {
      first =
          absl::StrFormat(": with %d right drafts: %d rows, %d accepted, %d emitted, anchor at +%d", planned,
                          round.rows, round.accepted, round.emitted, round.position - round.anchor_position);
    }
  }
  subject.report->Judge(
      "acceptance", static_cast<double>(wrong), 0,
      absl::StrCat("drafts that are wrong at every depth in turn, ", record.rounds.size(), " rounds"),
      absl::StrCat(wrong, " rounds miscounted", first), "acceptance does not end at the first wrong draft");
}

void CheckRollback(const Subject& subject, const RoundsRecord& record) {
  int64_t different = 0;
  for (size_t i = 0; i < record.plain_state.size(); ++i)
    different += record.plain_state[i] != record.speculative_state[i];
  subject.report->Judge(
      "rollback", static_cast<double>(different), 0, "the same tokens, one step each",
      absl::StrCat(different, " of ", record.plain_state.size(), " stores of the target differ"),
      "rejected rows are committed, or accepted ones are not");
}

// --- context-update

struct ContextErrors {
  double worst = 0;
  std::set<int64_t> positions;  // that do not hold the rows of the accepted tokens, in any layer
  // How many of them hold, in the first layer, the row of another accepted token.
  int64_t shifted = 0;
};

bool SameRow(const Rows& a, int64_t i, const Rows& b, int64_t j) {
  return std::equal(a.row(i), a.row(i) + a.cols, b.row(j));
}

ContextErrors MeasureContexts(const RoundsRecord& record) {
  ContextErrors errors;
  for (size_t layer = 0; layer < record.plain_context.size(); ++layer) {
    const LayerContext& right = record.plain_context[layer];
    const LayerContext& ours = record.speculative_context[layer];
    errors.worst = std::max({errors.worst, RelativeError(ours.v, right.v), RelativeError(ours.k, right.k)});
    if (ours.v.rows != right.v.rows) continue;
    for (int64_t p = 0; p < right.v.rows; ++p) {
      if (SameRow(ours.v, p, right.v, p) && SameRow(ours.k, p, right.k, p)) continue;
      errors.positions.insert(p);
      if (layer != 0) continue;
      for (int64_t other = 0; other < right.v.rows; ++other)
        errors.shifted += other != p && SameRow(ours.v, p, right.v, other);
    }
  }
  return errors;
}

void CheckContextUpdate(const Subject& subject, const RoundsRecord& record) {
  const ContextErrors errors = MeasureContexts(record);
  const int64_t rows = record.plain_context.empty() ? 0 : record.plain_context[0].v.rows;
  std::string detail = absl::StrCat(errors.positions.size(), " of ", rows, " positions differ");
  if (!errors.positions.empty()) absl::StrAppend(&detail, ", the first at ", *errors.positions.begin());
  if (errors.shifted > 0)
    absl::StrAppend(&detail, "; ", errors.shifted, " of them hold the row of another accepted token");
  const bool mostly_shifted = 2 * errors.shifted > static_cast<int64_t>(errors.positions.size());
  subject.report->Judge("context-update", errors.worst, 0, "the same tokens, one step each", detail,
                        mostly_shifted
                            ? "accepted rows are stored at positions shifted by the number of rejected drafts"
                            : "rows of rejected drafts stay in the drafter's context");
}

}  // namespace

void CheckVerifyRows(const Subject& subject, const Probe::VerifyRecord& record) {
  subject.report->Judge("verify-rows", RelativeError(record.together, record.alone), 0,
                        "the same tokens, one step each",
                        absl::StrCat("logits of ", record.together.rows, " rows"),
                        "the logits of a row depend on the rows that are verified with it");
}

void CheckRounds(const Subject& subject, const RoundsRecord& record, int64_t block_size) {
  CheckAcceptance(subject, record, block_size);
  CheckRollback(subject, record);
  CheckContextUpdate(subject, record);
}

}  // namespace dflash::doctor
