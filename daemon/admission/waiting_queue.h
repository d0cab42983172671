// The only waiting queue of the server: requests that no worker group has room for yet. Bounded by requests,
// by prompt tokens and by the time that it takes to get through it. Pure bookkeeping: no clock, no threads,
// no sockets.
//
// Order. A request takes its place by when it came. Of several requests that one client has waiting, each
// counts as come kClientSpacing after the one before, so a client with a long list does not keep others out;
// a step of priority counts as kPriorityStep of waiting. Places never change afterwards, so nobody starves:
// whatever comes long enough after a request is behind it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace dflash {

struct QueueLimits {
  int64_t max_requests = 256;
  int64_t max_prompt_tokens = 1 << 20;
  // A request that would wait longer, as fast as the queue moves now (ForgetSpeed: as long as that is not
  // known, none), is refused at once; one that has waited so long all the same is refused then.
  absl::Duration max_wait = absl::InfiniteDuration();
};

class WaitingQueue {
 public:
  static constexpr absl::Duration kClientSpacing = absl::Seconds(1);
  static constexpr absl::Duration kPriorityStep = absl::Seconds(10);

  struct Entry {
    std::string id;  // unique in the queue
    int64_t prompt_tokens = 0;
    absl::Time since;
    absl::Time deadline = absl::InfiniteFuture();
    std::string client;
    int32_t priority = 0;  // the higher, the sooner
  };

  explicit WaitingQueue(const QueueLimits& limits) : limits_(limits) {}

  // Is there room for one more request, whose length is not known yet? ResourceExhausted (reason QUEUE_FULL,
  // with a hint when to retry): no. Lets an overloaded server refuse before it spends time on tokenizing.
  // `reserved` counts the requests that were promised a place and are still being prepared.
  absl::Status CheckRoom(int64_t reserved) const;
  // Adds a request. ResourceExhausted as above, naming the bound that is hit. A request that is longer
  // than the token bound is taken by an empty queue: it would never fit otherwise.
  absl::Status Push(Entry entry);

  // The request whose turn it is; null when empty. Valid until the next change.
  const Entry* Front() const;
  // Removes and returns it.
  std::optional<Entry> Pop(absl::Time now);
  // Removes one request; false when it is not here.
  bool Remove(const std::string& id);

  struct Expired {
    std::vector<Entry> deadline;  // their own deadline has come
    std::vector<Entry> too_long;  // they have waited for limits().max_wait
  };
  // Removes and returns what may wait no longer.
  Expired TakeExpired(absl::Time now);
  // Removes and returns all requests, in order.
  std::vector<Entry> TakeAll();
  // Nobody waits although somebody has room: how fast the queue moved before says nothing of what comes next.
  // The speed is unknown again, as at first, until requests have waited behind others.
  void ForgetSpeed();

  int64_t size() const { return static_cast<int64_t>(entries_.size()); }
  int64_t prompt_tokens() const { return prompt_tokens_; }
  // Age of the oldest request; zero when empty.
  absl::Duration OldestAge(absl::Time now) const;
  // When a refused request had better come again.
  absl::Duration RetryHint() const;
  const QueueLimits& limits() const { return limits_; }

 private:
  using Place = std::pair<absl::Time, uint64_t>;  // the number keeps equals in order
  using Entries = std::map<Place, Entry>;
  struct ClientRequests {
    int64_t waiting = 0;
    absl::Time last;  // counted arrival of the latest, priority left out
  };

  absl::Status Full(const std::string& what) const;
  void Erase(Entries::iterator it);

  QueueLimits limits_;
  Entries entries_;
  std::unordered_map<std::string, Entries::iterator> index_;  // by id
  std::unordered_map<std::string, ClientRequests> clients_;   // those that wait
  std::multiset<absl::Time> ages_;
  uint64_t next_number_ = 0;
  int64_t prompt_tokens_ = 0;
  // Smoothed time between two Pops while requests wait: how fast the queue moves. Unknown at first, and after
  // ForgetSpeed.
  std::optional<absl::Duration> pop_interval_;
  absl::Time busy_since_ = absl::InfinitePast();  // the last Pop, when it left requests behind
};

}  // namespace dflash
