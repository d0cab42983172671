// The constraints of an engine's requests, each compiled once while it is in use now and then. Requests that
// share one do not change what it allows another (text/grammar/token_constraint.h).
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

  // `tokenizer` is not owned; null: there can be no constraints.
  explicit ConstraintCache(const Tokenizer* tokenizer) : tokenizer_(tokenizer) {}

  // Null where the request has none. Errors: those of text/grammar/json_grammar.h; FailedPrecondition without
  // tokenizer.
  absl::StatusOr<std::shared_ptr<TokenConstraint>> Find(const OutputConstraint& constraint);

 private:
  const Tokenizer* const tokenizer_;
  std::shared_ptr<const TokenTree> tree_;                                     // made for the first
  std::list<std::pair<std::string, std::shared_ptr<TokenConstraint>>> kept_;  // the last used first
};

}  // namespace dflash
