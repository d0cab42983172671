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
  std::vector<int32_t> reached;
  bool is_text = false;
  const bool is_bounded = Close(Intern(grammar_.Start(grammar_.root_), -1), reached, is_text);
  start_ = is_bounded ? InternState(std::move(reached), is_text) : kTooMany;
}

int32_t GrammarAutomaton::Intern(Grammar::Node node, int32_t outer) {
  const auto [entry, is_new] =
      configuration_ids_.try_emplace({node, outer}, static_cast<int32_t>(configurations_.size()));
  if (is_new) {
    const int32_t depth = outer < 0 ? 0 : configurations_[static_cast<size_t>(outer)].depth + 1;
    configurations_.push_back({node, outer, depth});
  }
  return entry->second;
}

bool GrammarAutomaton::Close(int32_t configuration, std::vector<int32_t>& reached, bool& is_text) {
  std::vector<int32_t> waiting = {configuration};
  absl::flat_hash_map<int32_t, bool> seen;
  while (!waiting.empty()) {
    const int32_t id = waiting.back();
    waiting.pop_back();
    const Configuration at = configurations_[static_cast<size_t>(id)];
    const auto node = static_cast<size_t>(at.node);
    // From here it could not be read to the end within bounds.
    if (at.depth + grammar_.need_[node] > Grammar::kMaxDepth) continue;
    if (!seen.emplace(id, true).second) continue;
    if (seen.size() > kMaxReached) return false;
    bool reads = false;
    for (const Grammar::Edge& edge : grammar_.edges_[node]) {
      switch (edge.kind) {
        case Grammar::Kind::kRange:
          reads = true;
          break;
        case Grammar::Kind::kEmpty:
          waiting.push_back(Intern(edge.to, at.outer));
          break;
        case Grammar::Kind::kCall: {
          // The rest behind the call must be possible too.
          if (at.depth + grammar_.need_[static_cast<size_t>(edge.to)] > Grammar::kMaxDepth) break;
          // Where nothing is left to read behind it, the way back is that of the rule itself.
          waiting.push_back(Intern(grammar_.Start(edge.rule),
                                   grammar_.EndsRule(edge.to) ? at.outer : Intern(edge.to, at.outer)));
          break;
        }
      }
    }
    if (reads) reached.push_back(id);
    if (grammar_.rule_ended_by_[node] < 0) continue;
    if (at.outer >= 0) {
      waiting.push_back(at.outer);
    } else {
      is_text = true;
    }
  }
  return true;
}

GrammarAutomaton::State GrammarAutomaton::InternState(std::vector<int32_t> configurations, bool is_text) {
  std::sort(configurations.begin(), configurations.end());
  configurations.erase(std::unique(configurations.begin(), configurations.end()), configurations.end());
  if (configurations.empty() && !is_text) return kDead;
  const auto found = state_ids_.find(std::pair(configurations, is_text));
  if (found != state_ids_.end()) return found->second;
  stored_ += configurations.size();
  if (static_cast<int32_t>(states_.size()) >= kMaxStates || stored_ > kMaxConfigurations) return kTooMany;
  const auto state = static_cast<State>(states_.size());
  state_ids_.emplace(std::pair(configurations, is_text), state);
  states_.push_back({std::move(configurations), is_text, nullptr});
  return state;
}

GrammarAutomaton::State GrammarAutomaton::Step(State state, uint8_t byte) {
  StateInfo& info = states_[static_cast<size_t>(state)];
  if (info.next == nullptr) {
    info.next = std::make_unique<std::array<State, 256>>();
    info.next->fill(kUnknown);
  }
  std::array<State, 256>& next = *info.next;
  if (next[byte] != kUnknown) return next[byte];
  std::vector<int32_t> reached;
  bool is_text = false;
  for (const int32_t id : std::vector<int32_t>(info.configurations)) {
    const Configuration at = configurations_[static_cast<size_t>(id)];
    for (const Grammar::Edge& edge : grammar_.edges_[static_cast<size_t>(at.node)]) {
      if (edge.kind != Grammar::Kind::kRange || byte < edge.low || byte > edge.high) continue;
      if (!Close(Intern(edge.to, at.outer), reached, is_text)) return next[byte] = kTooMany;
    }
  }
  const State to = InternState(std::move(reached), is_text);
  next[byte] = to;  // of a state that stays where it is: `next` is its own memory
  return to;
}

GrammarAutomaton::State GrammarAutomaton::Read(State state, std::string_view text) {
  for (size_t i = 0; i < text.size() && state >= 0; ++i) state = Step(state, static_cast<uint8_t>(text[i]));
  return state;
}

}  // namespace dflash
