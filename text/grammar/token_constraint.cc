#include "text/grammar/token_constraint.h"

#include <algorithm>
#include <utility>

namespace dflash {

namespace {

std::vector<std::string> BytesOf(const Tokenizer& tokenizer) {
  std::vector<std::string> bytes(static_cast<size_t>(tokenizer.vocabulary_size()));
  for (int32_t id = 0; id < tokenizer.vocabulary_size(); ++id) {
    const absl::StatusOr<Tokenizer::Token> token = tokenizer.Find(id);
    if (!token.ok() || token->special || token->bytes.empty()) continue;
    if (tokenizer.FindAddedToken(token->bytes) == id) continue;
    bytes[static_cast<size_t>(id)] = std::string(token->bytes);
  }
  return bytes;
}

}  // namespace

TokenTree::TokenTree(const Tokenizer& tokenizer) : TokenTree(BytesOf(tokenizer)) {}

TokenTree::TokenTree(std::vector<std::string> all_bytes) : bytes_(std::move(all_bytes)) {
  std::vector<int32_t> sorted;
  for (int32_t id = 0; id < vocabulary(); ++id) {
    if (!Bytes(id).empty()) sorted.push_back(id);
  }
  std::sort(sorted.begin(), sorted.end(), [&](int32_t a, int32_t b) { return Bytes(a) < Bytes(b); });
  std::vector<int32_t> path;  // nodes from the root to the last token
  const auto leave = [&](size_t depth) {
    for (; path.size() > depth; path.pop_back())
      nodes_[static_cast<size_t>(path.back())].behind = static_cast<int32_t>(nodes_.size());
  };
  std::string last;
  for (const int32_t id : sorted) {
    const std::string& bytes = Bytes(id);
    const auto differ = std::mismatch(bytes.begin(), bytes.end(), last.begin(), last.end());
    leave(static_cast<size_t>(differ.first - bytes.begin()));
    while (path.size() < bytes.size()) {
      path.push_back(static_cast<int32_t>(nodes_.size()));
      nodes_.push_back({.byte = static_cast<uint8_t>(bytes[path.size() - 1]),
                        .depth = static_cast<int32_t>(path.size()),
                        .behind = 0,
                        .first_token = static_cast<int32_t>(tokens_.size()),
                        .token_count = 0});
    }
    ++nodes_[static_cast<size_t>(path.back())].token_count;
    tokens_.push_back(id);
    last = bytes;
  }
  leave(0);
}

TokenConstraint::TokenConstraint(Grammar grammar, std::shared_ptr<const TokenTree> tree, Limits limits)
    : automaton_(std::move(grammar)),
      tree_(std::move(tree)),
      limits_(limits),
      first_bytes_(automaton_.bytes()) {}

void TokenConstraint::MakeRoom() {
  if (bytes() - places_bytes_ <= limits_.bytes) return;
  std::vector<State*> kept;
  for (State& place : places_) kept.push_back(&place);
  automaton_.Forget(kept);
  places_bytes_ = automaton_.bytes() - first_bytes_;
  by_state_.clear();
  masks_.clear();
}

const TokenConstraint::Kept& TokenConstraint::Mask(const State& place) {
  if (const auto found = by_state_.find(place); found != by_state_.end()) {
    masks_.splice(masks_.begin(), masks_, found->second);
    return *found->second;
  }
  MakeRoom();
  while (!masks_.empty() && MaskBytes(masks_.size() + 1) > limits_.mask_bytes) {
    by_state_.erase(masks_.back().state);
    masks_.pop_back();
  }
  masks_.push_front(MakeMask(place));
  by_state_[place] = masks_.begin();
  return masks_.front();
}

TokenConstraint::Kept TokenConstraint::MakeMask(State state) {
  std::vector<uint32_t> mask(static_cast<size_t>((tree_->vocabulary() + 31) / 32), 0);
  std::vector<State> states = {state};  // by depth
  automaton_.BeginWalk();
  for (size_t i = 0; i < tree_->nodes_.size();) {
    const TokenTree::Node& node = tree_->nodes_[i];
    states.resize(static_cast<size_t>(node.depth));
    const State next = automaton_.Step(states.back(), node.byte);
    if (next == GrammarAutomaton::kTooMany || automaton_.walk_work() > limits_.walk_work)
      return {state, {}, automaton_.walk_work()};
    if (next == GrammarAutomaton::kDead) {
      i = static_cast<size_t>(node.behind);
      continue;
    }
    states.push_back(next);
    for (int32_t t = 0; t < node.token_count; ++t) {
      const auto token = static_cast<size_t>(tree_->tokens_[static_cast<size_t>(node.first_token + t)]);
      mask[token / 32] |= uint32_t{1} << (token % 32);
    }
    ++i;
  }
  return {state, std::move(mask), automaton_.walk_work()};
}

ConstraintCursor::ConstraintCursor(std::shared_ptr<TokenConstraint> constraint)
    : constraint_(std::move(constraint)),
      place_(constraint_->places_.insert(constraint_->places_.end(), constraint_->automaton_.start())) {}

ConstraintCursor::ConstraintCursor(const ConstraintCursor& other)
    : constraint_(other.constraint_),
      place_(constraint_->places_.insert(constraint_->places_.end(), *other.place_)) {}

ConstraintCursor& ConstraintCursor::operator=(const ConstraintCursor& other) {
  ConstraintCursor copy(other);
  std::swap(constraint_, copy.constraint_);
  std::swap(place_, copy.place_);
  return *this;
}

ConstraintCursor::~ConstraintCursor() { constraint_->places_.erase(place_); }

void ConstraintCursor::Advance(int32_t token) {
  const TokenTree& tree = *constraint_->tree_;
  if (IsLost()) return;
  if (token < 0 || token >= tree.vocabulary() || tree.Bytes(token).empty()) {
    *place_ = GrammarAutomaton::kDead;
    return;
  }
  constraint_->MakeRoom();
  *place_ = constraint_->automaton_.Read(*place_, tree.Bytes(token));
}

}  // namespace dflash
