// CUDA results become Status here and nowhere else.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"

namespace dflash {

// OK for cudaSuccess. Otherwise the message names `what` and CUDA's error, the thread's last-error value is
// cleared, and the code says whose fault it is:
//   Unavailable        no usable GPU or driver here, or the hardware failed (ECC, NVLink): retry elsewhere
//   ResourceExhausted  the device or the pinned host memory is full
//   Internal           everything else: a bug of this program
absl::Status CudaStatus(cudaError_t error, const char* what);

// The same for an allocation of `bytes` bytes; the message of ResourceExhausted names them.
absl::Status CudaAllocationStatus(cudaError_t error, const char* what, int64_t bytes);

}  // namespace dflash
