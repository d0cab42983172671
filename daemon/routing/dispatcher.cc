#include "daemon/routing/dispatcher.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "daemon/request/request_error.h"

namespace dflash {
namespace {

absl::Status Unavailable(const std::string& reason, const std::string& text, absl::Duration retry_after) {
  return WithDetails(absl::UnavailableError(text),
                     {.reason = reason, .field = "", .retry_after = retry_after, .metadata = {}});
}

// Another server may take the request at once.
absl::Status Draining() { return Unavailable("DRAINING", "the server is going down", absl::ZeroDuration()); }

absl::Status Lost(const std::string& why) {
  return Unavailable("WORKER_LOST", absl::StrCat("the worker group is gone: ", why), absl::Seconds(1));
}

// One more round of a request, as the group's leader counts them.
void Count(const Round& round, FinishedOutput* counted) {
  if (round.drafted == 0) return;
  ++counted->rounds;
  counted->drafted_tokens += round.drafted;
  counted->accepted_tokens += round.accepted;
  const size_t depths = std::max(counted->drafted_per_position.size(), static_cast<size_t>(round.drafted));
  counted->drafted_per_position.resize(depths);
  counted->accepted_per_position.resize(depths);
  for (int32_t depth = 0; depth < round.drafted; ++depth)
    ++counted->drafted_per_position[static_cast<size_t>(depth)];
  for (int32_t depth = 0; depth < round.accepted; ++depth)
    ++counted->accepted_per_position[static_cast<size_t>(depth)];
}

}  // namespace

Dispatcher::Dispatcher(const AdmissionLimits& limits, absl::Time (*clock)())
    : clock_(clock),
      queue_(limits.queue),
      clients_(limits.client),
      replay_patience_(limits.replay_patience),
      stage_since_(clock()) {}

void Dispatcher::AddGroup(Group* group) {
  absl::MutexLock lock(&mutex_);
  members_.push_back(std::make_unique<Member>());
  members_.back()->group = group;
  members_.back()->since = clock_();
}

void Dispatcher::Revive(Group* group) {
  absl::MutexLock lock(&mutex_);
  Member& member = Find(group);
  if (member.state != GroupState::kLost) return;
  member.state = GroupState::kLoading;
  member.since = clock_();
  member.granted = member.submitted = 0;
  member.on_probation = true;
}

void Dispatcher::SetServingCallback(std::function<void()> changed) {
  absl::MutexLock lock(&mutex_);
  serving_changed_ = std::move(changed);
}

void Dispatcher::ServingChanged() {
  std::function<void()> changed;
  {
    absl::MutexLock lock(&mutex_);
    changed = serving_changed_;
  }
  if (changed) changed();
}

absl::Status Dispatcher::CheckServing(Stage refusing) const {
  return stage_ >= refusing ? Draining() : CheckGroups();
}

absl::Status Dispatcher::CheckGroups() const {
  std::string lost;
  for (const auto& member : members_) {
    if (member->state == GroupState::kReady) return absl::OkStatus();
    if (member->state == GroupState::kLost) lost = member->why_lost;
  }
  for (const auto& member : members_) {
    if (member->state == GroupState::kLoading) {
      return Unavailable("NOT_READY", "the model is being loaded", absl::Seconds(1));
    }
  }
  return Lost(lost);
}

absl::Status Dispatcher::Reserve(const std::string& id, const std::string& client) {
  absl::MutexLock lock(&mutex_);
  DFLASH_RETURN_IF_ERROR(CheckServing(Stage::kDraining));
  if (reserved_.count(id) != 0 || ids_.count(id) != 0) {
    return WithDetails(
        absl::AlreadyExistsError(absl::StrCat("request_id: '", id, "' is in use")),
        {.reason = "DUPLICATE_REQUEST", .field = "request_id", .retry_after = {}, .metadata = {}});
  }
  DFLASH_RETURN_IF_ERROR(queue_.CheckRoom(static_cast<int64_t>(reserved_.size())));
  DFLASH_RETURN_IF_ERROR(clients_.Enter(client, clock_()));
  reserved_.emplace(id, client);
  return absl::OkStatus();
}

void Dispatcher::Release(const std::string& id) {
  absl::MutexLock lock(&mutex_);
  const auto reserved = reserved_.find(id);
  DFLASH_CHECK(reserved != reserved_.end(), id.c_str());
  clients_.Leave(reserved->second);
  reserved_.erase(reserved);
}

absl::Status Dispatcher::EnterClient(const std::string& client) {
  absl::MutexLock lock(&mutex_);
  return clients_.Enter(client, clock_());
}

void Dispatcher::LeaveClient(const std::string& client) {
  absl::MutexLock lock(&mutex_);
  clients_.Leave(client);
}

absl::StatusOr<std::string> Dispatcher::Submit(const std::string& id, GroupRequest request,
                                               std::shared_ptr<OutputListener> listener) {
  absl::MutexLock lock(&mutex_);
  const auto reserved = reserved_.find(id);
  DFLASH_CHECK(reserved != reserved_.end(), id.c_str());
  request.client = std::move(reserved->second);
  reserved_.erase(reserved);
  const std::string key = absl::StrCat(id, "/", next_key_++);
  const auto prompt_tokens = static_cast<int64_t>(request.prompt_tokens.size());
  absl::Status taken = CheckServing(Stage::kShutDown);
  if (taken.ok()) {
    taken = queue_.Push({.id = key,
                         .prompt_tokens = prompt_tokens,
                         .since = clock_(),
                         .deadline = request.deadline,
                         .client = request.client,
                         .priority = request.priority});
  }
  if (!taken.ok()) {
    clients_.Leave(request.client);
    return taken;
  }
  ids_.insert(id);
  Live live;
  live.client = request.client;
  if (members_.size() > 1)
    live.prefix = PrefixAffinity::BlockHashes(request.prompt_tokens, request.cache_salt);
  live.id = id;
  live.work = prompt_tokens + request.max_tokens;
  live.request = std::move(request);
  live.listener = std::move(listener);
  live_.emplace(key, std::move(live));
  Dispatch();
  return key;
}

std::vector<GroupSnapshot> Dispatcher::Snapshot(const Live& live) const {
  std::vector<GroupSnapshot> snapshot;
  for (size_t i = 0; i < members_.size(); ++i) {
    const Member& member = *members_[i];
    // Nothing new beside a suspect; one that killed before runs alone.
    const bool fits = member.suspect.empty() && (live.blame == 0 || member.running == 0);
    snapshot.push_back({.ready = member.state == GroupState::kReady && fits,
                        .credits = member.granted - member.submitted,
                        .running = member.running,
                        .outstanding_tokens = member.outstanding_tokens,
                        .prefix_tokens = affinity_.Match(i, live.prefix),
                        .silence = member.group->HeartbeatAge(),
                        .on_probation = member.on_probation && !live.is_suspect});
  }
  return snapshot;
}

bool Dispatcher::HandOver(const std::string& key) {
  Live& live = live_.at(key);
  const std::optional<size_t> chosen = ChooseGroup(Snapshot(live));
  if (!chosen.has_value()) return false;
  Member& member = *members_[*chosen];
  affinity_.Record(*chosen, live.prefix);
  live.member = &member;
  live.lost_at = absl::InfiniteFuture();
  if (live.is_suspect) member.suspect = key;
  ++member.submitted;
  ++member.running;
  member.outstanding_tokens += live.work;
  member.group->Submit(key, live.request);
  return true;
}

void Dispatcher::Dispatch() {
  std::erase_if(replays_, [this](const std::string& key)
                              ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return HandOver(key); });
  while (const WaitingQueue::Entry* next = queue_.Front()) {
    const std::string key = next->id;
    if (!HandOver(key)) return;
    queue_.Pop(clock_());
  }
  if (HasRoom()) queue_.ForgetSpeed();
}

bool Dispatcher::HasRoom() const {
  return std::any_of(members_.begin(), members_.end(), [](const std::unique_ptr<Member>& member) {
    return member->state == GroupState::kReady && member->granted > member->submitted;
  });
}

// It has got on: whatever killed its group was not that.
void Dispatcher::Clear(Live& live) {
  if (!live.is_suspect) return;
  live.is_suspect = false;
  live.blame = 0;
  if (live.member != nullptr) live.member->suspect.clear();
}

Dispatcher::Live* Dispatcher::FindLive(Group* group, const std::string& key) {
  const auto it = live_.find(key);
  // What a group says of a request that has been taken from it comes too late.
  if (it == live_.end() || it->second.member == nullptr || it->second.member->group != group) return nullptr;
  return &it->second;
}

Dispatcher::Listener Dispatcher::End(const std::string& key) {
  const auto it = live_.find(key);
  if (it == live_.end()) return nullptr;
  Clear(it->second);
  Live live = std::move(it->second);
  live_.erase(it);
  clients_.Leave(live.client);
  if (live.listener != nullptr) ids_.erase(live.id);
  if (live.member != nullptr) {
    --live.member->running;
    live.member->outstanding_tokens -= live.work;
  }
  return std::move(live.listener);
}

Dispatcher::Listener Dispatcher::LetGo(const std::string& key, Live& live, const absl::Status& reason) {
  // The group's own word that it has let go is still to come; until then the request counts as running.
  Listener listener = std::move(live.listener);
  live.listener = nullptr;
  ids_.erase(live.id);
  live.member->group->Cancel(key, reason);
  return listener;
}

bool Dispatcher::Cancel(const std::string& key, const absl::Status& reason) {
  Listener listener;
  {
    absl::MutexLock lock(&mutex_);
    const auto it = live_.find(key);
    if (it == live_.end() || it->second.listener == nullptr) return false;
    if (it->second.member == nullptr) {
      queue_.Remove(key);
      std::erase(replays_, key);
      listener = End(key);
    } else {
      listener = LetGo(key, it->second, reason);
    }
  }
  listener->OnFailed(reason);
  return true;
}

void Dispatcher::ExpireWaiting() {
  std::vector<Listener> expired, timed_out;
  std::vector<Failure> given_up;
  absl::Duration retry_after, max_wait;
  {
    absl::MutexLock lock(&mutex_);
    const WaitingQueue::Expired taken = queue_.TakeExpired(clock_());
    for (const WaitingQueue::Entry& entry : taken.deadline) expired.push_back(End(entry.id));
    for (const WaitingQueue::Entry& entry : taken.too_long) timed_out.push_back(End(entry.id));
    retry_after = queue_.RetryHint();
    max_wait = queue_.limits().max_wait;
    clients_.Forget(clock_());
    ExpireReplays(&given_up);
    Dispatch();  // a group that was doubtful may be sound again
  }
  const absl::Status status =
      WithDetails(absl::DeadlineExceededError("the deadline came while the request was waiting in the queue"),
                  {.reason = "DEADLINE", .field = "", .retry_after = {}, .metadata = {{"phase", "queue"}}});
  for (const Listener& listener : expired) listener->OnFailed(status);
  for (const Failure& failure : given_up) failure.listener->OnFailed(failure.status);
  if (timed_out.empty()) return;
  const absl::Status timeout =
      WithDetails(absl::ResourceExhaustedError(
                      absl::StrCat("the request waited in the queue for ", absl::FormatDuration(max_wait))),
                  {.reason = "QUEUE_TIMEOUT", .field = "", .retry_after = retry_after, .metadata = {}});
  for (const Listener& listener : timed_out) listener->OnFailed(timeout);
}

void Dispatcher::ExpireReplays(std::vector<Failure>* failures) {
  const absl::Time now = clock_();
  const auto fail = [&](const std::string& key, const absl::Status& status) {
    std::erase(replays_, key);
    if (Listener listener = End(key)) failures->push_back({std::move(listener), status});
  };
  std::vector<std::string> keys;
  for (const auto& [key, live] : live_) {
    if (live.lost_at != absl::InfiniteFuture()) keys.push_back(key);
  }
  for (const std::string& key : keys) {
    const Live& live = live_.at(key);
    if (now >= live.request.deadline) {
      fail(key,
           absl::DeadlineExceededError("the deadline came while the worker group was being started again"));
    } else if (now - live.lost_at >= replay_patience_) {
      fail(key, Lost(live.why_lost));
    }
  }
  if (now - none_ready_since_ < replay_patience_) return;
  std::string why;
  for (const auto& member : members_) why = member->why_lost.empty() ? why : member->why_lost;
  for (const WaitingQueue::Entry& entry : queue_.TakeAll()) fail(entry.id, Lost(why));
}

void Dispatcher::GoTo(Stage stage) {
  {
    absl::MutexLock lock(&mutex_);
    if (stage_ >= stage) return;
    if (stage_ == Stage::kServing) stage_since_ = clock_();
    stage_ = stage;
  }
  ServingChanged();
}

void Dispatcher::Leave() { GoTo(Stage::kLeaving); }
void Dispatcher::Drain() { GoTo(Stage::kDraining); }

void Dispatcher::LeaveForGood() {
  {
    absl::MutexLock lock(&mutex_);
    for_good_ = true;
  }
  Leave();
}

void Dispatcher::ShutDown() {
  GoTo(Stage::kShutDown);
  EndAll();
}

absl::Status Dispatcher::Resume() {
  {
    absl::MutexLock lock(&mutex_);
    if (for_good_ || stage_ == Stage::kShutDown)
      return absl::FailedPreconditionError("the process is ending");
    if (stage_ == Stage::kServing) return absl::OkStatus();
    stage_ = Stage::kServing;
    stage_since_ = clock_();
  }
  ServingChanged();
  return absl::OkStatus();
}

bool Dispatcher::AwaitEmpty(absl::Time deadline) const {
  absl::MutexLock lock(&mutex_);
  const auto empty = [this]()
                         ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return live_.empty() && reserved_.empty(); };
  const auto over = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return empty() || stage_ != Stage::kDraining;
  };
  mutex_.AwaitWithDeadline(absl::Condition(&over), deadline);
  return empty();
}

int64_t Dispatcher::EndAll() {
  std::vector<Listener> listeners;
  const absl::Status status = Draining();
  {
    absl::MutexLock lock(&mutex_);
    for (const WaitingQueue::Entry& entry : queue_.TakeAll()) listeners.push_back(End(entry.id));
    for (const std::string& key : replays_) listeners.push_back(End(key));
    replays_.clear();
    for (auto& [key, live] : live_) {
      if (live.listener != nullptr) listeners.push_back(LetGo(key, live, status));
    }
  }
  for (const Listener& listener : listeners) listener->OnFailed(status);
  return static_cast<int64_t>(listeners.size());
}

absl::StatusOr<GroupInfo> Dispatcher::Info() const {
  absl::MutexLock lock(&mutex_);
  DFLASH_RETURN_IF_ERROR(CheckGroups());
  for (const auto& member : members_) {
    if (member->state == GroupState::kReady) return member->info;
  }
  return absl::InternalError("no group is ready");
}

Dispatcher::Stats Dispatcher::GetStats() const {
  absl::MutexLock lock(&mutex_);
  Stats stats;
  const absl::Status serving = CheckServing(Stage::kLeaving);
  stats.serving = serving.ok();
  stats.detail = std::string(serving.message());
  stats.draining = stage_ >= Stage::kLeaving;
  stats.stage_age = clock_() - stage_since_;
  stats.waiting = queue_.size() + static_cast<int64_t>(replays_.size());
  stats.waiting_prompt_tokens = queue_.prompt_tokens();
  stats.oldest_waiting = queue_.OldestAge(clock_());
  stats.limits = queue_.limits();
  for (const auto& member : members_) {
    stats.running += member->running;
    stats.groups.push_back({member->group->name(), member->state, member->why_lost, member->running,
                            member->info, clock_() - member->since});
  }
  return stats;
}

Dispatcher::Member& Dispatcher::Find(Group* group) {
  for (const auto& member : members_) {
    if (member->group == group) return *member;
  }
  DFLASH_CHECK(false, "unknown group");
  std::abort();
}

size_t Dispatcher::IndexOf(const Member& member) const {
  size_t index = 0;
  while (members_[index].get() != &member) ++index;
  return index;
}

void Dispatcher::OnReady(Group* group, const GroupInfo& info) {
  {
    absl::MutexLock lock(&mutex_);
    Member& member = Find(group);
    if (member.state != GroupState::kLoading) return;
    member.state = GroupState::kReady;
    member.since = clock_();
    member.why_lost.clear();
    member.info = info;
    none_ready_since_ = absl::InfiniteFuture();
  }
  ServingChanged();
}

void Dispatcher::OnCredits(Group* group, uint64_t granted_total) {
  absl::MutexLock lock(&mutex_);
  Member& member = Find(group);
  if (granted_total > member.granted) member.granted = granted_total;
  Dispatch();
}

void Dispatcher::OnStarted(Group* group, const std::string& key, const StartedOutput& started) {
  Listener listener;
  {
    absl::MutexLock lock(&mutex_);
    Live* live = FindLive(group, key);
    if (live == nullptr || std::exchange(live->started, true)) return;
    live->request.report_sent_text = false;  // the listener knows it from now on
    listener = live->listener;
  }
  if (listener != nullptr) listener->OnStarted(started);
}

void Dispatcher::OnTokens(Group* group, const std::string& key, StepOutput output) {
  Listener listener;
  {
    absl::MutexLock lock(&mutex_);
    Live* live = FindLive(group, key);
    if (live == nullptr) return;
    std::vector<int32_t>& emitted = live->request.output_tokens;
    emitted.insert(emitted.end(), output.tokens.begin(), output.tokens.end());
    live->request.prompt_log_probs_done += static_cast<int64_t>(output.prompt_log_probs.size());
    if (!emitted.empty()) live->request.prompt_log_probs = 0;  // they have all come
    for (const Round& round : output.rounds) Count(round, &live->counted);
    if (live->is_suspect && !output.tokens.empty()) {
      Clear(*live);
      Dispatch();
    }
    listener = live->listener;
  }
  if (listener != nullptr) listener->OnTokens(std::move(output));
}

void Dispatcher::OnFinished(Group* group, const std::string& key, const FinishedOutput& finished) {
  Listener listener;
  FinishedOutput whole = finished;
  {
    absl::MutexLock lock(&mutex_);
    const Live* live = FindLive(group, key);
    if (live == nullptr) return;
    if (live->replays > 0) {  // of all its lives
      whole.replays = live->replays;
      whole.rounds = live->counted.rounds;
      whole.drafted_tokens = live->counted.drafted_tokens;
      whole.accepted_tokens = live->counted.accepted_tokens;
      whole.drafted_per_position = live->counted.drafted_per_position;
      whole.accepted_per_position = live->counted.accepted_per_position;
    }
    Find(group).on_probation = false;
    listener = End(key);
    Dispatch();
  }
  if (listener != nullptr) listener->OnFinished(whole);
}

void Dispatcher::OnFailed(Group* group, const std::string& key, const absl::Status& status) {
  Listener listener;
  {
    absl::MutexLock lock(&mutex_);
    Live* live = FindLive(group, key);
    if (live == nullptr) return;
    // Its group is about to go: the loss is still to come.
    if (absl::IsUnavailable(status) && live->listener != nullptr && CheckReplay(*live, "").ok()) {
      live->lost_at = clock_();
      live->why_lost = std::string(status.message());
      return;
    }
    listener = End(key);
    Dispatch();
  }
  if (listener != nullptr) listener->OnFailed(status);
}

absl::Status Dispatcher::CheckReplay(const Live& live, const std::string& why) const {
  if (live.blame >= kMaxBlame) {
    return WithDetails(absl::InternalError(absl::StrCat("the worker group died of this request ", live.blame,
                                                        " times in a row: ", why)),
                       {.reason = "POISONED", .field = "", .retry_after = {}, .metadata = {}});
  }
  if (stage_ >= Stage::kShutDown) return Draining();
  if (replay_patience_ <= absl::ZeroDuration() || live.replays >= kMaxReplays) return Lost(why);
  return absl::OkStatus();
}

void Dispatcher::OnLost(Group* group, const std::string& why) {
  std::vector<Failure> failures;
  {
    absl::MutexLock lock(&mutex_);
    Member& lost = Find(group);
    if (lost.state == GroupState::kLost) return;
    lost.state = GroupState::kLost;
    lost.since = clock_();
    lost.why_lost = why;
    affinity_.Forget(IndexOf(lost));
    const std::string blamed = std::exchange(lost.suspect, "");
    std::vector<std::string> keys;
    for (const auto& [key, live] : live_) {
      if (live.member == &lost) keys.push_back(key);
    }
    std::sort(keys.begin(), keys.end());
    const auto fail = [&](const std::string& key, const absl::Status& status) {
      if (Listener listener = End(key)) failures.push_back({std::move(listener), status});
    };
    for (const std::string& key : keys) {
      Live& live = live_.at(key);
      if (key == blamed) ++live.blame;
      const absl::Status replayed =
          live.listener == nullptr ? absl::CancelledError("") : CheckReplay(live, why);
      if (!replayed.ok()) {
        fail(key, replayed);
        continue;
      }
      ++live.replays;
      live.is_suspect = blamed.empty() || key == blamed;
      live.lost_at = clock_();
      live.why_lost = why;
      live.member = nullptr;
      --lost.running;
      lost.outstanding_tokens -= live.work;
      // What killed its group goes first: there is nobody else yet.
      replays_.insert(key == blamed ? replays_.begin() : replays_.end(), key);
    }
    const absl::Status serving = CheckGroups();
    if (!serving.ok()) none_ready_since_ = std::min(none_ready_since_, clock_());
    // What waits has nobody to wait for when no group is left or coming.
    if (replay_patience_ <= absl::ZeroDuration() && !serving.ok() &&
        DetailsOf(serving).reason == "WORKER_LOST") {
      for (const WaitingQueue::Entry& entry : queue_.TakeAll()) fail(entry.id, Lost(why));
    }
    Dispatch();
  }
  for (const Failure& failure : failures) failure.listener->OnFailed(failure.status);
  ServingChanged();
}

void Dispatcher::ExplainLoss(Group* group, const std::string& why) {
  OnLost(group, why);
  absl::MutexLock lock(&mutex_);
  Find(group).why_lost = why;
}

}  // namespace dflash
