// Memory of every rank of a group that all its ranks reach: on the CPU shared memory of processes, on GPUs
// memory that is mapped from device to device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device/shared_buffer.h"
#include "kernels/device/stream.h"
#include "worker/comm/communicator.h"

namespace dflash {

class PeerMemory {
 public:
  // Every rank calls it, like a collective; returns when all areas of `bytes` bytes are there, zeroed and
  // mapped everywhere. Where one rank cannot (other hosts, devices that do not reach each other), no rank has
  // any and problem() says why. Errors: those of the communicator.
  static absl::StatusOr<PeerMemory> Create(Communicator* communicator, int64_t bytes, const Stream& stream);

  // Empty: the memory can be used.
  const std::string& problem() const { return problem_; }
  // Some ranks are on one GPU: kernels that wait for each other may have to wait for a time slice.
  bool shares_device() const { return shares_device_; }

  int64_t bytes() const { return bytes_; }  // of one area
  void* area(int rank) const { return areas_[static_cast<size_t>(rank)]; }

 private:
  int64_t bytes_ = 0;
  std::string problem_;
  bool shares_device_ = false;
  // The own one outlives what is mapped from others here; what others have mapped of it is theirs to give up.
  std::vector<SharedBuffer> own_;  // one or none
  std::vector<MappedBuffer> mapped_;
  std::vector<void*> areas_;
};

}  // namespace dflash
