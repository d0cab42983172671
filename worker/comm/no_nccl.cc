// Programs without the CUDA backend.
#include "worker/comm/nccl_communicator.h"

namespace dflash {

absl::StatusOr<std::string> NcclUniqueId() {
  return absl::UnimplementedError("NCCL needs the CUDA backend; use the host communicator");
}

absl::StatusOr<std::unique_ptr<Communicator>> MakeNcclCommunicator(const NcclOptions&, const Stream&) {
  return absl::UnimplementedError("NCCL needs the CUDA backend; use the host communicator");
}

}  // namespace dflash
