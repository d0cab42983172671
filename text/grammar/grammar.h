// Languages that an output can be bound to, as rules over bytes, and an automaton that reads them byte by
// byte.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"

namespace dflash {

// Rules of a context-free grammar. A rule is a graph of nodes: it is read along edges from its start to its
// end. An edge takes one byte of a range, nothing, or everything that another rule describes.
class Grammar {
 public:
  static constexpr int32_t kMaxNodes = 400'000;
  // Rules in rules: a text whose reading would go deeper does not belong to the language.
  static constexpr int32_t kMaxDepth = 96;

  using Node = int32_t;
  using Rule = int32_t;

  Rule AddRule();
  Node Start(Rule rule) const { return rules_[static_cast<size_t>(rule)].start; }
  Node End(Rule rule) const { return rules_[static_cast<size_t>(rule)].end; }
  Node AddNode();
  void AddRange(Node from, uint8_t low, uint8_t high, Node to);
  void AddEmpty(Node from, Node to);
  void AddCall(Node from, Rule rule, Node to);
  // A new node behind the bytes of `text`.
  Node AddText(Node from, std::string_view text);
  void AddText(Node from, std::string_view text, Node to) { AddEmpty(AddText(from, text), to); }

  // Call once, when all is added; `root` describes the language. InvalidArgument: it has no text, a rule
  // begins with itself, or there are more than kMaxNodes.
  absl::Status Finish(Rule root);

 private:
  friend class GrammarAutomaton;
  enum class Kind : uint8_t { kRange, kEmpty, kCall };
  struct Edge {
    Kind kind;
    uint8_t low, high;
    Rule rule;
    Node to;
  };
  struct RuleNodes {
    Node start, end;
  };
  // Nothing is left to read there: a call that leads to it returns to where its own rule returns.
  bool EndsRule(Node node) const {
    return rule_ended_by_[static_cast<size_t>(node)] >= 0 && edges_[static_cast<size_t>(node)].empty();
  }
  static constexpr int32_t kNever = 1 << 20;

  std::vector<std::vector<Edge>> edges_;  // by node
  std::vector<Rule> rule_ended_by_;       // by node; -1: it ends none
  std::vector<RuleNodes> rules_;
  std::vector<int32_t> need_;  // by node: least depth of rules in which its rule can be read to the end
  Rule root_ = -1;
  bool is_full_ = false;  // more was added than there is room for
};

// Reads texts of a grammar. States are numbers that stay valid until Forget; they are made when they are met
// first, and nothing here bounds how many. Not thread-safe.
class GrammarAutomaton {
 public:
  using State = int32_t;
  static constexpr State kDead = -1;     // no text of the language begins like this
  static constexpr State kTooMany = -2;  // behind more than kMaxReached configurations
  // Configurations behind one byte: a bound of the language and the text, whatever was read before.
  static constexpr size_t kMaxReached = 20'000;

  explicit GrammarAutomaton(Grammar grammar);  // finished

  State start() const { return start_; }  // may be kTooMany
  // state >= 0
  State Step(State state, uint8_t byte);
  State Read(State state, std::string_view text);
  // What was read is a text of the language.
  bool IsText(State state) const { return states_[static_cast<size_t>(state)].is_text; }
  // It can go on.
  bool GoesOn(State state) const { return EdgesOf(state) > 0; }
  // Edges that a step from it looks at, at least one for each of its configurations.
  int64_t EdgesOf(State state) const { return states_[static_cast<size_t>(state)].edges; }

  // What there is: a state takes about 1 KiB, a configuration about 40 bytes.
  int64_t states() const { return static_cast<int64_t>(states_.size()); }
  int64_t configurations() const { return stored_ + static_cast<int64_t>(configurations_.size()); }
  // Forgets all states but start() and those that `kept` points to, which get new numbers; kDead and kTooMany
  // stay what they are.
  void Forget(std::span<State* const> kept);

 private:
  // A place in the grammar: a node, and the places to which the rules return that it is inside of.
  struct Configuration {
    Grammar::Node node;
    int32_t outer;  // configuration, of a lower number; -1: none
    int32_t depth;
  };
  struct StateInfo {
    std::vector<int32_t> configurations;  // ascending; those that can read a byte
    bool is_text = false;
    int64_t edges = 0;
    std::unique_ptr<std::array<State, 256>> next;  // kUnknown where it was not asked for
  };
  static constexpr State kUnknown = -3;

  int32_t Intern(Grammar::Node node, int32_t outer);
  // How deep in rules a node is that returns to `outer`.
  int32_t DepthIn(int32_t outer) const {
    return outer < 0 ? 0 : configurations_[static_cast<size_t>(outer)].depth + 1;
  }
  struct Reached {
    absl::flat_hash_set<int32_t> configurations;
    std::vector<int32_t> readers;  // those of them that can read a byte
    bool is_text = false;
  };
  // Adds a place and what is reached from it without reading anything. False: more than kMaxReached.
  bool Close(Grammar::Node node, int32_t outer, Reached& reached);
  State InternState(std::vector<int32_t> configurations, bool is_text);

  const Grammar grammar_;
  State start_;
  int64_t stored_ = 0;  // configurations in all states
  std::vector<Configuration> configurations_;
  absl::flat_hash_map<std::pair<Grammar::Node, int32_t>, int32_t> configuration_ids_;
  std::vector<StateInfo> states_;
  absl::flat_hash_map<std::pair<std::vector<int32_t>, bool>, State> state_ids_;
};

}  // namespace dflash
