// Both phases on GPUs without warpgroup products: warp matrix products over a ring of asynchronous copies.
// Every output is one sum over all of K in steps of 16, so the bits do not depend on the number of rows.
//
//   tile    64 outputs x 64 rows; grid (output tiles, row tiles); 4 warps of 16 outputs each
//   shared  stages x (W rows, then x rows), swizzled as the packed weight is
#include <cuda_bf16.h>

#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/ptx.cuh"
#include "kernels/device/cuda/vector.cuh"
#include "kernels/linear/linear_cuda.h"
#include "kernels/linear/linear_result.cuh"

namespace dflash {
namespace {

constexpr int kThreads = 128;
constexpr int kTile = 64;
constexpr int kStages = 4;
constexpr int kRowBytes = kBlockRowBytes;
constexpr int kOperandBytes = kTile * kRowBytes;
constexpr int kSharedBytes = kStages * 2 * kOperandBytes + 128;

struct PortableTask {
  const uint8_t* weight;
  Bf16Rows x;
  void* y;
  int64_t y_stride;
  int64_t rows;
  int32_t in_features, out_features, features;
  int32_t k_blocks, last_tile, last_tile_rows;
  bool is_swiglu, y_is_f32;
};

// Copies `bytes` (0..16) bytes and fills up to 16 with zeros.
__device__ __forceinline__ void CopyPiece(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__global__ void __launch_bounds__(kThreads) LinearPortableKernel(const PortableTask task) {
  extern __shared__ uint8_t shared[];
  const uint32_t base = (ptx::SharedAddress(shared) + 127u) & ~127u;
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int32_t first_output = static_cast<int32_t>(blockIdx.x) * kTile;
  const int64_t first_row = int64_t{blockIdx.y} * kTile;
  const int32_t block = first_output / kBlockOutputs, inside = first_output % kBlockOutputs;
  const int32_t block_rows = block == task.last_tile ? task.last_tile_rows : kBlockOutputs;
  const uint8_t* tile_start = task.weight + int64_t{block} * kBlockOutputs * task.k_blocks * kRowBytes;

  // A thread copies pieces thread, thread + 128, ... of each operand: 8 pieces a row.
  const auto copy = [&](int32_t k) {
    const uint32_t to = base + k % kStages * (2 * kOperandBytes);
    for (int piece = thread; piece < kTile * 8; piece += kThreads) {
      const int row = piece / 8, column = piece % 8;
      const int32_t packed = inside + row;
      const uint8_t* w = tile_start + (int64_t{k} * block_rows + min(packed, block_rows - 1)) * kRowBytes;
      CopyPiece(to + piece * 16, w + column * 16, packed < block_rows ? 16 : 0);
      const int32_t x_column = k * kBlockK + column * 8;
      const bool exists = first_row + row < task.rows && x_column < task.in_features;
      const __nv_bfloat16* x = task.x.Row(exists ? first_row + row : 0) + (exists ? x_column : 0);
      CopyPiece(to + kOperandBytes + row * kRowBytes + (column ^ (row % 8)) * 16, x,
                exists ? min(task.in_features - x_column, 8) * 2 : 0);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  float d[kTile / 8][4] = {};
  for (int32_t k = 0; k < kStages - 1; ++k) {
    if (k < task.k_blocks) {
      copy(k);
    } else {
      asm volatile("cp.async.commit_group;" ::: "memory");
    }
  }
  const int swizzle = lane % 8;
  for (int32_t k = 0; k < task.k_blocks; ++k) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncthreads();  // block k is there, and block k - 1 has been read by all
    if (k + kStages - 1 < task.k_blocks) {
      copy(k + kStages - 1);
    } else {
      asm volatile("cp.async.commit_group;" ::: "memory");
    }
    const uint32_t w = base + k % kStages * (2 * kOperandBytes) + (warp * 16 + lane % 16) * kRowBytes;
    const uint32_t x =
        base + k % kStages * (2 * kOperandBytes) + kOperandBytes + (swizzle + lane / 16 * 8) * kRowBytes;
#pragma unroll
    for (int i = 0; i < kBlockK / 16; ++i) {
      uint32_t a[4];
      ptx::LoadMatrix4(a, w + ((2 * i + lane / 16) ^ swizzle) * 16);
#pragma unroll
      for (int pair = 0; pair < kTile / 16; ++pair) {
        uint32_t b[4];
        ptx::LoadMatrix4(b, x + pair * (16 * kRowBytes) + ((2 * i + lane / 8 % 2) ^ swizzle) * 16);
        ptx::Mma16x8x16(d[2 * pair], a, b[0], b[1]);
        ptx::Mma16x8x16(d[2 * pair + 1], a, b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kTile / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int32_t place = first_output + warp * 16 + lane / 4 + e / 2 * 8;
      const int64_t row = first_row + 8 * j + lane % 4 * 2 + e % 2;
      if (place >= task.out_features || row >= task.rows) continue;
      if (task.is_swiglu && e >= 2) continue;  // up outputs, which belong to the gates of e - 2
      const int64_t at = row * task.y_stride + OutputAt(place, task.features);
      const float value = task.is_swiglu ? SwiGluOf(d[j][e % 2], d[j][e % 2 + 2]) : d[j][e];
      if (task.y_is_f32) {
        static_cast<float*>(task.y)[at] = value;
      } else {
        static_cast<__nv_bfloat16*>(task.y)[at] = __float2bfloat16_rn(value);
      }
    }
  }
}

}  // namespace

cudaError_t LaunchLinearPortable(ConstMatrixView x, const PackedWeight& weight, MatrixView y,
                                 const CudaContext& context, LinearResult result) {
  if (!IsLegalResult(weight, y, result)) return cudaErrorInvalidValue;
  const cudaError_t error =
      cudaFuncSetAttribute(LinearPortableKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  constexpr int64_t kRows = int64_t{32768} * kTile;  // a bound of the grid
  for (int64_t row = 0; row < x.rows; row += kRows) {
    const int64_t rows = std::min(kRows, x.rows - row);
    PortableTask task;
    task.weight = static_cast<const uint8_t*>(weight.data);
    task.x = Bf16RowsOf(x.Rows(row, rows));
    task.y = y.Rows(row, rows).data;
    task.y_stride = y.row_stride;
    task.rows = rows;
    task.in_features = static_cast<int32_t>(weight.in_features);
    task.out_features = static_cast<int32_t>(weight.out_features);
    task.features = static_cast<int32_t>(weight.features);
    task.is_swiglu = result == LinearResult::kSwiGlu;
    task.k_blocks = static_cast<int32_t>(weight.KBlocks());
    task.last_tile = static_cast<int32_t>(weight.Tiles() - 1);
    task.last_tile_rows = static_cast<int32_t>(weight.LastTileRows());
    task.y_is_f32 = y.dtype == DType::kF32;
    const LaunchShape shape = {.grid = Grid(CeilDiv(weight.out_features, kTile), CeilDiv(rows, kTile)),
                               .block = dim3(kThreads),
                               .shared_bytes = kSharedBytes};
    if (const cudaError_t launched = Launch(context, shape, LinearPortableKernel, task);
        launched != cudaSuccess) {
      return launched;
    }
  }
  return cudaSuccess;
}

}  // namespace dflash
