#include "kernels/attention/attention_kernel.cuh"

namespace dflash {
template cudaError_t LaunchAttention<128>(AttentionTask, int, int64_t, int64_t, const CudaContext&);
template int AttentionTilesThatFit<128>(int64_t);
}  // namespace dflash
