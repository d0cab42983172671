// How much memory the device has.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/device/stream.h"

namespace dflash {

struct DeviceMemory {
  int64_t total = 0;             // bytes; on the CPU what this machine or its control group has
  int64_t free = 0;              // bytes that nobody uses now
  bool shared_by_ranks = false;  // the ranks of a group that run on this machine share it
};

absl::StatusOr<DeviceMemory> GetDeviceMemory(const Stream& stream);

}  // namespace dflash
