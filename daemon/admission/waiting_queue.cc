#include "daemon/admission/waiting_queue.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "daemon/request/request_error.h"

namespace dflash {

absl::Status WaitingQueue::Full(const std::string& what) const {
  const absl::Duration retry = std::clamp(pop_interval_, absl::Milliseconds(100), absl::Seconds(60));
  return WithDetails(absl::ResourceExhaustedError(absl::StrCat("the queue is full: ", what)),
                     {.reason = "QUEUE_FULL", .field = "", .retry_after = retry, .metadata = {}});
}

absl::Status WaitingQueue::CheckRoom(int64_t reserved) const {
  if (size() + reserved >= limits_.max_requests) {
    return Full(absl::StrCat("at most ", limits_.max_requests, " requests wait"));
  }
  if (prompt_tokens_ >= limits_.max_prompt_tokens) {
    return Full(absl::StrCat("at most ", limits_.max_prompt_tokens, " prompt tokens wait"));
  }
  return absl::OkStatus();
}

absl::Status WaitingQueue::Push(Entry entry) {
  if (size() >= limits_.max_requests) {
    return Full(absl::StrCat("at most ", limits_.max_requests, " requests wait"));
  }
  if (!entries_.empty() && entry.prompt_tokens > limits_.max_prompt_tokens - prompt_tokens_) {
    return Full(absl::StrCat(prompt_tokens_, " prompt tokens wait, with ", entry.prompt_tokens,
                             " more it would be over ", limits_.max_prompt_tokens));
  }
  DFLASH_CHECK(index_.count(entry.id) == 0, entry.id.c_str());
  prompt_tokens_ += entry.prompt_tokens;
  entries_.push_back(std::move(entry));
  index_.emplace(entries_.back().id, std::prev(entries_.end()));
  return absl::OkStatus();
}

void WaitingQueue::Erase(std::list<Entry>::iterator it) {
  prompt_tokens_ -= it->prompt_tokens;
  index_.erase(it->id);
  entries_.erase(it);
}

std::optional<WaitingQueue::Entry> WaitingQueue::Pop(absl::Time now) {
  if (entries_.empty()) return std::nullopt;
  if (last_pop_ != absl::InfinitePast()) pop_interval_ = pop_interval_ * 0.8 + (now - last_pop_) * 0.2;
  last_pop_ = now;
  Entry entry = entries_.front();
  Erase(entries_.begin());
  return entry;
}

bool WaitingQueue::Remove(const std::string& id) {
  const auto it = index_.find(id);
  if (it == index_.end()) return false;
  Erase(it->second);
  return true;
}

std::vector<WaitingQueue::Entry> WaitingQueue::TakeExpired(absl::Time now) {
  std::vector<Entry> expired;
  for (auto it = entries_.begin(); it != entries_.end();) {
    const auto current = it++;
    if (current->deadline > now) continue;
    expired.push_back(*current);
    Erase(current);
  }
  return expired;
}

std::vector<WaitingQueue::Entry> WaitingQueue::TakeAll() { return TakeExpired(absl::InfiniteFuture()); }

absl::Duration WaitingQueue::OldestAge(absl::Time now) const {
  return entries_.empty() ? absl::ZeroDuration() : now - entries_.front().since;
}

}  // namespace dflash
