#include "kernels/device/cuda/copy_rows.h"

#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/vector.cuh"

namespace dflash {
namespace {

constexpr int kThreads = 256;

// Block (row, column block); strides and columns in words.
template <typename Word>
__global__ void CopyRowsKernel(const Word* from, int64_t from_stride, Word* to, int64_t to_stride,
                               int64_t words) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int64_t row = blockIdx.x;
  const int64_t word = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (word < words) to[row * to_stride + word] = from[row * from_stride + word];
}

template <typename Word>
cudaError_t LaunchWords(ConstMatrixView from, MatrixView to, const CudaContext& context) {
  const int64_t per_word = static_cast<int64_t>(sizeof(Word)) / SizeOf(from.dtype);
  const int64_t words = from.cols / per_word;
  const LaunchShape shape = {.grid = Grid(from.rows, CeilDiv(words, kThreads)), .block = dim3(kThreads)};
  return Launch(context, shape, CopyRowsKernel<Word>, static_cast<const Word*>(from.data),
                from.row_stride / per_word, static_cast<Word*>(to.data), to.row_stride / per_word, words);
}

}  // namespace

cudaError_t LaunchCopyRows(ConstMatrixView from, MatrixView to, const CudaContext& context) {
  if (IsVectorized(from) && IsVectorized(to)) return LaunchWords<uint4>(from, to, context);
  return from.dtype == DType::kF32 ? LaunchWords<float>(from, to, context)
                                   : LaunchWords<uint16_t>(from, to, context);
}

}  // namespace dflash
