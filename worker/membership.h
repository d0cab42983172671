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
#include "base/shared_segment.h"
#include "worker/comm/communicator.h"
#include "worker/rpc/rank_channel.h"

namespace dflash {

struct MembershipOptions {
  int rank = 0;
  RankChannelOptions channel;  // size 1: there is no channel
  // "host": shared memory. "nccl". "auto": NCCL for the CUDA backend, else shared memory.
  std::string communicator = "auto";
  // How rows of few tokens are summed. "peer": through memory that all ranks reach. "communicator": by its
  // all-reduce. "auto": peer where the ranks' devices reach each other and none is shared.
  std::string all_reduce = "auto";
  absl::Duration collective_timeout = absl::Seconds(60);
};

struct Membership {
  std::shared_ptr<SharedSegment> segment;  // of the host communicator
  std::unique_ptr<Communicator> communicator;
  std::string note;  // about the communicator, for the log; may be empty
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

}  // namespace dflash
