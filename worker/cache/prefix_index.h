// Which prefixes are cached: a radix tree over tokens, as pure data.
//
// A node is one cell of the 64-token grid: the 64 tokens that follow those of its parent, the page that holds
// their state (the target's keys and values and the drafter's context, which never go apart), and perhaps a
// checkpoint of the recurrent states after them. Pages and checkpoints are numbers of the caller's. Prefixes
// of different salts share nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "kernels/batch/segments.h"

namespace dflash {

class PrefixIndex {
 public:
  // A node as long as it is in the tree; numbers of removed nodes are used again.
  using Node = int32_t;
  static constexpr Node kNone = -1;

  // The nodes whose tokens are the whole cells of `tokens`, from the first as far as there are any.
  std::vector<Node> Find(const std::string& salt, absl::Span<const int32_t> tokens) const;

  // Makes sure that all whole cells of `tokens` have nodes; a new one gets its cell's page of `pages`, an old
  // one keeps its own. Returns the nodes and how many of them, the last ones, are new.
  struct Inserted {
    std::vector<Node> path;
    int64_t added = 0;
  };
  Inserted Insert(const std::string& salt, absl::Span<const int32_t> tokens,
                  const std::vector<int32_t>& pages);

  int32_t page(Node node) const { return Get(node).page; }
  // Another page with the same contents takes its place.
  void SetPage(Node node, int32_t page) { Get(node).page = page; }
  // kNone: it is the first of its prefix.
  Node parent(Node node) const { return IsRoot(Get(node).key.parent) ? kNone : Get(node).key.parent; }
  int64_t pins(Node node) const { return Get(node).pins; }
  // -1: none.
  int32_t checkpoint(Node node) const { return Get(node).checkpoint; }
  // Of a node that has none.
  void SetCheckpoint(Node node, int32_t checkpoint);
  // Makes the checkpoint the most recently used one.
  void TouchCheckpoint(Node node);

  // A pinned node and those before it stay. Pins count; both ends of a use make the path the most recently
  // used one.
  void Pin(Node node);
  void Unpin(Node node);

  // Removes the least recently used node that is not pinned and has nothing behind it.
  struct Evicted {
    int32_t page = -1;
    int32_t checkpoint = -1;  // went with it
  };
  std::optional<Evicted> EvictPage();
  // Takes the least recently used checkpoint away, pinned or not: whoever begins with one copies it at once.
  // Returns its number.
  std::optional<int32_t> EvictCheckpoint();

  int64_t size() const { return size_; }           // pages
  int64_t evictable() const { return unpinned_; }  // pages that EvictPage could remove one after another
  int64_t checkpoints() const { return static_cast<int64_t>(checkpoint_order_.size()); }

 private:
  using Cell = std::array<int32_t, kPageTokens>;
  struct Key {
    Node parent = kNone;
    Cell tokens = {};
    bool operator==(const Key&) const = default;
    template <typename H>
    friend H AbslHashValue(H state, const Key& key) {
      return H::combine(std::move(state), key.parent, key.tokens);
    }
  };
  struct NodeData {
    Key key;           // a root has no parent
    std::string salt;  // of a root
    int32_t page = -1;
    int32_t checkpoint = -1;
    int64_t pins = 0;  // of this node and all behind it
    int64_t children = 0;
    uint64_t used = 0;             // when, by clock_
    uint64_t checkpoint_used = 0;  // likewise
  };
  using Order = std::set<std::pair<uint64_t, Node>>;  // the least recently used first

  const NodeData& Get(Node node) const { return nodes_[static_cast<size_t>(node)]; }
  NodeData& Get(Node node) { return nodes_[static_cast<size_t>(node)]; }
  bool IsRoot(Node node) const { return Get(node).key.parent == kNone; }
  Node Add();
  void Remove(Node node);
  // Takes `node` out of the order of leaves, or puts it back if it may be evicted.
  void Withdraw(Node node);
  void Offer(Node node);
  void AddPins(Node node, int64_t count);

  std::vector<NodeData> nodes_;
  std::vector<Node> free_nodes_;
  absl::flat_hash_map<std::string, Node> roots_;  // by salt
  absl::flat_hash_map<Key, Node> children_;
  Order leaves_;  // unpinned, without children
  Order checkpoint_order_;
  uint64_t clock_ = 0;
  int64_t size_ = 0;
  int64_t unpinned_ = 0;
};

}  // namespace dflash
