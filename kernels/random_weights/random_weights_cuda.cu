#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/device/cuda/vector.cuh"
#include "kernels/random_weights/random_weights_backend.h"

namespace dflash::backend {
namespace {

constexpr int kThreads = 256;

// Block (row, 256 chunks of columns).
template <typename T, bool kVectorized>
__global__ void FillRandomKernel(RandomTensor tensor, int64_t tensor_cols, int64_t first_row,
                                 int64_t first_col, T* y, int64_t stride, int64_t cols) {
  LetNextKernelStart();
  const int64_t col = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kChunk;
  if (col >= cols) return;
  const int count = static_cast<int>(min(cols - col, int64_t{kChunk}));
  const auto first = static_cast<uint64_t>((first_row + blockIdx.x) * tensor_cols + first_col + col);
  float values[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) values[i] = RandomElement(tensor, first + i);
  WaitForPreviousKernel();
  T* to = y + blockIdx.x * stride + col;
  if constexpr (sizeof(T) == 2) {
    Store<kVectorized>(to, count, values);
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i < count) to[i] = values[i];
    }
  }
}

template <typename T>
cudaError_t LaunchFill(const RandomTensor& tensor, int64_t tensor_cols, int64_t first_row, int64_t first_col,
                       MatrixView y, const CudaContext& context) {
  const auto kernel =
      sizeof(T) == 2 && IsVectorized(y) ? FillRandomKernel<T, sizeof(T) == 2> : FillRandomKernel<T, false>;
  const LaunchShape shape = {.grid = Grid(y.rows, CeilDiv(y.cols, kThreads * kChunk)),
                             .block = dim3(kThreads)};
  return Launch(context, shape, kernel, tensor, tensor_cols, first_row, first_col, static_cast<T*>(y.data),
                y.row_stride, y.cols);
}

}  // namespace

absl::Status FillRandom(const RandomTensor& tensor, int64_t tensor_cols, int64_t first_row, int64_t first_col,
                        MatrixView y, const Stream& stream) {
  const CudaContext& context = CudaOf(stream);
  const cudaError_t error =
      y.dtype == DType::kF32
          ? LaunchFill<float>(tensor, tensor_cols, first_row, first_col, y, context)
          : LaunchFill<__nv_bfloat16>(tensor, tensor_cols, first_row, first_col, y, context);
  return CudaStatus(error, "FillRandom");
}

}  // namespace dflash::backend
