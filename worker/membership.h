// A process as one rank of a group: joins the others before it loads anything, and holds what it needs of
// them for as long as it lives.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/comm/shared_segment.h"
#include "worker/rpc/rank_channel.h"

namespace dflash {

struct MembershipOptions {
  int rank = 0;
  RankChannelOptions channel;  // size 1: there is no channel
  // "host": shared memory. "nccl". "auto": NCCL for the CUDA backend, else shared memory.
  std::string communicator = "auto";
  absl::Duration collective_timeout = absl::Seconds(60);
};

struct Membership {
  std::shared_ptr<SharedSegment> segment;  // of the host communicator
  std::unique_ptr<Communicator> communicator;
  // The rank channel, destroyed before the communicator: rank 0 has a hub, others a link, a group of one
  // none.
  std::unique_ptr<RankHub> hub;
  std::unique_ptr<RankLink> link;
};

// Forms the group: returns when all ranks have joined and one collective has gone through all of them.
// `device` is the ordinal of a CUDA rank. `on_fault` as in RankHub::Listen and RankLink::Join. Errors: those
// of the channel and of the communicator.
absl::StatusOr<Membership> JoinGroup(const MembershipOptions& options, int device,
                                     std::function<void(const absl::Status&)> on_fault);

// The first line of a group's secret file, which only its owner may read. Errors name the file.
absl::StatusOr<std::string> ReadSecret(const std::string& path);

}  // namespace dflash
