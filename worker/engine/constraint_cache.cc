#include "worker/engine/constraint_cache.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "text/grammar/json_grammar.h"

namespace dflash {
namespace {

absl::StatusOr<Grammar> GrammarOf(const OutputConstraint& constraint) {
  if (!constraint.json_schema.empty()) return ConformsTo(constraint.json_schema);
  if (!constraint.choices.empty()) return OneOf(constraint.choices);
  return AnyJsonObject();
}

std::string KeyOf(const OutputConstraint& constraint) {
  if (!constraint.json_schema.empty()) return absl::StrCat("schema ", constraint.json_schema);
  std::string key = constraint.json_object ? "object" : "choice";
  for (const std::string& choice : constraint.choices) absl::StrAppend(&key, " ", choice.size(), ":", choice);
  return key;
}

}  // namespace

absl::StatusOr<std::shared_ptr<TokenConstraint>> ConstraintCache::Find(const OutputConstraint& constraint) {
  if (!constraint.any()) return nullptr;
  if (tokenizer_ == nullptr) return absl::FailedPreconditionError("constraint: there is no tokenizer");
  const std::string key = KeyOf(constraint);
  const auto found =
      std::find_if(kept_.begin(), kept_.end(), [&](const auto& entry) { return entry.first == key; });
  if (found != kept_.end()) {
    kept_.splice(kept_.begin(), kept_, found);
    return kept_.front().second;
  }
  DFLASH_ASSIGN_OR_RETURN(Grammar grammar, GrammarOf(constraint));
  if (tree_ == nullptr) tree_ = std::make_shared<TokenTree>(*tokenizer_);
  auto compiled = std::make_shared<TokenConstraint>(std::move(grammar), tree_);
  if (ConstraintCursor(compiled).IsTooLarge())
    return absl::InvalidArgumentError("constraint: it is too ambiguous");
  kept_.emplace_front(key, compiled);
  DropUnused();
  return compiled;
}

int64_t ConstraintCache::bytes() const {
  int64_t bytes = 0;
  for (const auto& [key, constraint] : kept_) bytes += static_cast<int64_t>(key.size()) + constraint->bytes();
  return bytes;
}

int64_t ConstraintCache::work_done() const {
  int64_t work = work_of_dropped_;
  for (const auto& [key, constraint] : kept_) work += constraint->work_done();
  return work;
}

void ConstraintCache::DropUnused() {
  int64_t left = bytes();
  for (auto entry = kept_.end(); entry != kept_.begin() && (kept_.size() > kMaxKept || left > max_bytes_);) {
    --entry;
    if (entry->second.use_count() > 1) continue;
    left -= static_cast<int64_t>(entry->first.size()) + entry->second->bytes();
    work_of_dropped_ += entry->second->work_done();
    entry = kept_.erase(entry);
  }
}

}  // namespace dflash
