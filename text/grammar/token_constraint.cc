#include "text/grammar/token_constraint.h"

#include <algorithm>
#include <utility>

namespace dflash {

TokenTree::TokenTree(const Tokenizer& tokenizer) {
  bytes_.resize(static_cast<size_t>(tokenizer.vocabulary_size()));
  std::vector<int32_t> sorted;
  for (int32_t id = 0; id < tokenizer.vocabulary_size(); ++id) {
    const absl::StatusOr<Tokenizer::Token> token = tokenizer.Find(id);
    if (!token.ok() || token->special || token->bytes.empty()) continue;
    if (tokenizer.FindAddedToken(token->bytes) == id) continue;
    bytes_[static_cast<size_t>(id)] = std::string(token->bytes);
    sorted.push_back(id);
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
    : automaton_(std::move(grammar)), tree_(std::move(tree)), limits_(limits) {}

void TokenConstraint::MakeRoom() {
  if (automaton_.states() - kept_states_ <= limits_.states &&
      automaton_.configurations() - kept_configurations_ <= limits_.configurations)
    return;
  std::vector<State*> kept;
  for (State& place : places_) kept.push_back(&place);
  automaton_.Forget(kept);
  kept_states_ = automaton_.states();
  kept_configurations_ = automaton_.configurations();
  by_state_.clear();
  masks_.clear();
}

std::span<const uint32_t> TokenConstraint::Mask(const State& place) {
  if (const auto found = by_state_.find(place); found != by_state_.end()) {
    masks_.splice(masks_.begin(), masks_, found->second);
    return found->second->mask;
  }
  MakeRoom();
  if (masks_.size() >= kMaxMasks) {
    by_state_.erase(masks_.back().state);
    masks_.pop_back();
  }
  masks_.push_front({place, MakeMask(place)});
  by_state_[place] = masks_.begin();
  return masks_.front().mask;
}

std::vector<uint32_t> TokenConstraint::MakeMask(State state) {
  std::vector<uint32_t> mask(static_cast<size_t>((tree_->vocabulary() + 31) / 32), 0);
  std::vector<State> states = {state};  // by depth
  // What the walk meets, whether it is new to the automaton or not.
  std::vector<bool> met(static_cast<size_t>(automaton_.states()));
  int64_t states_met = 0, edges_met = 0;
  for (size_t i = 0; i < tree_->nodes_.size();) {
    const TokenTree::Node& node = tree_->nodes_[i];
    states.resize(static_cast<size_t>(node.depth));
    const State next = automaton_.Step(states.back(), node.byte);
    if (next == GrammarAutomaton::kTooMany) return {};
    if (next == GrammarAutomaton::kDead) {
      i = static_cast<size_t>(node.behind);
      continue;
    }
    met.resize(static_cast<size_t>(automaton_.states()));
    if (!met[static_cast<size_t>(next)]) {
      met[static_cast<size_t>(next)] = true;
      ++states_met;
      edges_met += automaton_.EdgesOf(next);
      if (states_met > limits_.walk_states || edges_met > limits_.walk_edges) return {};
    }
    states.push_back(next);
    for (int32_t t = 0; t < node.token_count; ++t) {
      const auto token = static_cast<size_t>(tree_->tokens_[static_cast<size_t>(node.first_token + t)]);
      mask[token / 32] |= uint32_t{1} << (token % 32);
    }
    ++i;
  }
  return mask;
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
