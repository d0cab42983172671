#include "kernels/attention/attention_kernel.cuh"

namespace dflash {
template cudaError_t LaunchAttention<256>(AttentionTask, int, int64_t, int64_t, const CudaContext&);
template int AttentionTilesThatFit<256>(int64_t);
}  // namespace dflash
