// The constraints of an engine's requests, each compiled once while it is in use now and then. Requests that
// share one do not change what it allows another (text/grammar/token_constraint.h). What requests use stays
// until they end; beyond that there are at most so many and so many bytes, the last used.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "text/grammar/token_constraint.h"
#include "text/tokenizer.h"
#include "worker/engine/request.h"

namespace dflash {

class ConstraintCache {
 public:
  static constexpr size_t kMaxKept = 16;
  static constexpr int64_t kMaxBytes = 64 << 20;

  // `tokenizer` is not owned; null: there can be no constraints.
  explicit ConstraintCache(const Tokenizer* tokenizer, int64_t max_bytes = kMaxBytes)
      : tokenizer_(tokenizer), max_bytes_(max_bytes) {}

  // Null where the request has none. Errors: those of text/grammar/json_grammar.h; FailedPrecondition without
  // tokenizer.
  absl::StatusOr<std::shared_ptr<TokenConstraint>> Find(const OutputConstraint& constraint);
  // Constraints grow while requests use them, and can go when these have ended: call it then.
  void DropUnused();

  size_t size() const { return kept_.size(); }
  int64_t bytes() const;      // of all, in use or not
  int64_t work_done() const;  // of all that there ever were (GrammarAutomaton)

 private:
  const Tokenizer* const tokenizer_;
  const int64_t max_bytes_;
  int64_t work_of_dropped_ = 0;
  std::shared_ptr<const TokenTree> tree_;                                     // made for the first
  std::list<std::pair<std::string, std::shared_ptr<TokenConstraint>>> kept_;  // the last used first
};

}  // namespace dflash
