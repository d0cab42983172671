// Collectives between GPUs through NCCL. libnccl is looked up when a group needs it, so that programs start
// where it is absent.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/device/stream.h"
#include "worker/comm/communicator.h"

namespace dflash {

struct NcclOptions {
  int rank = 0;
  int size = 1;
  std::string unique_id;  // of NcclUniqueId on rank 0
  // Of the initialization, and of the waiting inside Barrier. Other calls only enqueue: a peer that does not
  // come shows in Check(), Barrier(), and in whoever waits for the stream (see Abort).
  absl::Duration timeout = absl::Seconds(60);
};

// What rank 0 makes and all ranks need. Unavailable: no libnccl. Unimplemented: not the CUDA backend.
absl::StatusOr<std::string> NcclUniqueId();

// The communicator of this rank on the device of `stream`. Calls may come from one thread at a time, and
// Abort from any: it makes kernels under way end, so that a thread that waits for the stream goes on. Sums
// are in rank order for two ranks, where there is only one order; above, NCCL chooses.
absl::StatusOr<std::unique_ptr<Communicator>> MakeNcclCommunicator(const NcclOptions& options,
                                                                   const Stream& stream);

}  // namespace dflash
