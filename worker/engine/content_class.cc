#include "worker/engine/content_class.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "text/tokenizer.h"

namespace dflash {
namespace {

using Mark = ContentMarks::Mark;

constexpr std::string_view kFence = "```";
// Templates begin or skip the thinking in the last tokens of a prompt.
constexpr size_t kPromptTail = 16;

bool OpensOrClosesCode(std::string_view bytes) {
  int fences = 0;
  for (size_t at = bytes.find(kFence); at != std::string_view::npos;
       at = bytes.find(kFence, at + kFence.size()))
    ++fences;
  return fences % 2 == 1;
}

}  // namespace

ContentMarks::ContentMarks(const Tokenizer* tokenizer) {
  if (tokenizer == nullptr) return;
  for (int32_t id = 0; id < tokenizer->vocabulary_size(); ++id) {
    const auto token = tokenizer->Find(id);
    if (token.ok() && OpensOrClosesCode(token->bytes)) marks_[id] = Mark::kFence;
  }
  for (const auto& [content, mark] :
       {std::pair("<think>", Mark::kThinkBegin), std::pair("</think>", Mark::kThinkEnd),
        std::pair("<tool_call>", Mark::kToolBegin), std::pair("</tool_call>", Mark::kToolEnd)}) {
    if (const auto id = tokenizer->FindAddedToken(content)) marks_[*id] = mark;
  }
}

ContentMarks::Mark ContentMarks::Of(int32_t token) const {
  const auto found = marks_.find(token);
  return found == marks_.end() ? Mark::kNone : found->second;
}

ContentTracker::ContentTracker(const ContentMarks* marks, const std::vector<int32_t>& prompt)
    : marks_(marks) {
  const size_t tail = std::min(prompt.size(), kPromptTail);
  for (size_t i = prompt.size() - tail; i < prompt.size(); ++i) {
    const Mark mark = marks->Of(prompt[i]);
    if (mark == Mark::kThinkBegin || mark == Mark::kThinkEnd) thinking_ = mark == Mark::kThinkBegin;
  }
}

void ContentTracker::See(int32_t token) {
  if (marks_ == nullptr) return;
  switch (marks_->Of(token)) {
    case Mark::kNone:
      return;
    case Mark::kFence:
      code_ = !code_;
      return;
    case Mark::kThinkBegin:
    case Mark::kThinkEnd:
      thinking_ = marks_->Of(token) == Mark::kThinkBegin;
      break;
    case Mark::kToolBegin:
    case Mark::kToolEnd:
      tool_ = marks_->Of(token) == Mark::kToolBegin;
      break;
  }
  code_ = false;  // a fence does not reach over such a border
}

ContentClass ContentTracker::current() const {
  if (tool_) return ContentClass::kToolCall;
  if (thinking_) return ContentClass::kThinking;
  return code_ ? ContentClass::kCode : ContentClass::kText;
}

}  // namespace dflash
