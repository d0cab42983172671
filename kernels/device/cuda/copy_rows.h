#pragma once

#include "base/matrix_view.h"
#include "kernels/device/cuda/context.h"

namespace dflash {

// Copies rows between views of equal shape and dtype, as a kernel: a copy node would cut the chain of
// dependent launches.
cudaError_t LaunchCopyRows(ConstMatrixView from, MatrixView to, const CudaContext& context);

}  // namespace dflash
