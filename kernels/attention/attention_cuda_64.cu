#include "kernels/attention/attention_kernel.cuh"

namespace dflash {
template cudaError_t LaunchAttention<64>(AttentionTask, int, int64_t, int64_t, const CudaContext&);
template int AttentionTilesThatFit<64>(int64_t);
}  // namespace dflash
