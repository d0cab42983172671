#include "worker/membership.h"

#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/stream.h"
#include "worker/comm/host_communicator.h"
#include "worker/comm/nccl_communicator.h"
#include "worker/comm/peer_communicator.h"
#include "worker/comm/peer_memory.h"
#include "worker/comm/solo_communicator.h"

namespace dflash {
namespace {

// On a GPU 512 rows of 5,120 columns, from eight ranks, twice, take 84 MB; messages 16 MB.
int64_t PeerBytes() { return int64_t{std::string(BackendName()) == "cuda" ? 128 : 16} << 20; }

bool UsesNccl(const MembershipOptions& options) {
  return options.communicator == "nccl" ||
         (options.communicator == "auto" && std::string(BackendName()) == "cuda");
}

HostCommunicator::Options HostOptions(const MembershipOptions& options) {
  return {.size = options.channel.size, .timeout = options.collective_timeout};
}

// Rank 0: listens, so that the others hear how the communicator is made, and waits for them.
absl::Status Lead(const MembershipOptions& options, std::function<void(const absl::Status&)> on_fault,
                  RankTransport* transport, Membership* membership) {
  if (UsesNccl(options)) {
    DFLASH_ASSIGN_OR_RETURN(transport->nccl_id, NcclUniqueId());
  } else {
    DFLASH_ASSIGN_OR_RETURN(SharedSegment segment, HostCommunicator::CreateSegment(HostOptions(options)));
    membership->segment = std::make_shared<SharedSegment>(std::move(segment));
    transport->host_pid = getpid();
    transport->host_fd = membership->segment->fd();
    transport->host_bytes = membership->segment->bytes();
  }
  DFLASH_ASSIGN_OR_RETURN(membership->hub, RankHub::Listen(options.channel, *transport, std::move(on_fault)));
  return membership->hub->AwaitJoined();
}

absl::Status Follow(const MembershipOptions& options, std::function<void(const absl::Status&)> on_fault,
                    RankTransport* transport, Membership* membership) {
  DFLASH_ASSIGN_OR_RETURN(membership->link,
                          RankLink::Join(options.channel, options.rank, std::move(on_fault)));
  *transport = membership->link->transport();
  if (!transport->nccl_id.empty()) return absl::OkStatus();
  DFLASH_ASSIGN_OR_RETURN(SharedSegment segment, SharedSegment::Open(transport->host_pid, transport->host_fd,
                                                                     transport->host_bytes));
  membership->segment = std::make_shared<SharedSegment>(std::move(segment));
  return absl::OkStatus();
}

// Puts peer memory before the communicator, if that is wanted and possible: for all ranks or none.
absl::Status UsePeerMemory(const MembershipOptions& options, int device, const Stream& stream,
                           Membership* membership) {
  if (options.all_reduce == "communicator") return absl::OkStatus();
  DFLASH_ASSIGN_OR_RETURN(PeerMemory memory,
                          PeerMemory::Create(membership->communicator.get(), PeerBytes(), stream));
  if (options.all_reduce == "auto") {
    if (!memory.problem().empty() || memory.shares_device()) {
      membership->note = absl::StrCat("no peer memory: ",
                                      memory.shares_device() ? "ranks share a device" : memory.problem());
      return absl::OkStatus();
    }
  } else if (!memory.problem().empty()) {
    return absl::FailedPreconditionError(absl::StrCat("--all-reduce peer: ", memory.problem()));
  }
  DFLASH_ASSIGN_OR_RETURN(
      membership->communicator,
      PeerCommunicator::Create(std::move(membership->communicator), std::move(memory), device));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Membership> JoinGroup(const MembershipOptions& options, int device,
                                     std::function<void(const absl::Status&)> on_fault) {
  Membership membership;
  if (options.channel.size == 1) {
    membership.communicator = std::make_unique<SoloCommunicator>();
    return membership;
  }
  RankTransport transport;
  DFLASH_RETURN_IF_ERROR(options.rank == 0 ? Lead(options, std::move(on_fault), &transport, &membership)
                                           : Follow(options, std::move(on_fault), &transport, &membership));
  // Only for the way through all ranks: what is loaded later has its own.
  DFLASH_ASSIGN_OR_RETURN(const Stream stream, Stream::Create({.threads = 1, .device = device}));
  if (transport.nccl_id.empty()) {
    DFLASH_ASSIGN_OR_RETURN(membership.communicator,
                            HostCommunicator::Join(membership.segment, options.rank, HostOptions(options)));
  } else {
    DFLASH_ASSIGN_OR_RETURN(membership.communicator,
                            MakeNcclCommunicator({.rank = options.rank,
                                                  .size = options.channel.size,
                                                  .unique_id = transport.nccl_id,
                                                  .timeout = options.collective_timeout},
                                                 stream));
  }
  DFLASH_RETURN_IF_ERROR(membership.communicator->Barrier(stream));
  DFLASH_RETURN_IF_ERROR(UsePeerMemory(options, device, stream, &membership));
  return membership;
}

}  // namespace dflash
