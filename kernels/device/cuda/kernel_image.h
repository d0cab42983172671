// Whether this build has machine code for a device.
#pragma once

#include <cuda_runtime_api.h>

namespace dflash {

// cudaErrorNoKernelImageForDevice when the build has no kernels for the current device.
cudaError_t FindKernels();

}  // namespace dflash
