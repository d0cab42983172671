// A language over the tokens of a vocabulary: which token may come next.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "text/grammar/grammar.h"
#include "text/tokenizer.h"

namespace dflash {

// The bytes of all tokens as a tree, in an order in which a walk over it is one pass. Added tokens
// ("<|im_end|>") are left out: no constraint ever allows them. Immutable.
class TokenTree {
 public:
  explicit TokenTree(const Tokenizer& tokenizer);
  // `bytes` by token; empty: left out.
  explicit TokenTree(std::vector<std::string> bytes);

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

// One language, shared by all requests that want it: a ConstraintCursor says where one of them is. Not
// thread-safe, cursors included.
//
// Its automaton's states are met one by one, and forgotten when there are too many, but for those that
// cursors are at; what is met again is made again. So memory is bounded, while what may follow a text is a
// matter of the language and the text alone, never of what was asked before. Where it takes too much to be
// found out, that is known, and no token is left out: see ConstraintCursor::Mask.
class TokenConstraint {
 public:
  struct Limits {
    // Of what is kept, beside the places of cursors: with more it forgets what it can. One walk adds at most
    // about 6 MB, so a constraint takes at most about 16 MB.
    int64_t bytes = 9 << 20;
    // Of them, masks; at least one is kept.
    int64_t mask_bytes = 4 << 20;
    // What the walk that makes a mask may take, in the automaton's work: that of all different steps on the
    // way to all tokens, known from before or not. The last step may go beyond it.
    int64_t walk_work = 1 << 20;
  };

  TokenConstraint(Grammar grammar, std::shared_ptr<const TokenTree> tree, Limits limits);
  TokenConstraint(Grammar grammar, std::shared_ptr<const TokenTree> tree)
      : TokenConstraint(std::move(grammar), std::move(tree), Limits()) {}
  TokenConstraint(const TokenConstraint&) = delete;
  TokenConstraint& operator=(const TokenConstraint&) = delete;

  int64_t states() const { return automaton_.states(); }
  int64_t bytes() const { return automaton_.bytes() + MaskBytes(masks_.size()); }
  // Since it was made.
  int64_t work_done() const { return automaton_.work_done(); }

 private:
  friend class ConstraintCursor;
  using State = GrammarAutomaton::State;

  int64_t MaskBytes(size_t masks) const {
    return static_cast<int64_t>(masks) * (tree_->vocabulary() / 8 + 128);
  }
  // Where there is more than the limits say, forgets what no cursor is at. States get new numbers.
  void MakeRoom();
  struct Kept {
    State state;
    std::vector<uint32_t> mask;
    int64_t work;
  };
  const Kept& Mask(const State& place);  // of places_
  Kept MakeMask(State state);

  GrammarAutomaton automaton_;
  const std::shared_ptr<const TokenTree> tree_;
  const Limits limits_;
  std::list<State> places_;    // one for each cursor
  const int64_t first_bytes_;  // of the automaton at its beginning
  int64_t places_bytes_ = 0;   // what the last forgetting has left beyond that
  std::list<Kept> masks_;      // the last used first
  std::unordered_map<State, std::list<Kept>::iterator> by_state_;
};

// Where an output is in a constraint's language.
class ConstraintCursor {
 public:
  // At the beginning.
  explicit ConstraintCursor(std::shared_ptr<TokenConstraint> constraint);
  ConstraintCursor(const ConstraintCursor& other);
  ConstraintCursor& operator=(const ConstraintCursor& other);
  ~ConstraintCursor();

  // Goes on behind one more token. A cursor that is lost stays where it is.
  void Advance(int32_t token);
  // It is not in the language: no text of it begins like this, or the constraint is too large there.
  bool IsLost() const { return *place_ < 0; }
  bool IsTooLarge() const { return *place_ == GrammarAutomaton::kTooMany; }

  // Of a cursor that is not lost. What was read is a text of the language; it can go on.
  bool IsText() const { return constraint_->automaton_.IsText(*place_); }
  bool GoesOn() const { return constraint_->automaton_.GoesOn(*place_); }
  // A bit for every token that may follow: bit id % 32 of word id / 32. Empty where that is not known, the
  // constraint being too large: a step on the way to some token takes more than
  // GrammarAutomaton::kMaxStepWork, or all of them more than the limit of a walk. Valid until the constraint
  // is asked for anything else.
  std::span<const uint32_t> Mask() const { return constraint_->Mask(*place_).mask; }
  // What the walk to it takes, in the automaton's work, had nothing been known before.
  int64_t MaskWork() const { return constraint_->Mask(*place_).work; }

 private:
  std::shared_ptr<TokenConstraint> constraint_;
  std::list<TokenConstraint::State>::iterator place_;  // of constraint_
};

}  // namespace dflash
