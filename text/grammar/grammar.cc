#include "text/grammar/grammar.h"

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace dflash {

Grammar::Node Grammar::AddNode() {
  is_full_ |= static_cast<int32_t>(rule_ended_by_.size()) >= kMaxNodes;
  if (is_full_) return 0;
  rule_ended_by_.push_back(-1);
  return static_cast<Node>(rule_ended_by_.size()) - 1;
}

Grammar::Rule Grammar::AddRule() {
  const auto rule = static_cast<Rule>(rules_.size());
  const Node start = AddNode(), end = AddNode();
  rules_.push_back({start, end});
  if (is_full_) return rule;
  rule_ended_by_[static_cast<size_t>(end)] = rule;
  return rule;
}

void Grammar::AddOneOf(Node from, std::vector<std::string> texts, Node to) {
  std::sort(texts.begin(), texts.end());
  texts.erase(std::unique(texts.begin(), texts.end()), texts.end());
  std::vector<Node> path = {from};  // behind the bytes of the last text
  std::string_view last;
  for (const std::string& text : texts) {
    const auto differ = std::mismatch(text.begin(), text.end(), last.begin(), last.end());
    path.resize(static_cast<size_t>(differ.first - text.begin()) + 1);
    for (size_t i = path.size() - 1; i < text.size(); ++i)
      path.push_back(AddText(path.back(), std::string_view(text).substr(i, 1)));
    AddEmpty(path.back(), to);
    last = text;
  }
}

void Grammar::AddEdge(Node from, const Edge& edge) {
  is_full_ |= static_cast<int32_t>(edges_.size()) >= kMaxEdges;
  if (is_full_) return;
  edges_.push_back(edge);
  edge_from_.push_back(from);
}
void Grammar::AddRange(Node from, uint8_t low, uint8_t high, Node to) {
  AddEdge(from, {Kind::kRange, low, high, -1, to});
}
void Grammar::AddEmpty(Node from, Node to) { AddEdge(from, {Kind::kEmpty, 0, 0, -1, to}); }
void Grammar::AddCall(Node from, Rule rule, Node to) { AddEdge(from, {Kind::kCall, 0, 0, rule, to}); }

Grammar::Node Grammar::AddText(Node from, std::string_view text) {
  for (const char c : text) {
    const Node to = AddNode();
    AddRange(from, static_cast<uint8_t>(c), static_cast<uint8_t>(c), to);
    from = to;
  }
  return from;
}

absl::Status Grammar::Finish(Rule root) {
  root_ = root;
  if (is_full_) return absl::InvalidArgumentError("it makes too large a grammar");
  SortEdges();
  FindNeeds();
  if (need_[static_cast<size_t>(Start(root))] > kMaxDepth)
    return absl::InvalidArgumentError("nothing conforms to it");
  std::vector<char> seen(rules_.size(), 0);
  if (BeginsWithItself(root, seen)) return absl::InvalidArgumentError("it refers to itself without an end");
  FindByteClasses();
  return absl::OkStatus();
}

int64_t Grammar::bytes() const {
  return static_cast<int64_t>(edges_.capacity() * sizeof(Edge) + rules_.capacity() * sizeof(RuleNodes) +
                              (first_edge_.capacity() + rule_ended_by_.capacity() + need_.capacity()) *
                                  sizeof(int32_t));
}

void Grammar::SortEdges() {
  first_edge_.assign(rule_ended_by_.size() + 1, 0);
  for (const Node from : edge_from_) ++first_edge_[static_cast<size_t>(from) + 1];
  for (size_t node = 0; node < rule_ended_by_.size(); ++node) first_edge_[node + 1] += first_edge_[node];
  std::vector<int32_t> next(first_edge_.begin(), first_edge_.end() - 1);
  std::vector<Edge> sorted(edges_.size());
  for (size_t i = 0; i < edges_.size(); ++i)
    sorted[static_cast<size_t>(next[static_cast<size_t>(edge_from_[i])]++)] = edges_[i];
  edges_ = std::move(sorted);
  edge_from_ = {};
  rule_ended_by_.shrink_to_fit();
  rules_.shrink_to_fit();
}

// What a node needs follows from what those behind it need, and is not less: from the ends backwards, the
// least need first, every node is looked at once.
void Grammar::FindNeeds() {
  const size_t nodes = rule_ended_by_.size();
  struct Before {
    Node node;
    int32_t edge;
  };
  std::vector<std::vector<Before>> before(nodes);
  for (size_t node = 0; node < nodes; ++node) {
    for (int32_t i = first_edge_[node]; i < first_edge_[node + 1]; ++i) {
      const Edge& edge = edges_[static_cast<size_t>(i)];
      before[static_cast<size_t>(edge.to)].push_back({static_cast<Node>(node), i});
      if (edge.kind == Kind::kCall)
        before[static_cast<size_t>(Start(edge.rule))].push_back({static_cast<Node>(node), i});
    }
  }
  need_.assign(nodes, kNever);
  std::vector<std::vector<Node>> waiting(kMaxDepth + 1);  // by need
  for (const RuleNodes& rule : rules_) {
    need_[static_cast<size_t>(rule.end)] = 0;
    waiting[0].push_back(rule.end);
  }
  for (int32_t need = 0; need <= kMaxDepth; ++need) {
    std::vector<Node>& nodes_of_need = waiting[static_cast<size_t>(need)];
    while (!nodes_of_need.empty()) {
      const Node node = nodes_of_need.back();
      nodes_of_need.pop_back();
      if (need_[static_cast<size_t>(node)] < need) continue;  // found with less since
      for (const auto& [from, i] : before[static_cast<size_t>(node)]) {
        const Edge& edge = edges_[static_cast<size_t>(i)];
        int32_t along = need_[static_cast<size_t>(edge.to)];
        if (edge.kind == Kind::kCall) {
          const int32_t inside = need_[static_cast<size_t>(Start(edge.rule))];
          along = EndsRule(edge.to) ? inside : std::max(along, std::min(kNever, 1 + inside));
        }
        if (along > kMaxDepth || along >= need_[static_cast<size_t>(from)]) continue;
        need_[static_cast<size_t>(from)] = along;
        waiting[static_cast<size_t>(along)].push_back(from);
      }
    }
  }
}

void Grammar::FindByteClasses() {
  std::array<bool, 257> begins = {};
  for (const Edge& edge : edges_) {
    if (edge.kind != Kind::kRange) continue;
    begins[edge.low] = true;
    begins[edge.high + size_t{1}] = true;
  }
  int32_t last = 0;
  for (size_t byte = 0; byte < 256; ++byte) {
    if (byte > 0 && begins[byte]) ++last;
    byte_class_[byte] = static_cast<uint8_t>(last);
  }
  byte_classes_ = last + 1;
}

// A rule that is inside itself before a byte was read: reading would not end. `seen`, by rule: 1 on the way,
// 2 done.
bool Grammar::BeginsWithItself(Rule rule, std::vector<char>& seen) const {
  if (seen[static_cast<size_t>(rule)] != 0) return seen[static_cast<size_t>(rule)] == 1;
  seen[static_cast<size_t>(rule)] = 1;
  std::vector<Node> nodes = {Start(rule)};
  absl::flat_hash_set<Node> reached;
  while (!nodes.empty()) {
    const Node node = nodes.back();
    nodes.pop_back();
    if (!reached.insert(node).second) continue;
    for (const Edge& edge : EdgesOf(node)) {
      if (edge.kind == Kind::kEmpty) nodes.push_back(edge.to);
      if (edge.kind == Kind::kCall) {
        if (BeginsWithItself(edge.rule, seen)) return true;
        nodes.push_back(edge.to);  // it may be empty
      }
    }
  }
  seen[static_cast<size_t>(rule)] = 2;
  return false;
}

GrammarAutomaton::GrammarAutomaton(Grammar grammar) : grammar_(std::move(grammar)) {
  Reached reached;
  const bool is_bounded = Close(grammar_.Start(grammar_.root_), -1, reached);
  work_done_ += reached.work;
  start_ = is_bounded ? InternState(std::move(reached.readers), reached.is_text) : kTooMany;
}

int64_t GrammarAutomaton::bytes() const {
  // With what vectors and hash tables keep free: a state and its key without configurations, one
  // configuration in both, and one in the table of all.
  constexpr int64_t kStateBytes = 256, kStoredBytes = 8, kConfigurationBytes = 48;
  return grammar_.bytes() + states() * kStateBytes + stored_ * kStoredBytes +
         configurations() * kConfigurationBytes +
         opened_ * grammar_.byte_classes_ * static_cast<int64_t>(sizeof(Transition));
}

void GrammarAutomaton::BeginWalk() {
  ++walk_;
  walk_work_ = 0;
}

int32_t GrammarAutomaton::Intern(Grammar::Node node, int32_t outer) {
  const auto [entry, is_new] =
      configuration_ids_.try_emplace({node, outer}, static_cast<int32_t>(configurations_.size()));
  if (is_new) configurations_.push_back({node, outer, DepthIn(outer)});
  return entry->second;
}

bool GrammarAutomaton::Close(Grammar::Node first, int32_t first_outer, Reached& reached) {
  // Whether it can be read to the end within bounds from a node so deep in rules.
  const auto fits = [&](Grammar::Node node, int32_t depth) {
    return depth + grammar_.need_[static_cast<size_t>(node)] <= Grammar::kMaxDepth;
  };
  std::vector<int32_t> waiting;
  const auto reach = [&](Grammar::Node node, int32_t outer) {
    if (!fits(node, DepthIn(outer))) return;
    const int32_t id = Intern(node, outer);
    if (!reached.configurations.insert(id).second) return;
    waiting.push_back(id);
    reached.work += kConfigurationWork + configurations_[static_cast<size_t>(id)].depth;
  };
  reach(first, first_outer);
  while (!waiting.empty()) {
    if (reached.work > kMaxStepWork) return false;
    const int32_t id = waiting.back();
    waiting.pop_back();
    const Configuration at = configurations_[static_cast<size_t>(id)];
    bool reads = false;
    for (const Grammar::Edge& edge : grammar_.EdgesOf(at.node)) {
      ++reached.work;
      switch (edge.kind) {
        case Grammar::Kind::kRange:
          reads = true;
          break;
        case Grammar::Kind::kEmpty:
          reach(edge.to, at.outer);
          break;
        case Grammar::Kind::kCall: {
          const Grammar::Node start = grammar_.Start(edge.rule);
          if (grammar_.EndsRule(edge.to)) {
            // Nothing is left to read behind it: the way back is that of the rule itself.
            reach(start, at.outer);
          } else if (fits(edge.to, at.depth) && fits(start, at.depth + 1)) {
            reached.work += kConfigurationWork;
            reach(start, Intern(edge.to, at.outer));
          }
          break;
        }
      }
    }
    if (reads) reached.readers.push_back(id);
    if (grammar_.rule_ended_by_[static_cast<size_t>(at.node)] < 0) continue;
    if (at.outer < 0) {
      reached.is_text = true;
    } else {
      const Configuration back = configurations_[static_cast<size_t>(at.outer)];
      reach(back.node, back.outer);
    }
  }
  return true;
}

GrammarAutomaton::State GrammarAutomaton::InternState(std::vector<int32_t> configurations, bool is_text) {
  if (configurations.empty() && !is_text) return kDead;
  std::sort(configurations.begin(), configurations.end());
  const auto [entry, is_new] =
      state_ids_.try_emplace({configurations, is_text}, static_cast<State>(states_.size()));
  if (is_new) {
    stored_ += static_cast<int64_t>(configurations.size());
    size_t edges = 0;
    for (const int32_t id : configurations)
      edges += grammar_.EdgesOf(configurations_[static_cast<size_t>(id)].node).size();
    states_.push_back({.configurations = std::move(configurations),
                       .is_text = is_text,
                       .edges = static_cast<int32_t>(edges),
                       .next = nullptr});
  }
  return entry->second;
}

void GrammarAutomaton::Open(StateInfo& info) {
  const auto classes = static_cast<size_t>(grammar_.byte_classes_);
  info.next = std::make_unique<Transition[]>(classes);
  ++opened_;
  work_done_ += OpeningWork(info);
  std::vector<int32_t> change(classes + 1, 0);  // of the number of edges that take a class, to the next one
  for (const int32_t id : info.configurations) {
    for (const Grammar::Edge& edge : grammar_.EdgesOf(configurations_[static_cast<size_t>(id)].node)) {
      if (edge.kind != Grammar::Kind::kRange) continue;
      ++change[grammar_.byte_class_[edge.low]];
      --change[grammar_.byte_class_[edge.high] + size_t{1}];
    }
  }
  int32_t takers = 0;
  for (size_t i = 0; i < classes; ++i) {
    takers += change[i];
    if (takers == 0) info.next[i].next = kDead;
  }
}

GrammarAutomaton::Transition GrammarAutomaton::MakeTransition(const StateInfo& info, uint8_t byte) {
  Reached reached;
  bool is_bounded = true;
  for (size_t i = 0; i < info.configurations.size() && is_bounded; ++i) {
    const Configuration at = configurations_[static_cast<size_t>(info.configurations[i])];
    for (const Grammar::Edge& edge : grammar_.EdgesOf(at.node)) {
      if (edge.kind != Grammar::Kind::kRange || byte < edge.low || byte > edge.high) continue;
      is_bounded = is_bounded && Close(edge.to, at.outer, reached);
    }
  }
  const int64_t work = info.edges + reached.work + kStateWork;
  work_done_ += work;
  return {.next = is_bounded ? InternState(std::move(reached.readers), reached.is_text) : kTooMany,
          .work = static_cast<int32_t>(work)};
}

GrammarAutomaton::State GrammarAutomaton::Step(State state, uint8_t byte) {
  StateInfo& info = states_[static_cast<size_t>(state)];
  if (info.next == nullptr) Open(info);
  if (info.walk != walk_) {
    info.walk = walk_;
    walk_work_ += OpeningWork(info);
  }
  Transition& transition = info.next[grammar_.byte_class_[byte]];  // stays when further states are made
  if (transition.next == kUnknown) transition = MakeTransition(info, byte);
  if (transition.walk != walk_) {
    transition.walk = walk_;
    walk_work_ += transition.work;
  }
  return transition.next;
}

void GrammarAutomaton::Forget(std::span<State* const> kept) {
  std::vector<StateInfo> states;
  std::vector<Configuration> configurations;
  states.swap(states_);
  configurations.swap(configurations_);
  state_ids_.clear();
  configuration_ids_.clear();
  stored_ = 0;
  opened_ = 0;
  // Configurations of kept states, and those that they return to, whose numbers are lower.
  std::vector<bool> is_kept(configurations.size());
  const auto mark = [&](State state) {
    if (state < 0) return;
    for (const int32_t id : states[static_cast<size_t>(state)].configurations)
      is_kept[static_cast<size_t>(id)] = true;
  };
  mark(start_);
  for (const State* state : kept) mark(*state);
  for (size_t id = configurations.size(); id-- > 0;) {
    if (is_kept[id] && configurations[id].outer >= 0)
      is_kept[static_cast<size_t>(configurations[id].outer)] = true;
  }
  // In ascending order: what one returns to has its new number by then.
  std::vector<int32_t> moved(configurations.size(), -1);
  for (size_t id = 0; id < configurations.size(); ++id) {
    const auto& [node, outer, depth] = configurations[id];
    if (is_kept[id]) moved[id] = Intern(node, outer < 0 ? -1 : moved[static_cast<size_t>(outer)]);
  }
  const auto move = [&](State state) {
    if (state < 0) return state;
    const StateInfo& info = states[static_cast<size_t>(state)];
    std::vector<int32_t> ids;
    for (const int32_t id : info.configurations) ids.push_back(moved[static_cast<size_t>(id)]);
    return InternState(std::move(ids), info.is_text);
  };
  start_ = move(start_);
  for (State* state : kept) *state = move(*state);
}

GrammarAutomaton::State GrammarAutomaton::Read(State state, std::string_view text) {
  for (size_t i = 0; i < text.size() && state >= 0; ++i) state = Step(state, static_cast<uint8_t>(text[i]));
  return state;
}

}  // namespace dflash
