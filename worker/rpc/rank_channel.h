// The rank channel: how the ranks of a group find each other, agree that they belong together, get the
// leader's plans and notice each other's end. proto/dflash/worker/v1/rank.proto is the protocol.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/rank/leader.h"
#include "worker/rank/plan.h"

namespace dflash {

struct RankChannelOptions {
  // "unix:PATH": the leader makes it with mode 0600, and both ends check that the other belongs to the same
  // user. "tcp:HOST:PORT": needs a secret.
  std::string address;
  std::string group_id;
  uint64_t epoch = 0;  // of a member, 0: whatever the leader's is (ranks of another host)
  int size = 0;        // of the group, >= 2
  std::string build;
  std::string options;  // what all ranks must have been started with
  std::string secret;   // of the group; at least 16 bytes. Empty: none, Unix sockets only
  absl::Duration formation_timeout = absl::Seconds(60);  // until all have joined
  absl::Duration heartbeat_period = absl::Milliseconds(500);
  absl::Duration silence_limit = absl::Seconds(5);  // a rank that says nothing for so long is dead
  absl::Duration plan_timeout = absl::Seconds(60);  // without any progress although there is a plan
};

// How the Communicator is made; from the leader to all.
struct RankTransport {
  // Shared memory: descriptor of a process of this host.
  int host_pid = 0;
  int host_fd = -1;
  int64_t host_bytes = 0;
  // NCCL: its unique id. Empty: shared memory.
  std::string nccl_id;
};

// What a rank has loaded.
struct RankReady {
  std::string feature_contract;
  std::string configuration;
  int64_t bytes_read = 0;
};

// Rank 0's end.
class RankHub final : public PlanSender {
 public:
  // Listens. `on_fault` is called at most once, from a thread of this object, when the group cannot go on: a
  // member's connection ended, it said nothing for silence_limit, made no progress for plan_timeout, gave up,
  // or sent nonsense. It must not block and must not destroy the hub. Errors: InvalidArgument naming the
  // address or option; Unavailable when it cannot listen there.
  static absl::StatusOr<std::unique_ptr<RankHub>> Listen(const RankChannelOptions& options,
                                                         const RankTransport& transport,
                                                         std::function<void(const absl::Status&)> on_fault);
  // Says nothing to the members: they take a broken connection for a fault.
  ~RankHub() override;

  // Waits until all members are there, at most formation_timeout from Listen on. DeadlineExceeded naming the
  // ranks that are missing; the fault, if there was one.
  absl::Status AwaitJoined();
  // Waits until every member has loaded and compares it with `ours`. FailedPrecondition naming rank and
  // difference; DeadlineExceeded; the fault.
  absl::Status AwaitReady(const RankReady& ours, absl::Time deadline);

  // Any thread. ResourceExhausted: the plan exceeds a frame. Unavailable: the fault.
  absl::Status Send(const RankPlan& plan) override;

  // Tells the members to end: with code 0 when `reason` is OK. Faults are not reported any more.
  void End(const absl::Status& reason);

  struct Member {
    bool joined = false;
    absl::Duration heartbeat_age;
    uint64_t plan = 0;  // last one that it has carried out
    int64_t bytes_read = 0;
  };
  std::vector<Member> Members() const;  // of ranks 1, 2, ...
  int64_t dropped_frames() const;       // of another epoch
  int64_t refused_joins() const;
  int port() const;  // of a TCP address

 private:
  class Impl;
  explicit RankHub(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

// The end of any other rank.
class RankLink {
 public:
  // Dials the leader, again and again until it listens, and joins; at most formation_timeout. `on_fault` is
  // called at most once, from a thread of this object, when the group is dead: the connection broke, the
  // leader said nothing for silence_limit or ended the group with an error. It must not block and must not
  // destroy the link. Errors: DeadlineExceeded; the leader's refusal (FailedPrecondition: epoch, group, rank,
  // size, build or options differ; AlreadyExists: the rank is taken); Unauthenticated: not our user, or not
  // our secret.
  static absl::StatusOr<std::unique_ptr<RankLink>> Join(const RankChannelOptions& options, int rank,
                                                        std::function<void(const absl::Status&)> on_fault);
  ~RankLink();

  const RankTransport& transport() const;
  absl::Status SendReady(const RankReady& ready);
  // Waits until NextPlan would not wait, at most so long; whether that is so.
  bool AwaitPlan(absl::Duration patience);
  // Waits for the next plan; nullopt when the leader has ended the group without an error. Otherwise the
  // fault.
  absl::StatusOr<std::optional<RankPlan>> NextPlan();
  // The plan has been carried out; the leader hears of it with the next heartbeat.
  void SetFinished(uint64_t plan);
  // Tells the leader that this rank cannot go on.
  void Abort(const absl::Status& reason);

 private:
  class Impl;
  explicit RankLink(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace dflash
