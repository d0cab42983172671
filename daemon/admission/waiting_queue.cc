#include "daemon/admission/waiting_queue.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "daemon/request/request_error.h"

namespace dflash {

absl::Duration WaitingQueue::RetryHint() const {
  // Half of the queue: all who were refused come back at about the same time, and want to find room.
  const double ahead = std::max(1.0, static_cast<double>(size()) / 2);
  return std::clamp(pop_interval_.value_or(absl::Seconds(1)) * ahead, absl::Milliseconds(100),
                    absl::Seconds(60));
}

absl::Status WaitingQueue::Full(const std::string& what) const {
  return WithDetails(absl::ResourceExhaustedError(absl::StrCat("the queue is full: ", what)),
                     {.reason = "QUEUE_FULL", .field = "", .retry_after = RetryHint(), .metadata = {}});
}

absl::Status WaitingQueue::CheckRoom(int64_t reserved) const {
  const int64_t ahead = size() + reserved;
  if (ahead >= limits_.max_requests) {
    return Full(absl::StrCat("at most ", limits_.max_requests, " requests wait"));
  }
  if (prompt_tokens_ >= limits_.max_prompt_tokens) {
    return Full(absl::StrCat("at most ", limits_.max_prompt_tokens, " prompt tokens wait"));
  }
  // A request that finds nobody waiting is taken whatever was measured: the measure must not keep out what
  // would renew it.
  if (ahead > 0 && pop_interval_.has_value()) {
    const absl::Duration wait = *pop_interval_ * ahead;
    if (wait > limits_.max_wait) {
      return Full(absl::StrCat(ahead, " requests wait, which takes about ",
                               absl::FormatDuration(absl::Ceil(wait, absl::Seconds(1))), ", over ",
                               absl::FormatDuration(limits_.max_wait)));
    }
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
  ages_.insert(entry.since);
  ClientRequests& own = clients_[entry.client];
  own.last = own.waiting == 0 ? entry.since : std::max(entry.since, own.last + kClientSpacing);
  ++own.waiting;
  const Place place = {own.last - kPriorityStep * entry.priority, next_number_++};
  const auto it = entries_.emplace(place, std::move(entry)).first;
  index_.emplace(it->second.id, it);
  return absl::OkStatus();
}

void WaitingQueue::Erase(Entries::iterator it) {
  const Entry& entry = it->second;
  prompt_tokens_ -= entry.prompt_tokens;
  ages_.erase(ages_.find(entry.since));
  const auto own = clients_.find(entry.client);
  if (--own->second.waiting == 0) clients_.erase(own);
  index_.erase(entry.id);
  entries_.erase(it);
  if (entries_.empty()) busy_since_ = absl::InfinitePast();
}

const WaitingQueue::Entry* WaitingQueue::Front() const {
  return entries_.empty() ? nullptr : &entries_.begin()->second;
}

std::optional<WaitingQueue::Entry> WaitingQueue::Pop(absl::Time now) {
  if (entries_.empty()) return std::nullopt;
  if (busy_since_ != absl::InfinitePast()) {
    const absl::Duration interval = now - busy_since_;
    pop_interval_ = pop_interval_.has_value() ? *pop_interval_ * 0.8 + interval * 0.2 : interval;
  }
  Entry entry = entries_.begin()->second;
  Erase(entries_.begin());
  if (!entries_.empty()) busy_since_ = now;
  return entry;
}

bool WaitingQueue::Remove(const std::string& id) {
  const auto it = index_.find(id);
  if (it == index_.end()) return false;
  Erase(it->second);
  return true;
}

WaitingQueue::Expired WaitingQueue::TakeExpired(absl::Time now) {
  Expired expired;
  for (auto it = entries_.begin(); it != entries_.end();) {
    const auto current = it++;
    const Entry& entry = current->second;
    const bool late = entry.deadline <= now;
    if (!late && now - entry.since < limits_.max_wait) continue;
    (late ? expired.deadline : expired.too_long).push_back(entry);
    Erase(current);
  }
  return expired;
}

std::vector<WaitingQueue::Entry> WaitingQueue::TakeAll() {
  std::vector<Entry> all;
  while (!entries_.empty()) {
    all.push_back(entries_.begin()->second);
    Erase(entries_.begin());
  }
  return all;
}

void WaitingQueue::ForgetSpeed() {
  DFLASH_CHECK(entries_.empty(), "requests wait");
  pop_interval_.reset();
}

absl::Duration WaitingQueue::OldestAge(absl::Time now) const {
  return ages_.empty() ? absl::ZeroDuration() : now - *ages_.begin();
}

}  // namespace dflash
