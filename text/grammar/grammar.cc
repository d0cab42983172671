#include "text/grammar/grammar.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/status.h"

namespace dflash {

Grammar::Node Grammar::AddNode() {
  is_full_ |= static_cast<int32_t>(edges_.size()) >= kMaxNodes;
  if (is_full_) return 0;
  edges_.emplace_back();
  rule_ended_by_.push_back(-1);
  return static_cast<Node>(edges_.size()) - 1;
}

Grammar::Rule Grammar::AddRule() {
  const auto rule = static_cast<Rule>(rules_.size());
  const Node start = AddNode(), end = AddNode();
  rules_.push_back({start, end});
  if (is_full_) return rule;
  rule_ended_by_[static_cast<size_t>(end)] = rule;
  return rule;
}

void Grammar::AddRange(Node from, uint8_t low, uint8_t high, Node to) {
  if (!is_full_) edges_[static_cast<size_t>(from)].push_back({Kind::kRange, low, high, -1, to});
}
void Grammar::AddEmpty(Node from, Node to) {
  if (!is_full_) edges_[static_cast<size_t>(from)].push_back({Kind::kEmpty, 0, 0, -1, to});
}
void Grammar::AddCall(Node from, Rule rule, Node to) {
  if (!is_full_) edges_[static_cast<size_t>(from)].push_back({Kind::kCall, 0, 0, rule, to});
}

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
  // What a node needs follows from what those behind it need: from the ends backwards.
  std::vector<std::vector<Node>> before(edges_.size());
  for (size_t node = 0; node < edges_.size(); ++node) {
    for (const Edge& edge : edges_[node]) {
      before[static_cast<size_t>(edge.to)].push_back(static_cast<Node>(node));
      if (edge.kind == Kind::kCall)
        before[static_cast<size_t>(Start(edge.rule))].push_back(static_cast<Node>(node));
    }
  }
  need_.assign(edges_.size(), kNever);
  std::vector<Node> changed;
  for (const RuleNodes& rule : rules_) {
    need_[static_cast<size_t>(rule.end)] = 0;
    changed.push_back(rule.end);
  }
  while (!changed.empty()) {
    const auto behind = static_cast<size_t>(changed.back());
    changed.pop_back();
    for (const Node node : before[behind]) {
      int32_t& need = need_[static_cast<size_t>(node)];
      const int32_t old = need;
      for (const Edge& edge : edges_[static_cast<size_t>(node)]) {
        int32_t along = need_[static_cast<size_t>(edge.to)];
        if (edge.kind == Kind::kCall) {
          const int32_t inside = need_[static_cast<size_t>(Start(edge.rule))];
          along = EndsRule(edge.to) ? inside : std::max(along, std::min(kNever, 1 + inside));
        }
        need = std::min(need, along);
      }
      if (need < old) changed.push_back(node);
    }
  }
  if (need_[static_cast<size_t>(Start(root))] > kMaxDepth)
    return absl::InvalidArgumentError("nothing conforms to it");
  // No rule may be inside itself before a byte was read: reading would not end.
  std::vector<char> seen(rules_.size(), 0);  // 1: on the way, 2: done
  const std::function<bool(Rule)> begins_with_itself = [&](Rule rule) {
    if (seen[static_cast<size_t>(rule)] != 0) return seen[static_cast<size_t>(rule)] == 1;
    seen[static_cast<size_t>(rule)] = 1;
    std::vector<Node> nodes = {Start(rule)};
    absl::flat_hash_map<Node, bool> reached;
    while (!nodes.empty()) {
      const Node node = nodes.back();
      nodes.pop_back();
      if (!reached.emplace(node, true).second) continue;
      for (const Edge& edge : edges_[static_cast<size_t>(node)]) {
        if (edge.kind == Kind::kEmpty) nodes.push_back(edge.to);
        if (edge.kind == Kind::kCall) {
          if (begins_with_itself(edge.rule)) return true;
          nodes.push_back(edge.to);  // it may be empty
        }
      }
    }
    seen[static_cast<size_t>(rule)] = 2;
    return false;
  };
  if (begins_with_itself(root)) return absl::InvalidArgumentError("it refers to itself without an end");
  return absl::OkStatus();
}

GrammarAutomaton::GrammarAutomaton(Grammar grammar) : grammar_(std::move(grammar)) {
  Reached reached;
  const bool is_bounded = Close(grammar_.Start(grammar_.root_), -1, reached);
  start_ = is_bounded ? InternState(std::move(reached.readers), reached.is_text) : kTooMany;
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
    if (reached.configurations.insert(id).second) waiting.push_back(id);
  };
  reach(first, first_outer);
  while (!waiting.empty()) {
    if (reached.configurations.size() > kMaxReached) return false;
    const int32_t id = waiting.back();
    waiting.pop_back();
    const Configuration at = configurations_[static_cast<size_t>(id)];
    bool reads = false;
    for (const Grammar::Edge& edge : grammar_.edges_[static_cast<size_t>(at.node)]) {
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
      edges += grammar_.edges_[static_cast<size_t>(configurations_[static_cast<size_t>(id)].node)].size();
    states_.push_back({std::move(configurations), is_text, static_cast<int64_t>(edges), nullptr});
  }
  return entry->second;
}

GrammarAutomaton::State GrammarAutomaton::Step(State state, uint8_t byte) {
  StateInfo& info = states_[static_cast<size_t>(state)];
  if (info.next == nullptr) {
    info.next = std::make_unique<std::array<State, 256>>();
    info.next->fill(kUnknown);
  }
  State& next = (*info.next)[byte];  // stays where it is when further states are made
  if (next != kUnknown) return next;
  Reached reached;
  for (const int32_t id : info.configurations) {
    const Configuration at = configurations_[static_cast<size_t>(id)];
    for (const Grammar::Edge& edge : grammar_.edges_[static_cast<size_t>(at.node)]) {
      if (edge.kind != Grammar::Kind::kRange || byte < edge.low || byte > edge.high) continue;
      if (!Close(edge.to, at.outer, reached)) return next = kTooMany;
    }
  }
  return next = InternState(std::move(reached.readers), reached.is_text);
}

void GrammarAutomaton::Forget(std::span<State* const> kept) {
  std::vector<StateInfo> states;
  std::vector<Configuration> configurations;
  states.swap(states_);
  configurations.swap(configurations_);
  state_ids_.clear();
  configuration_ids_.clear();
  stored_ = 0;
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
