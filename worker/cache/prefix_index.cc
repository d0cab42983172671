#include "worker/cache/prefix_index.h"

#include <algorithm>

#include "base/check.h"

namespace dflash {

PrefixIndex::Node PrefixIndex::Add() {
  if (free_nodes_.empty()) {
    nodes_.emplace_back();
    return static_cast<Node>(nodes_.size()) - 1;
  }
  const Node node = free_nodes_.back();
  free_nodes_.pop_back();
  Get(node) = {};
  return node;
}

void PrefixIndex::Withdraw(Node node) { leaves_.erase({Get(node).used, node}); }

void PrefixIndex::Offer(Node node) {
  const NodeData& data = Get(node);
  if (IsRoot(node) || data.pins > 0 || data.children > 0) return;
  leaves_.insert({data.used, node});
}

std::vector<PrefixIndex::Node> PrefixIndex::Find(const std::string& salt,
                                                 absl::Span<const int32_t> tokens) const {
  std::vector<Node> path;
  const auto root = roots_.find(salt);
  if (root == roots_.end()) return path;
  Key key = {.parent = root->second, .tokens = {}};
  for (; tokens.size() >= key.tokens.size(); tokens.remove_prefix(key.tokens.size())) {
    std::copy_n(tokens.begin(), key.tokens.size(), key.tokens.begin());
    const auto child = children_.find(key);
    if (child == children_.end()) break;
    path.push_back(child->second);
    key.parent = child->second;
  }
  return path;
}

PrefixIndex::Inserted PrefixIndex::Insert(const std::string& salt, absl::Span<const int32_t> tokens,
                                          const std::vector<int32_t>& pages) {
  const size_t cells = tokens.size() / static_cast<size_t>(kPageTokens);
  DFLASH_CHECK(pages.size() >= cells, "a page for every cell");
  Inserted result;
  result.path = Find(salt, tokens);
  if (result.path.size() == cells) return result;
  if (!roots_.contains(salt)) {
    const Node root = Add();
    Get(root).salt = salt;
    roots_[salt] = root;
  }
  while (result.path.size() < cells) {
    const size_t cell = result.path.size();
    Key key = {.parent = result.path.empty() ? roots_[salt] : result.path.back(), .tokens = {}};
    std::copy_n(tokens.begin() + static_cast<int64_t>(cell) * kPageTokens, key.tokens.size(),
                key.tokens.begin());
    const Node node = Add();
    NodeData& data = Get(node);
    data.key = key;
    data.page = pages[cell];
    data.used = ++clock_;
    children_[key] = node;
    Withdraw(key.parent);
    ++Get(key.parent).children;
    Offer(node);
    result.path.push_back(node);
    ++result.added;
    ++size_;
    ++unpinned_;
  }
  return result;
}

void PrefixIndex::Remove(Node node) {
  const NodeData data = Get(node);
  Withdraw(node);
  if (IsRoot(node)) {
    roots_.erase(data.salt);
  } else {
    children_.erase(data.key);
    --size_;
    --unpinned_;
  }
  if (data.checkpoint >= 0) checkpoint_order_.erase({data.checkpoint_used, node});
  Get(node) = {};
  free_nodes_.push_back(node);
  if (data.key.parent == kNone) return;
  --Get(data.key.parent).children;
  if (IsRoot(data.key.parent)) {
    if (Get(data.key.parent).children == 0) Remove(data.key.parent);
  } else {
    Offer(data.key.parent);
  }
}

void PrefixIndex::SetCheckpoint(Node node, int32_t checkpoint) {
  DFLASH_CHECK(Get(node).checkpoint < 0, "one checkpoint for a node");
  Get(node).checkpoint = checkpoint;
  TouchCheckpoint(node);
}

void PrefixIndex::TouchCheckpoint(Node node) {
  NodeData& data = Get(node);
  checkpoint_order_.erase({data.checkpoint_used, node});
  data.checkpoint_used = ++clock_;
  checkpoint_order_.insert({data.checkpoint_used, node});
}

void PrefixIndex::AddPins(Node node, int64_t count) {
  ++clock_;
  for (; !IsRoot(node); node = Get(node).key.parent) {
    NodeData& data = Get(node);
    Withdraw(node);
    unpinned_ -= data.pins == 0;
    data.pins += count;
    data.used = clock_;
    DFLASH_CHECK(data.pins >= 0, "unpinned more often than pinned");
    unpinned_ += data.pins == 0;
    Offer(node);
  }
}

void PrefixIndex::Pin(Node node) { AddPins(node, 1); }
void PrefixIndex::Unpin(Node node) { AddPins(node, -1); }

std::optional<PrefixIndex::Evicted> PrefixIndex::EvictPage() {
  if (leaves_.empty()) return std::nullopt;
  const Node node = leaves_.begin()->second;
  const Evicted evicted = {.page = Get(node).page, .checkpoint = Get(node).checkpoint};
  Remove(node);
  return evicted;
}

std::optional<int32_t> PrefixIndex::EvictCheckpoint() {
  if (checkpoint_order_.empty()) return std::nullopt;
  NodeData& data = Get(checkpoint_order_.begin()->second);
  checkpoint_order_.erase(checkpoint_order_.begin());
  return std::exchange(data.checkpoint, -1);
}

}  // namespace dflash
