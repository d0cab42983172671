// Languages that an output can be bound to, as rules over bytes, and an automaton that reads them byte by
// byte.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
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
  // A finished grammar takes at most about 5 MB.
  static constexpr int32_t kMaxNodes = 100'000;
  static constexpr int32_t kMaxEdges = 320'000;
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
  // One of them; what they begin with alike is there once.
  void AddOneOf(Node from, std::vector<std::string> texts, Node to);

  // Call once, when all is added; `root` describes the language. InvalidArgument: it has no text, a rule
  // begins with itself, or there are more than kMaxNodes or kMaxEdges. In time linear in these.
  absl::Status Finish(Rule root);
  // More was added than there is room for: what is added further is left out, and Finish says so.
  bool is_full() const { return is_full_; }
  int64_t bytes() const;  // of a finished one

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
    return rule_ended_by_[static_cast<size_t>(node)] >= 0 && EdgesOf(node).empty();
  }
  std::span<const Edge> EdgesOf(Node node) const {
    const auto begin = static_cast<size_t>(first_edge_[static_cast<size_t>(node)]);
    return std::span(edges_).subspan(begin,
                                     static_cast<size_t>(first_edge_[static_cast<size_t>(node) + 1]) - begin);
  }
  void AddEdge(Node from, const Edge& edge);
  // Of finished grammars. The edges in the order of their nodes.
  void SortEdges();
  void FindNeeds();
  void FindByteClasses();
  bool BeginsWithItself(Rule rule, std::vector<char>& seen) const;
  static constexpr int32_t kNever = 1 << 20;

  std::vector<Edge> edges_;
  std::vector<Node> edge_from_;      // by edge, until it is finished
  std::vector<int32_t> first_edge_;  // by node, and one more: of edges_
  std::vector<Rule> rule_ended_by_;  // by node; -1: it ends none
  std::vector<RuleNodes> rules_;
  std::vector<int32_t> need_;  // by node: least depth of rules in which its rule can be read to the end;
                               // kNever where that is more than kMaxDepth
  // Bytes that no edge tells apart are of one class.
  std::array<uint8_t, 256> byte_class_ = {};
  int32_t byte_classes_ = 0;
  Rule root_ = -1;
  bool is_full_ = false;
};

// Reads texts of a grammar. States are numbers that stay valid until Forget; they are made when they are met
// first, and nothing here bounds how many. Not thread-safe.
//
// Work is counted in edges that are looked at. A configuration that is met counts as kConfigurationWork and
// its depth of them, a state that is reached as kStateWork, and one that is left, once, as two for each class
// of bytes: so work bounds memory, too. What a step takes is a matter of the language and the text: it counts
// alike whether it is done or known from before.
class GrammarAutomaton {
 public:
  using State = int32_t;
  static constexpr State kDead = -1;     // no text of the language begins like this
  static constexpr State kTooMany = -2;  // what is reached takes more than kMaxStepWork
  static constexpr int64_t kMaxStepWork = 1 << 16;
  static constexpr int64_t kConfigurationWork = 16;
  static constexpr int64_t kStateWork = 64;

  explicit GrammarAutomaton(Grammar grammar);  // finished

  State start() const { return start_; }  // may be kTooMany
  // state >= 0
  State Step(State state, uint8_t byte);
  State Read(State state, std::string_view text);
  // What was read is a text of the language.
  bool IsText(State state) const { return states_[static_cast<size_t>(state)].is_text; }
  // It can go on.
  bool GoesOn(State state) const { return !states_[static_cast<size_t>(state)].configurations.empty(); }

  // The work of all different steps since BeginWalk, as if nothing had been known then.
  void BeginWalk();
  int64_t walk_work() const { return walk_work_; }
  // What was really done.
  int64_t work_done() const { return work_done_; }

  // What is kept, the grammar with it, in memory.
  int64_t bytes() const;
  int64_t states() const { return static_cast<int64_t>(states_.size()); }
  int64_t configurations() const { return static_cast<int64_t>(configurations_.size()); }
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
  struct Transition {
    State next = kUnknown;
    int32_t work = 0;
    uint32_t walk = 0;  // the last one that has counted it
  };
  struct StateInfo {
    std::vector<int32_t> configurations;  // ascending; those that can read a byte
    bool is_text = false;
    int32_t edges = 0;                   // of all of them
    uint32_t walk = 0;                   // the last one that has counted its opening
    std::unique_ptr<Transition[]> next;  // by class of bytes; null until something is read there
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
    int64_t work = 0;
  };
  // Adds a place and what is reached from it without reading anything. False: more than kMaxStepWork.
  bool Close(Grammar::Node node, int32_t outer, Reached& reached);
  State InternState(std::vector<int32_t> configurations, bool is_text);
  // Makes room for the transitions of a state; those of classes that none of its edges takes are dead.
  void Open(StateInfo& info);
  int64_t OpeningWork(const StateInfo& info) const { return info.edges + 2 * grammar_.byte_classes_; }
  Transition MakeTransition(const StateInfo& info, uint8_t byte);

  const Grammar grammar_;
  State start_;
  int64_t stored_ = 0;  // configurations in all states
  int64_t opened_ = 0;  // states with transitions
  uint32_t walk_ = 0;
  int64_t walk_work_ = 0, work_done_ = 0;
  std::vector<Configuration> configurations_;
  absl::flat_hash_map<std::pair<Grammar::Node, int32_t>, int32_t> configuration_ids_;
  std::vector<StateInfo> states_;
  absl::flat_hash_map<std::pair<std::vector<int32_t>, bool>, State> state_ids_;
};

}  // namespace dflash
