// What an output is made of at each place: thinking, a tool call, code or other text. Drafters accept very
// differently on them, so acceptance is told apart by it. Known from the marks that models themselves write:
// <think>, <tool_call> and fences of three backquotes. Code that stands without a fence counts as text, a
// fence that is cut over two tokens is not seen.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "worker/engine/request.h"

namespace dflash {

class Tokenizer;

// The tokens that begin or end something.
class ContentMarks {
 public:
  enum class Mark : uint8_t { kNone, kThinkBegin, kThinkEnd, kToolBegin, kToolEnd, kFence };

  // Null: no token is a mark.
  explicit ContentMarks(const Tokenizer* tokenizer);
  Mark Of(int32_t token) const;

 private:
  absl::flat_hash_map<int32_t, Mark> marks_;
};

class ContentTracker {
 public:
  ContentTracker() = default;
  // At the end of the prompt, which may have begun the thinking. `marks` is not owned.
  ContentTracker(const ContentMarks* marks, const std::vector<int32_t>& prompt);

  // The next token of the output.
  void See(int32_t token);
  // At the place behind the last token.
  ContentClass current() const;

 private:
  const ContentMarks* marks_ = nullptr;
  bool thinking_ = false, tool_ = false, code_ = false;
};

}  // namespace dflash
