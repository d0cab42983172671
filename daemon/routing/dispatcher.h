// Between clients and worker groups: holds every request from acceptance to end, the waiting queue, and who
// has which request.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/admission/client_limiter.h"
#include "daemon/admission/waiting_queue.h"
#include "daemon/request/group_request.h"
#include "daemon/routing/choose_group.h"
#include "daemon/routing/group.h"
#include "daemon/routing/prefix_affinity.h"

namespace dflash {

// What is taken in, and how long it is held on to.
struct AdmissionLimits {
  QueueLimits queue = {};
  ClientLimits client = {};
  // Requests of a lost group, and those that wait while no group is ready, are kept for so long until a group
  // takes them; zero: they fail at once.
  absl::Duration replay_patience = absl::ZeroDuration();
};

// Replay. When a group is lost, its requests go on in its next life, or in another group, behind what they
// have emitted; nobody notices but by the clock. Should one of them be what kills groups, it must not kill
// them for ever: requests of a lost group are suspects until they have got on by a token, a group gets one
// suspect at a time and nothing new beside it, and a group that is lost with a suspect in it is that one's
// fault, not the others'.
inline constexpr int64_t kMaxBlame = 3;     // losses in a row that are a request's fault: then it is refused
inline constexpr int64_t kMaxReplays = 32;  // of one request

class Dispatcher final : public GroupEvents {
 public:
  enum class GroupState { kLoading, kReady, kLost };

  struct GroupStats {
    std::string name;
    GroupState state = GroupState::kLoading;
    std::string why_lost;  // how its last life ended; empty when it is ready
    int64_t running = 0;
    GroupInfo info;            // when it has been ready
    absl::Duration state_age;  // in this state for so long
  };
  struct Stats {
    bool serving = false;
    bool draining = false;
    absl::Duration stage_age;  // serving, or draining, for so long
    std::string detail;        // why it does not serve
    int64_t running = 0;
    int64_t waiting = 0;
    int64_t waiting_prompt_tokens = 0;
    absl::Duration oldest_waiting;
    QueueLimits limits;
    std::vector<GroupStats> groups;
  };

  // `clock` tells the time, from any thread.
  Dispatcher(const AdmissionLimits& limits, absl::Time (*clock)());

  // Registers a group, which is not owned and must outlive the last call to this object.
  void AddGroup(Group* group);
  // A lost group is being started again: from now on its events count as those of a new one.
  void Revive(Group* group);

  // Claims `id` and a place in the queue before the work of preparing the request is done. AlreadyExists: a
  // request with this id has not ended. ResourceExhausted, with a hint when to retry: the queue is full, or
  // `client` has had its share. Unavailable: loading, no group left, draining. After OK exactly one of
  // Release and Submit must follow.
  absl::Status Reserve(const std::string& id, const std::string& client);
  void Release(const std::string& id);
  // Counts work for `client` that needs no group as one more of its requests. ResourceExhausted, with a hint
  // when to retry: it has had its share. After OK LeaveClient must follow.
  absl::Status EnterClient(const std::string& client);
  void LeaveClient(const std::string& client);
  // Queues a prepared request (whose client is that of Reserve, whatever it says), or hands it to a group at
  // once; returns its key, which Cancel wants. Errors as Reserve; the listener is then not called.
  absl::StatusOr<std::string> Submit(const std::string& id, GroupRequest request,
                                     std::shared_ptr<OutputListener> listener);
  // Ends a queued or running request: its listener gets OnFailed(reason) before this returns, its id is free,
  // and its group lets go of it within one step. False when it has ended already.
  bool Cancel(const std::string& key, const absl::Status& reason);

  // Fails queued requests whose deadline has come or that have waited too long, and those that wait for a
  // group to come back in vain, and looks again who can take what waits. Call it several times a second.
  void ExpireWaiting();
  // Going down is done in steps, of which each may be left out. Leave: others are told that this server goes
  // (Stats.serving), and it still takes what they send until they know. Drain: new requests are refused,
  // those that it has go on. ShutDown: those that wait or run fail, for good.
  void Leave();
  void Drain();
  void ShutDown();
  // As Leave, of a process that is about to end: there is no way back.
  void LeaveForGood();
  // Takes requests again; nothing happens where they are taken. FailedPrecondition after LeaveForGood and
  // ShutDown: health would call a server ready that is about to go.
  absl::Status Resume();
  // Waits until no request is left; false when `deadline` comes first, or Resume or ShutDown.
  bool AwaitEmpty(absl::Time deadline) const;
  // Fails those that wait or run with reason DRAINING, and returns how many.
  int64_t EndAll();

  // What the first ready group is; Unavailable when none is.
  absl::StatusOr<GroupInfo> Info() const;
  Stats GetStats() const;

  // Calls `changed` (from any thread, without locks of this object) whenever Stats.serving may have changed.
  void SetServingCallback(std::function<void()> changed);

  void OnReady(Group* group, const GroupInfo& info) override;
  void OnCredits(Group* group, uint64_t granted_total) override;
  void OnStarted(Group* group, const std::string& key, const StartedOutput& started) override;
  void OnTokens(Group* group, const std::string& key, StepOutput output) override;
  void OnFinished(Group* group, const std::string& key, const FinishedOutput& finished) override;
  void OnFailed(Group* group, const std::string& key, const absl::Status& status) override;
  void OnLost(Group* group, const std::string& why) override;
  // A better reason for a loss, which may or may not have been reported yet.
  void ExplainLoss(Group* group, const std::string& why);

 private:
  using Listener = std::shared_ptr<OutputListener>;
  struct Member {
    Group* group = nullptr;
    GroupState state = GroupState::kLoading;
    std::string why_lost;
    GroupInfo info;
    uint64_t granted = 0;
    uint64_t submitted = 0;
    int64_t running = 0;
    int64_t outstanding_tokens = 0;
    bool on_probation = false;
    std::string suspect;  // key of the one that it runs; empty: none
    absl::Time since;     // in its state
  };
  struct Live {
    std::string id, client;
    std::vector<uint64_t> prefix;  // PrefixAffinity::BlockHashes, when there is a choice
    GroupRequest request;          // output_tokens: what has been emitted; prompt_log_probs_done likewise
    Listener listener;             // null when the client has been told the end
    Member* member = nullptr;
    int64_t work = 0;  // tokens
    bool started = false;
    FinishedOutput counted = {};  // speculation over all lives
    // Of a request whose group was lost.
    int64_t replays = 0;
    int64_t blame = 0;
    bool is_suspect = false;
    absl::Time lost_at = absl::InfiniteFuture();  // until a group takes it again
    std::string why_lost;
  };

  enum class Stage { kServing, kLeaving, kDraining, kShutDown };

  // Is there a group that serves?
  absl::Status CheckGroups() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The same, in a server that has not come to `refusing`.
  absl::Status CheckServing(Stage refusing) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GoTo(Stage stage);
  void Dispatch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Would a group take one more?
  bool HasRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<GroupSnapshot> Snapshot(const Live& live) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Hands a request to a group, if one takes it.
  bool HandOver(const std::string& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The request, if it is this group's.
  Live* FindLive(Group* group, const std::string& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Clear(Live& live) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The status of a request that is not to be replayed; OK: it is.
  absl::Status CheckReplay(const Live& live, const std::string& why) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whom to tell, and what.
  struct Failure {
    Listener listener;
    absl::Status status;
  };
  void ExpireReplays(std::vector<Failure>* failures) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Member& Find(Group* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  size_t IndexOf(const Member& member) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Forgets a request that has ended and returns whom to tell, if anybody.
  Listener End(const std::string& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Tells a request's group to end it, and returns whom to tell.
  Listener LetGo(const std::string& key, Live& live, const absl::Status& reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ServingChanged();

  absl::Time (*const clock_)();
  mutable absl::Mutex mutex_;
  std::function<void()> serving_changed_ ABSL_GUARDED_BY(mutex_);
  WaitingQueue queue_ ABSL_GUARDED_BY(mutex_);
  ClientLimiter clients_ ABSL_GUARDED_BY(mutex_);
  PrefixAffinity affinity_ ABSL_GUARDED_BY(mutex_);
  const absl::Duration replay_patience_;
  std::deque<std::string> replays_
      ABSL_GUARDED_BY(mutex_);  // keys of requests of lost groups, before the queue's
  absl::Time none_ready_since_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  std::vector<std::unique_ptr<Member>> members_ ABSL_GUARDED_BY(mutex_);
  Stage stage_ ABSL_GUARDED_BY(mutex_) = Stage::kServing;
  absl::Time stage_since_ ABSL_GUARDED_BY(mutex_);
  bool for_good_ ABSL_GUARDED_BY(mutex_) = false;  // it has left, or is about to
  uint64_t next_key_ ABSL_GUARDED_BY(mutex_) = 1;
  std::unordered_map<std::string, std::string> reserved_ ABSL_GUARDED_BY(mutex_);  // id to client
  // Ids that a client may not use again yet. Queue and groups know a request by its key: an id may be used
  // again while its group still winds the old request down.
  std::set<std::string> ids_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<std::string, Live> live_ ABSL_GUARDED_BY(mutex_);  // by key
};

}  // namespace dflash
