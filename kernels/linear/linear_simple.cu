// The parts of linear layers that need no tricks: packing, and weights in float32.
#include <cuda_bf16.h>

#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/vector.cuh"
#include "kernels/linear/linear_cuda.h"
#include "kernels/linear/linear_result.cuh"

namespace dflash {
namespace {

constexpr int kThreads = 256;

// Block (row, 256 pieces): a thread moves one 16-byte piece, eight elements of a row.
__global__ void PackRowsKernel(const __nv_bfloat16* rows, int64_t stride, int64_t first_output,
                               int64_t in_features, int64_t features, int64_t k_blocks, int64_t last_tile,
                               int64_t last_tile_rows, uint4* packed) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int64_t piece = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (piece >= k_blocks * 8) return;
  const __nv_bfloat16* from = rows + blockIdx.x * stride;
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t halves[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t k = piece * 8 + 2 * i + h;
      halves[h] = k < in_features ? __bfloat16_as_ushort(from[k]) : 0;
    }
    words[i] = halves[0] | halves[1] << 16;
  }
  const int64_t place = PlaceOf(first_output + blockIdx.x, features);
  const int64_t tile = place / kBlockOutputs, row = place % kBlockOutputs;
  const int64_t tile_rows = tile == last_tile ? last_tile_rows : kBlockOutputs;
  const int64_t packed_row = tile * kBlockOutputs * k_blocks + piece / 8 * tile_rows + row;
  packed[packed_row * 8 + ((piece % 8) ^ (row % 8))] = make_uint4(words[0], words[1], words[2], words[3]);
}

// Block (8 outputs, row of x): a warp sums one output, lane l the elements l, l + 32, ... in ascending order,
// then the lanes are added pairwise: the same order for every number of rows.
template <typename Y>
__global__ void LinearF32Kernel(Bf16Rows x, const float* weight, int64_t in_features, int64_t out_features,
                                Y* y, int64_t y_stride) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int64_t output = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (output >= out_features) return;
  const __nv_bfloat16* row = x.Row(blockIdx.y);
  const float* w = weight + output * in_features;
  float sum = 0;
  for (int64_t k = threadIdx.x % 32; k < in_features; k += 32)
    sum = fmaf(__bfloat162float(row[k]), w[k], sum);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  if (threadIdx.x % 32 != 0) return;
  if constexpr (sizeof(Y) == 4) {
    y[blockIdx.y * y_stride + output] = sum;
  } else {
    y[blockIdx.y * y_stride + output] = __float2bfloat16_rn(sum);
  }
}

}  // namespace

cudaError_t LaunchPackRows(ConstMatrixView rows, int64_t first_output, const PackedWeight& weight,
                           void* packed, const CudaContext& context) {
  const LaunchShape shape = {.grid = Grid(rows.rows, CeilDiv(weight.KBlocks() * 8, kThreads)),
                             .block = dim3(kThreads)};
  return Launch(context, shape, PackRowsKernel, static_cast<const __nv_bfloat16*>(rows.data), rows.row_stride,
                first_output, weight.in_features, weight.features, weight.KBlocks(), weight.Tiles() - 1,
                weight.LastTileRows(), static_cast<uint4*>(packed));
}

cudaError_t LaunchLinearF32(ConstMatrixView x, const float* weight, int64_t in_features, MatrixView y,
                            const CudaContext& context) {
  constexpr int64_t kRows = 32768;  // a bound of the grid
  for (int64_t row = 0; row < x.rows; row += kRows) {
    const int64_t rows = std::min(kRows, x.rows - row);
    const MatrixView to = y.Rows(row, rows);
    const LaunchShape shape = {.grid = Grid(CeilDiv(y.cols, kThreads / 32), rows), .block = dim3(kThreads)};
    const cudaError_t error =
        y.dtype == DType::kF32
            ? Launch(context, shape, LinearF32Kernel<float>, Bf16RowsOf(x.Rows(row, rows)), weight,
                     in_features, y.cols, static_cast<float*>(to.data), to.row_stride)
            : Launch(context, shape, LinearF32Kernel<__nv_bfloat16>, Bf16RowsOf(x.Rows(row, rows)), weight,
                     in_features, y.cols, static_cast<__nv_bfloat16*>(to.data), to.row_stride);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace dflash
