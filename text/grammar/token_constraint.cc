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

TokenConstraint::TokenConstraint(Grammar grammar, std::shared_ptr<const TokenTree> tree)
    : automaton_(std::move(grammar)), tree_(std::move(tree)) {}

TokenConstraint::State TokenConstraint::Advance(State state, int32_t token) {
  if (token < 0 || token >= tree_->vocabulary() || tree_->Bytes(token).empty())
    return GrammarAutomaton::kDead;
  return automaton_.Read(state, tree_->Bytes(token));
}

std::span<const uint32_t> TokenConstraint::Mask(State state) {
  if (const auto found = by_state_.find(state); found != by_state_.end()) {
    masks_.splice(masks_.begin(), masks_, found->second);
    return found->second->mask;
  }
  std::vector<uint32_t> mask(static_cast<size_t>((tree_->vocabulary() + 31) / 32), 0);
  std::vector<State> states = {state};  // by depth
  for (size_t i = 0; i < tree_->nodes_.size();) {
    const TokenTree::Node& node = tree_->nodes_[i];
    states.resize(static_cast<size_t>(node.depth));
    const State next = automaton_.Step(states.back(), node.byte);
    if (next < 0) {  // nothing below it, or nobody knows: such a token would be no end
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
  if (masks_.size() >= kMaxMasks) {
    by_state_.erase(masks_.back().state);
    masks_.pop_back();
  }
  masks_.push_front({state, std::move(mask)});
  by_state_[state] = masks_.begin();
  return masks_.front().mask;
}

}  // namespace dflash
