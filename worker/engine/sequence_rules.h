// The rules that a request's parameters lay on the logits of its rows (kernels/sampling/logit_rules.h). One
// function serves every row: the first token of an output, plain decoding, and each row of a block, whose
// history is what was emitted and the drafts before it. So drafts never change what is chosen. Source:
// docs/spec/verification.md "Request parameters".
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "absl/status/statusor.h"
#include "text/grammar/token_constraint.h"
#include "worker/engine/request.h"
#include "worker/model/row_processing.h"

namespace dflash {

class SequenceRules {
 public:
  // Of the constraint's automaton, for the rows of a block, as if nothing was known; the last may go beyond.
  static constexpr int64_t kMaxBlockWork = 3 << 20;

  // Null where the request has nothing that makes rules. InvalidArgument: token ids outside [0, vocabulary).
  // `constraint` may be null.
  static absl::StatusOr<std::unique_ptr<SequenceRules>> Create(
      const GenerationRequest& request, int64_t vocabulary,
      std::shared_ptr<TokenConstraint> constraint = nullptr);

  // A token was emitted.
  void Append(int32_t token);

  // Writes the rules of the rows that follow: batch.rows[first_row] is the row after the last emitted token,
  // each further one the row after one more of `drafts`. The rows exist. Returns how many it has written, at
  // least one: none behind one that allows nothing because the constraint is too large, and none behind those
  // whose masks take kMaxBlockWork together. The others have no rules, and must not be reached.
  size_t Describe(std::span<const int32_t> drafts, size_t first_row, RuleBatch& batch) const;

  // Whether the target says something else than it would without rules, in the next `rows` rows: there are
  // penalties, biases, bad words or a constraint, the output is shorter than min_tokens, or its thinking may
  // reach its end. What the drafter expects is then no measure of it.
  bool ChangesLaw(int64_t rows) const;

  // The constraint has all that it may have, and no end token can say so.
  bool IsComplete() const;
  // No token may follow, whatever its logit: what the constraint or the end of thinking leaves is forbidden
  // by bad words or, before min_tokens, as an end token.
  bool AllowsNothing() const;
  // Nothing is known of what may follow: the output is no beginning that the constraint allows, or the
  // constraint is too large.
  bool HasLostTrack() const { return place_.text && place_.text->IsLost(); }
  // The constraint is too large to be followed further: it is not known where the output stands in it, or of
  // every token whether it may come next. A matter of the constraint and the output alone.
  bool IsTooLarge() const;

 private:
  // Where a row stands in thinking and in the constraint's language.
  struct Place {
    bool thinks = false;
    int64_t thought = 0;                   // tokens
    std::optional<ConstraintCursor> text;  // where there is a constraint
  };
  void Advance(int32_t token, Place& place) const;
  bool IsStop(int32_t token) const;
  // Adds the mask of a row and returns its number. What is not known to be allowed is forbidden: IsTooLarge.
  int32_t AddMask(const ConstraintCursor& text, RuleBatch& batch) const;
  bool counts_output() const { return frequency_penalty_ != 0 || presence_penalty_ != 0; }
  bool has_penalties() const { return repetition_penalty_ != 1 || counts_output(); }
  LogitEdit EditOf(int32_t token, int64_t count) const;
  int64_t CountOf(int32_t token) const;
  // Ids that the output before a row, `committed` of output_ and all of `drafts`, forbids.
  template <typename Forbid>
  void ForEachForbidden(std::span<const int32_t> drafts, const Forbid& forbid) const;

  float repetition_penalty_ = 1, frequency_penalty_ = 0, presence_penalty_ = 0;
  std::unordered_map<int32_t, float> bias_;
  std::vector<std::vector<int32_t>> bad_words_;
  std::vector<int32_t> stop_token_ids_;
  int64_t min_tokens_ = 0;
  ThinkingBudget budget_;
  int32_t thinking_open_ = -1, thinking_close_ = -1;
  int64_t vocabulary_ = 0;

  std::unordered_set<int32_t> prompt_;           // where a penalty looks at it
  std::unordered_map<int32_t, int64_t> counts_;  // of output tokens, where a penalty looks at them
  std::vector<int32_t> output_;
  Place place_;
};

}  // namespace dflash
