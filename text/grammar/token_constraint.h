// A language over the tokens of a vocabulary: which token may come next.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "text/grammar/grammar.h"
#include "text/tokenizer.h"

namespace dflash {

// The bytes of all tokens as a tree, in an order in which a walk over it is one pass. Added tokens
// ("<|im_end|>") are left out: no constraint ever allows them. Immutable.
class TokenTree {
 public:
  explicit TokenTree(const Tokenizer& tokenizer);

  int64_t vocabulary() const { return static_cast<int64_t>(bytes_.size()); }
  // Empty: not a token of the tree.
  const std::string& Bytes(int32_t token) const { return bytes_[static_cast<size_t>(token)]; }

 private:
  friend class TokenConstraint;
  struct Node {
    uint8_t byte;
    int32_t depth;        // from 1
    int32_t behind;       // the first node that is not below this one
    int32_t first_token;  // of tokens_ that end here
    int32_t token_count;
  };
  std::vector<std::string> bytes_;  // by token
  std::vector<Node> nodes_;         // a node before those below it
  std::vector<int32_t> tokens_;
};

// One language. Not thread-safe; shared by all requests that want it.
class TokenConstraint {
 public:
  using State = GrammarAutomaton::State;

  TokenConstraint(Grammar grammar, std::shared_ptr<const TokenTree> tree);

  State start() const { return automaton_.start(); }
  // The state behind one more token; GrammarAutomaton::kDead, kTooMany.
  State Advance(State state, int32_t token);
  bool IsText(State state) const { return automaton_.IsText(state); }
  bool GoesOn(State state) const { return automaton_.GoesOn(state); }
  // A bit for every token that may follow: bit id % 32 of word id / 32. Valid until the next call.
  std::span<const uint32_t> Mask(State state);

 private:
  static constexpr size_t kMaxMasks = 256;

  GrammarAutomaton automaton_;
  const std::shared_ptr<const TokenTree> tree_;
  struct Kept {
    State state;
    std::vector<uint32_t> mask;
  };
  std::list<Kept> masks_;  // the last used first
  std::unordered_map<State, std::list<Kept>::iterator> by_state_;
};

}  // namespace dflash
