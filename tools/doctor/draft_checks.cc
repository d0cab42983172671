// head, draft-rows, dtype, draft-logits, batching, draft-temperature, mask-token: from the final norm to
// drafts
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/comparisons.h"

namespace dflash::doctor {
namespace {

constexpr double kLowest = -std::numeric_limits<double>::infinity();

// Logits of the whole head in double precision, some columns at a time: [rows, count] of ids [first, first +
// count).
absl::Status ForLogits(const Subject& subject, const Rows& y,
                       const std::function<void(int64_t first, const Rows& logits)>& visit) {
  constexpr int64_t kColumns = 4096;
  for (int64_t first = 0; first < subject.vocabulary; first += kColumns) {
    const int64_t count = std::min(kColumns, subject.vocabulary - first);
    DFLASH_ASSIGN_OR_RETURN(const Rows logits, subject.reference->Logits(y, first, count));
    visit(first, logits);
  }
  return absl::OkStatus();
}

// --- head, draft-rows and dtype: drafts against the best token of every row

struct BestToken {
  int64_t id = 0;
  double logit = kLowest;
  double margin = 0;         // to the second best
  double lowest = -kLowest;  // logit of all
};

absl::StatusOr<std::vector<BestToken>> BestTokens(const Subject& subject, const Rows& y) {
  std::vector<BestToken> best(static_cast<size_t>(y.rows));
  DFLASH_RETURN_IF_ERROR(ForLogits(subject, y, [&](int64_t first, const Rows& logits) {
    for (int64_t j = 0; j < logits.rows; ++j) {
      BestToken& of_row = best[static_cast<size_t>(j)];
      for (int64_t column = 0; column < logits.cols; ++column) {
        const double logit = logits.row(j)[column];
        of_row.lowest = std::min(of_row.lowest, logit);
        if (logit > of_row.logit) {
          of_row = {.id = first + column, .logit = logit, .margin = logit - of_row.logit};
        } else {
          of_row.margin = std::min(of_row.margin, of_row.logit - logit);
        }
      }
    }
  }));
  return best;
}

bool AllZero(const Rows& rows) {
  return std::all_of(rows.values.begin(), rows.values.end(), [](double value) { return value == 0; });
}

// Every token has the same logit in every row, though the rows are not zero.
bool SaysNothing(const Rows& rows, const std::vector<BestToken>& best) {
  return !AllZero(rows) && std::all_of(best.begin(), best.end(),
                                       [](const BestToken& of_row) { return of_row.lowest == of_row.logit; });
}

struct DraftCounts {
  int64_t drafts = 0;
  int64_t misses = 0;              // drafts that are not the best token of their row
  int64_t clear_rows = 0;          // rows that are no near ties
  int64_t clear_misses = 0;        // misses among them
  int64_t best_of_row_before = 0;  // drafts that are the best token of the row before theirs
  int64_t best_of_row_behind = 0;
  bool all_alike = false;
};

// Whether rounding alone may put token `id` before the best one of a row.
absl::StatusOr<bool> RoundingMayChoose(const Subject& subject, const Rows& y, int64_t id,
                                       const BestToken& best) {
  if (id < 0 || id >= subject.vocabulary) return false;
  DFLASH_ASSIGN_OR_RETURN(const Rows logit, subject.reference->Logits(y, id, 1));
  double rounding = 0;
  for (const int64_t token : {id, best.id}) {
    DFLASH_ASSIGN_OR_RETURN(const double of_token,
                            subject.reference->LogitRounding(subject.gates.rounding, y, token));
    rounding += of_token;
  }
  return best.logit - logit.values[0] <= rounding;
}

// y: the rows behind the anchor's.
absl::StatusOr<DraftCounts> Count(const Subject& subject, const std::vector<int32_t>& drafts, const Rows& y,
                                  const std::vector<BestToken>& best) {
  DraftCounts counts = {.drafts = static_cast<int64_t>(drafts.size()),
                        .all_alike = std::set<int32_t>(drafts.begin(), drafts.end()).size() == 1};
  for (size_t j = 0; j < drafts.size(); ++j) {
    const bool miss = drafts[j] != best[j].id;
    // Logits that reach further are rounded more coarsely.
    const double reach = std::max(1.0, (best[j].logit - best[j].lowest) / 100);
    bool clear = best[j].margin > subject.gates.margin * reach;
    if (clear && miss) {
      DFLASH_ASSIGN_OR_RETURN(
          const bool rounding,
          RoundingMayChoose(subject, y.Slice(static_cast<int64_t>(j), 1), drafts[j], best[j]));
      clear = !rounding;
    }
    counts.misses += miss;
    counts.clear_rows += clear;
    counts.clear_misses += clear && miss;
    counts.best_of_row_before += j > 0 && drafts[j] == best[j - 1].id;
    counts.best_of_row_behind += j + 1 < drafts.size() && drafts[j] == best[j + 1].id;
  }
  return counts;
}

constexpr char kForeignHead[] =
    "the drafter's head is zero or not the target's: all logits are equal and the lowest id wins";

// Sampled columns of the logits, on what the final norm gave.
absl::Status CheckHead(const Subject& subject, const DraftPass& pass, const DraftCounts& counts) {
  constexpr char kCompared[] = "the target's lm_head, in double precision";
  constexpr int64_t kParts = 4, kColumns = 64;
  if (counts.all_alike && counts.clear_misses > 0) {
    subject.report->Fail(
        "head",
        absl::StrCat("every draft is token ", pass.proposals[0], "; by the head of the target ",
                     counts.clear_misses, " of ", counts.clear_rows, " rows have another best token"),
        kForeignHead);
    subject.report->Of("head").compared = kCompared;
    return absl::OkStatus();
  }
  const Rows rows = pass.output.Slice(1, counts.drafts), rows_before = pass.output.Slice(0, counts.drafts);
  const int64_t columns = std::min(pass.logits.cols, subject.vocabulary);
  StageError worst;
  double worst_of_row_before = 0;
  for (int64_t part = 0; part < kParts; ++part) {
    const int64_t first = std::max<int64_t>(0, (columns - kColumns) * part / (kParts - 1));
    const int64_t count = std::min(kColumns, columns - first);
    const Rows ours = pass.logits.Columns(first, count);
    DFLASH_ASSIGN_OR_RETURN(const Rows of_row_before, subject.reference->Logits(rows_before, first, count));
    DFLASH_ASSIGN_OR_RETURN(const StageError error, CompareStage(subject, ours, [&] {
                              return subject.reference->Logits(subject.reference->Rounded(rows), first,
                                                               count);
                            }));
    worst.Keep(error);
    worst_of_row_before = std::max(worst_of_row_before, RelativeError(ours, of_row_before));
  }
  JudgeStage(subject, "head", worst, kCompared, "logits of sampled columns",
             worst_of_row_before <= worst.gate
                 ? "row j - 1 goes through the head for position s + j"
                 : "another matrix than the target's lm_head, or the target's final norm before it");
  return absl::OkStatus();
}

constexpr char kNoClearRow[] = "no row has a token that is clearly the best";

void CheckDraftRows(const Subject& subject, const DraftCounts& counts) {
  if (counts.clear_rows == 0) return subject.report->NotChecked("draft-rows", kNoClearRow);
  subject.report->Judge("draft-rows", static_cast<double>(counts.clear_misses), 0,
                        "best token of row j, in double precision",
                        absl::StrCat(counts.drafts - counts.misses, " of ", counts.drafts,
                                     " drafts are the best token of their own row"),
                        counts.all_alike ? "see the head"
                        : counts.best_of_row_before > counts.best_of_row_behind
                            ? "drafts are shifted: row j - 1 is taken for position s + j"
                            : "drafts are shifted: row j + 1 is taken for position s + j");
}

void CheckDtype(const Subject& subject, const DraftCounts& counts) {
  if (counts.clear_rows == 0) return subject.report->NotChecked("dtype", kNoClearRow);
  const double share = static_cast<double>(counts.clear_misses) / static_cast<double>(counts.clear_rows);
  subject.report->Judge("dtype", share, 0.02, "double precision",
                        absl::StrCat(counts.misses, " of ", counts.drafts, " drafts differ, ",
                                     counts.clear_misses, " of them in rows that are no near ties"),
                        "quantized weights or rounding");
}

// --- batching, draft-temperature and mask-token: one pass of several sequences

void CheckBatching(const Subject& subject, const Probe::Together& together,
                   const std::vector<const SequenceRecord*>& alone) {
  double logits = 0;
  int64_t different = 0;
  for (size_t i = 0; i < alone.size(); ++i) {
    if (JudgeFinite(subject, "batching", alone[i]->pass.logits)) return;
    logits = std::max(logits, RelativeError(together.logits[i], alone[i]->pass.logits));
    different += together.proposals[i] != alone[i]->pass.proposals;
  }
  subject.report->Judge(
      "batching", std::max(logits, static_cast<double>(different)), 0,
      absl::StrCat("each of ", alone.size(), " sequences by itself"), "draft logits and drafts",
      "rows of one sequence read another's context, or arithmetic depends on the number of rows");
}

void CheckDraftTemperature(const Subject& subject, const Probe::Together& together) {
  const size_t sequences = together.proposals.size();
  int64_t different = 0;
  for (size_t i = 0; i < sequences; ++i) different += together.hot[i] != together.proposals[i];
  subject.report->Judge(
      "draft-temperature", static_cast<double>(different), 0, "the same passes at temperature 0",
      absl::StrCat(different, " of ", sequences, " sequences drafted otherwise at temperature 1"),
      "drafts are sampled with the request's temperature");
}

// Of an output that the head has to take the mask id for. It tells as well whether there is a head where the
// drafter's own output is zeros, of which any head makes the same.
void CheckMaskToken(const Subject& subject, const Probe::Together& together,
                    const std::optional<MaskOutput>& output) {
  if (!output) {
    return subject.report->Skip(
        "mask-token", "no output of the final norm was found for which the head chooses the mask token");
  }
  const std::vector<int32_t>& drafts = together.forced;
  const int64_t kept = std::count(drafts.begin(), drafts.end(), subject.own.mask_token_id);
  const int64_t stripped = static_cast<int64_t>(drafts.size()) - kept;
  // Whoever strips the mask id drafts nothing there, or the second best.
  const auto foreign = std::find_if(drafts.begin(), drafts.end(), [&](int32_t draft) {
    return draft >= 0 && draft != subject.own.mask_token_id && draft != output->second;
  });
  constexpr char kCompared[] = "an output for which the head chooses the mask id";
  Report& report = *subject.report;
  if (report.Of("head").outcome == Outcome::kNotChecked && foreign == drafts.end()) {
    report.Pass("head", 0, 0, kCompared, "the drafter's own output is zeros");
  } else if (report.Of("head").outcome != Outcome::kFail && foreign != drafts.end()) {
    report.Fail("head", absl::StrCat("of ", kCompared, " it makes token ", *foreign), kForeignHead);
  }
  report.Judge("mask-token", static_cast<double>(stripped), 0, kCompared,
               absl::StrCat(kept, " of ", drafts.size(), " drafts are the mask id"),
               foreign == drafts.end()
                   ? "drafts equal to the mask id are stripped as if they were placeholders"
                   : "see the head");
}

}  // namespace

absl::Status CheckDrafts(const Subject& subject, const DraftPass& pass) {
  Report& report = *subject.report;
  const Rows rows = pass.output.Slice(1, pass.rows() - 1);
  subject.reference->ForgetLargest();
  DFLASH_ASSIGN_OR_RETURN(const std::vector<BestToken> best, BestTokens(subject, rows));
  DFLASH_ASSIGN_OR_RETURN(const DraftCounts counts, Count(subject, pass.proposals, rows, best));
  if (JudgeRange(subject, "head")) {
    for (const char* id : {"draft-rows", "dtype"}) report.NotChecked(id, "there are no logits to compare");
    return absl::OkStatus();
  }
  if (SaysNothing(rows, best)) {
    report.Fail("head", "every token has the same logit, in double precision as well",
                "the target's lm_head is zero, or all of its rows are the same", Blame::kModel);
    report.Of("head").look_at = "lm_head (tied: the embedding) in the target's checkpoint.";
  } else if (AllZero(rows)) {
    report.NotChecked("head", "the final norm gives zeros, of which any head makes the same");
  } else {
    DFLASH_RETURN_IF_ERROR(CheckHead(subject, pass, counts));
  }
  CheckDraftRows(subject, counts);
  CheckDtype(subject, counts);
  return absl::OkStatus();
}

absl::Status CheckDraftLogits(const Subject& subject, const Sequences& sequences) {
  Report& report = *subject.report;
  if (subject.bundle == nullptr) {
    report.NotChecked("draft-logits", "needs a golden bundle");
    return absl::OkStatus();
  }
  if (!subject.target_recorded || !subject.drafter_recorded) {
    report.Skip("draft-logits", "the bundle was recorded with other weights");
    return absl::OkStatus();
  }
  DFLASH_ASSIGN_OR_RETURN(const std::optional<double> worst,
                          WorstAgainstBundle(subject, sequences, "draft_logits",
                                             [](const SequenceRecord& record, const Rows& golden) {
                                               return ErrorOfSharedColumns(record.pass.logits, golden);
                                             }));
  if (!worst) {
    report.NotChecked("draft-logits", "the bundle holds no draft logits");
    return absl::OkStatus();
  }
  if (!report.Judge("draft-logits", *worst, subject.gates.golden, BundlePrompts(sequences),
                    "rows 1 .. B - 1 of the first block", "other weights than the bundle's")) {
    report.Of("draft-logits").blame = Blame::kUnsettled;
  }
  return absl::OkStatus();
}

void CheckTogether(const Subject& subject, const Probe::Together& together,
                   const std::vector<const SequenceRecord*>& alone, const std::optional<MaskOutput>& output) {
  CheckBatching(subject, together, alone);
  CheckDraftTemperature(subject, together);
  CheckMaskToken(subject, together, output);
}

// A perceptron of one class: starts at the mask token's row of the head and moves away from whatever wins.
absl::StatusOr<std::optional<MaskOutput>> OutputForMask(const Subject& subject) {
  const int64_t mask = subject.own.mask_token_id;
  if (mask >= subject.vocabulary) return std::nullopt;
  DFLASH_ASSIGN_OR_RETURN(const Rows wanted, subject.reference->HeadRow(mask));
  // Of zeros, the mask token's logit is 0 whatever the output.
  if (AllZero(wanted)) return std::nullopt;
  Rows y = wanted;
  const int rounds = subject.vocabulary > (1 << 16) ? 20 : 300;  // a head of real size takes seconds a round
  for (int round = 0; round < rounds; ++round) {
    double mask_logit = 0, best = kLowest;
    int64_t winner = -1;  // of all others
    DFLASH_RETURN_IF_ERROR(ForLogits(subject, y, [&](int64_t first, const Rows& logits) {
      for (int64_t column = 0; column < logits.cols; ++column) {
        const double logit = logits.values[static_cast<size_t>(column)];
        if (first + column == mask) {
          mask_logit = logit;
        } else if (logit > best) {
          best = logit;
          winner = first + column;
        }
      }
    }));
    // At an rms of 1, about as the final norm leaves it: a margin of longer outputs would say nothing.
    double rms = 0;
    for (const double value : y.values) rms += value * value;
    rms = std::sqrt(rms / static_cast<double>(y.cols));
    if (!(rms > 0) || winner < 0) return std::nullopt;
    for (double& value : y.values) value /= rms;
    if (const double gap = (mask_logit - best) / rms; gap > 4 * subject.gates.margin) {
      double rounding = 0;
      for (const int64_t token : {mask, winner}) {
        DFLASH_ASSIGN_OR_RETURN(const double of_token,
                                subject.reference->LogitRounding(subject.gates.rounding, y, token));
        rounding += of_token;
      }
      if (gap > rounding) return MaskOutput{.y = y, .second = winner};
    }
    DFLASH_ASSIGN_OR_RETURN(const Rows other, subject.reference->HeadRow(winner));
    for (size_t i = 0; i < y.values.size(); ++i) y.values[i] += 8 * (wanted.values[i] - other.values[i]);
  }
  return std::nullopt;
}

}  // namespace dflash::doctor
