#include "kernels/attention/attention_wgmma.cuh"

namespace dflash {
template cudaError_t LaunchWgmmaAttention<256>(AttentionTask, int32_t, int64_t, ConstMatrixView,
                                               ConstMatrixView, ConstMatrixView, const CudaContext&);
}  // namespace dflash
