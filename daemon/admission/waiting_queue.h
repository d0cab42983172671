// The only waiting queue of the server: requests that no worker group has room for yet. First in, first out,
// bounded by requests and by prompt tokens. Pure bookkeeping: no clock, no threads, no sockets.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace dflash {

struct QueueLimits {
  int64_t max_requests = 256;
  int64_t max_prompt_tokens = 1 << 20;
};

class WaitingQueue {
 public:
  struct Entry {
    std::string id;  // unique in the queue
    int64_t prompt_tokens = 0;
    absl::Time since;
    absl::Time deadline = absl::InfiniteFuture();
  };

  explicit WaitingQueue(const QueueLimits& limits) : limits_(limits) {}

  // Is there room for one more request, whose length is not known yet? ResourceExhausted (reason QUEUE_FULL,
  // with a hint when to retry): no. Lets an overloaded server refuse before it spends time on tokenizing.
  // `reserved` counts the requests that were promised a place and are still being prepared.
  absl::Status CheckRoom(int64_t reserved) const;
  // Appends a request. ResourceExhausted as above, naming the bound that is hit. A request that is longer
  // than the token bound is taken by an empty queue: it would never fit otherwise.
  absl::Status Push(Entry entry);

  // Removes and returns the first request.
  std::optional<Entry> Pop(absl::Time now);
  // Removes one request; false when it is not here.
  bool Remove(const std::string& id);
  // Removes and returns all requests whose deadline has come.
  std::vector<Entry> TakeExpired(absl::Time now);
  // Removes and returns all requests.
  std::vector<Entry> TakeAll();

  int64_t size() const { return static_cast<int64_t>(index_.size()); }
  int64_t prompt_tokens() const { return prompt_tokens_; }
  // Age of the first request; zero when empty.
  absl::Duration OldestAge(absl::Time now) const;
  const QueueLimits& limits() const { return limits_; }

 private:
  absl::Status Full(const std::string& what) const;
  void Erase(std::list<Entry>::iterator it);

  QueueLimits limits_;
  std::list<Entry> entries_;
  std::unordered_map<std::string, std::list<Entry>::iterator> index_;
  int64_t prompt_tokens_ = 0;
  // Smoothed time between two Pops: how soon a place gets free in a full queue.
  absl::Duration pop_interval_ = absl::Seconds(1);
  absl::Time last_pop_ = absl::InfinitePast();
};

}  // namespace dflash
