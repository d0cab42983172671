// The device's clock, read in the order of the work: how long the parts of a captured graph take.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device/stream.h"

namespace dflash {

// Writes the time at which all work enqueued before has ended: nanoseconds since some fixed point in the
// past, good for differences only (a GPU's clock may tick once in a microsecond). time: int64 [1], device
// memory. Can be captured.
absl::Status RecordTime(int64_t* time, const Stream& stream);

}  // namespace dflash
