// PREFILL rows: y[t, n] = sum_k x[t, k] W[n, k] for many rows t, with warpgroup products.
//
// Every output is one sum over all of K in steps of 16: no split of K, so the bits of a row depend neither on
// the number of rows nor on the tile's width, and the width may be chosen for speed.
//
//   tile      128 rows x kOutputs outputs
//   grid      a thread block per multiprocessor; each takes every so-manyth tile
//   warp 8    one thread copies tiles of x and rows of W into a ring of stages
//   warps 0-7 two warpgroups of 64 rows each
//
// Floor: 2 T N K floating-point operations at the device's bf16 rate (about 750 TFLOP/s on an H200).
#include <cuda.h>
#include <cuda_bf16.h>

#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/ptx.cuh"
#include "kernels/device/cuda/tensor_map.h"
#include "kernels/device/cuda/vector.cuh"
#include "kernels/device/cuda/wgmma.cuh"
#include "kernels/linear/linear_cuda.h"
#include "kernels/linear/linear_result.cuh"

namespace dflash {
namespace {

constexpr int kConsumerWarps = 8;
constexpr int kConsumers = 32 * kConsumerWarps;
constexpr int kThreads = kConsumers + 32;
constexpr int kTileRows = 128;
constexpr int kRowBytes = kBlockRowBytes;
constexpr int kShared = 227 * 1024;
// Tiles of rows that are worked on together, so that x and W come from L2 more often than from memory.
constexpr int kRowTilesTogether = 16;

template <int kOutputs>
struct TiledShape {
  // Copies of W take this many rows: they never cross the border between two packed blocks.
  static constexpr int kCopyRows = kOutputs % 128 == 0 ? 128 : kOutputs % 64 == 0 ? 64 : 32;
  static constexpr int kXBytes = kTileRows * kRowBytes;
  static constexpr int kStageBytes = kXBytes + kOutputs * kRowBytes;
  static constexpr int kStages = (kShared - 1024 - 256) / kStageBytes;
  static constexpr int kSharedBytes = 1024 + kStages * (kStageBytes + 16);
  static_assert(kOutputs % kCopyRows == 0 && kStageBytes % 1024 == 0 && kStages >= 3);
};

struct TiledTask {
  void* y;
  int64_t y_stride;
  int32_t rows, out_features, features;
  int32_t k_blocks, last_tile, last_tile_rows;  // of the packed weight
  int32_t row_tiles, output_tiles;
  bool y_is_f32, y_is_aligned;
};

struct Tile {
  int32_t row, output;  // the first

  // Tiles in groups of kRowTilesTogether tiles of rows, inside a group the rows run fastest.
  template <int kOutputs>
  static __device__ __forceinline__ Tile At(const TiledTask& task, int32_t index) {
    const int32_t per_group = kRowTilesTogether * task.output_tiles;
    const int32_t first = index / per_group * kRowTilesTogether;
    const int32_t together = min(task.row_tiles - first, kRowTilesTogether);
    const int32_t within = index % per_group;
    return {(first + within % together) * kTileRows, within / together * kOutputs};
  }
};

template <int kOutputs>
__device__ __forceinline__ void Produce(const TiledTask& task, const CUtensorMap* x,
                                        const CUtensorMap* weight, uint32_t stages, uint32_t full,
                                        uint32_t empty) {
  using Shape = TiledShape<kOutputs>;
  constexpr int kCopies = kOutputs / Shape::kCopyRows;
  const int32_t tiles = task.row_tiles * task.output_tiles;
  int stage = 0;
  uint32_t parity = 1;  // the first round finds the stages empty
  for (auto index = static_cast<int32_t>(blockIdx.x); index < tiles;
       index += static_cast<int32_t>(gridDim.x)) {
    const Tile tile = Tile::At<kOutputs>(task, index);
    // Packed rows of the copies at k block 0, and how far the next k block is. Outputs beyond the last are
    // whatever follows in memory, or zeros; they are never stored.
    int32_t packed_row[kCopies], k_step[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int32_t output = tile.output + i * Shape::kCopyRows, block = output / kBlockOutputs;
      packed_row[i] = block * kBlockOutputs * task.k_blocks + output % kBlockOutputs;
      k_step[i] = block >= task.last_tile ? task.last_tile_rows : kBlockOutputs;
    }
    for (int32_t k = 0; k < task.k_blocks; ++k) {
      ptx::BarrierWait(empty + 8 * stage, parity);
      const uint32_t to = stages + stage * Shape::kStageBytes, barrier = full + 8 * stage;
      ptx::BarrierArriveExpecting(barrier, Shape::kStageBytes);
      ptx::CopyTile(to, x, k * kBlockK, tile.row, barrier, ptx::kEvictNormal);
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        ptx::CopyTile(to + Shape::kXBytes + i * (Shape::kCopyRows * kRowBytes), weight, 0,
                      packed_row[i] + k * k_step[i], barrier, ptx::kEvictNormal);
      }
      if (++stage == Shape::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

// Transposes a 4 x 4 matrix of words over the four lanes of a quad: lane q gives words[i] and gets word q of
// lane i as words[i].
__device__ __forceinline__ void TransposeQuad(uint32_t (&words)[4]) {
  const int lane = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = (lane & distance) != 0;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int low = distance == 1 ? 2 * pair : pair;
      const uint32_t received =
          __shfl_xor_sync(0xffffffffu, upper ? words[low] : words[low + distance], distance);
      if (upper) {
        words[low] = received;
      } else {
        words[low + distance] = received;
      }
    }
  }
}

// Stores the accumulators of one thread: d[4 j + e] is row lane / 4 + 8 (e / 2), column 8 j + 2 (lane mod 4)
// + e mod 2.
template <int kOutputs>
__device__ __forceinline__ void StoreTile(const TiledTask& task, const float (&d)[kOutputs / 2],
                                          int32_t first_row, int32_t first_place) {
  const int quad = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = first_row + static_cast<int32_t>(threadIdx.x) % 32 / 4 + 8 * half;
    const bool row_exists = row < task.rows;
    if (task.y_is_f32) {
      float* y = static_cast<float*>(task.y) + row * task.y_stride;
#pragma unroll
      for (int j = 0; j < kOutputs / 8; ++j) {
        const int32_t place = first_place + 8 * j + 2 * quad;
        float* to = y + OutputAt(place, task.features);
        const float low = d[4 * j + 2 * half], high = d[4 * j + 2 * half + 1];
        if (row_exists && task.y_is_aligned && place + 1 < task.out_features) {
          *reinterpret_cast<float2*>(to) = make_float2(low, high);
        } else if (row_exists) {
          if (place < task.out_features) to[0] = low;
          if (place + 1 < task.out_features) to[1] = high;
        }
      }
      continue;
    }
    __nv_bfloat16* y = static_cast<__nv_bfloat16*>(task.y) + row * task.y_stride;
#pragma unroll
    for (int group = 0; group < kOutputs / 32; ++group) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (4 * group + i) + 2 * half;
        words[i] = PackBf16(d[at], d[at + 1]);
      }
      TransposeQuad(words);  // now eight consecutive outputs
      const int32_t place = first_place + 8 * (4 * group + quad);
      __nv_bfloat16* to = y + OutputAt(place, task.features);
      if (!row_exists) continue;
      if (task.y_is_aligned && place + 8 <= task.out_features) {
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const auto bits = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
          if (place + i < task.out_features) to[i] = __ushort_as_bfloat16(bits);
        }
      }
    }
  }
}

// The same for SwiGlu: of two neighbouring groups of eight columns the first are gates, the others up.
template <int kOutputs>
__device__ __forceinline__ void StoreSwiGlu(const TiledTask& task, const float (&d)[kOutputs / 2],
                                            int32_t first_row, int32_t first_place) {
  const int quad = static_cast<int>(threadIdx.x) % 4, odd = quad % 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = first_row + static_cast<int32_t>(threadIdx.x) % 32 / 4 + 8 * half;
    __nv_bfloat16* y = static_cast<__nv_bfloat16*>(task.y) + row * task.y_stride;
#pragma unroll
    for (int pair = 0; pair < kOutputs / 32; ++pair) {
      uint32_t words[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* gate = &d[8 * (2 * pair + i) + 2 * half];
        words[i] = PackBf16(SwiGluOf(gate[0], gate[4]), SwiGluOf(gate[1], gate[5]));
      }
      // Lanes exchange a word, so that each has four consecutive features: the even one of the first gates.
      const uint32_t received = __shfl_xor_sync(0xffffffffu, odd != 0 ? words[0] : words[1], 1);
      const uint32_t low = odd != 0 ? received : words[0], high = odd != 0 ? words[1] : received;
      const int32_t place = first_place + 16 * (2 * pair + odd);
      if (row >= task.rows || place >= task.out_features) continue;
      __nv_bfloat16* to = y + place / 2 + 4 * (quad / 2);
      if (task.y_is_aligned) {
        *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t word = i < 2 ? low : high;
          to[i] = __ushort_as_bfloat16(static_cast<uint16_t>(word >> (16 * (i % 2))));
        }
      }
    }
  }
}

template <int kOutputs, LinearResult kResult>
__device__ __forceinline__ void Consume(const TiledTask& task, uint32_t stages, uint32_t full,
                                        uint32_t empty) {
  using Shape = TiledShape<kOutputs>;
  const int32_t tiles = task.row_tiles * task.output_tiles;
  const int warpgroup = static_cast<int>(threadIdx.x) / 128, lane = static_cast<int>(threadIdx.x) % 32;
  const auto release = [&](int stage) {
    __syncwarp();
    if (lane == 0) ptx::BarrierArrive(empty + 8 * stage);
  };
  float d[kOutputs / 2];
  int stage = 0;
  uint32_t parity = 0;
  for (auto index = static_cast<int32_t>(blockIdx.x); index < tiles;
       index += static_cast<int32_t>(gridDim.x)) {
    int busy = -1;  // the stage that the products before this one's still read
    for (int32_t k = 0; k < task.k_blocks; ++k) {
      ptx::BarrierWait(full + 8 * stage, parity);
      const uint32_t x = stages + stage * Shape::kStageBytes;
      const uint64_t a = ptx::SwizzledOperand(x + warpgroup * (64 * kRowBytes));
      const uint64_t b = ptx::SwizzledOperand(x + Shape::kXBytes);
      ptx::WgmmaFence();
#pragma unroll
      for (int i = 0; i < kBlockK / 16; ++i) {
        ptx::Wgmma<kOutputs>::Run(d, a + 2 * i, b + 2 * i, k > 0 || i > 0);
      }
      ptx::WgmmaCommit();
      if (busy >= 0) {
        ptx::WgmmaWait<1>();
        release(busy);
      }
      busy = stage;
      if (++stage == Shape::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    ptx::WgmmaWait<0>();
    release(busy);
    const Tile tile = Tile::At<kOutputs>(task, index);
    const int32_t first_row = tile.row + static_cast<int32_t>(threadIdx.x) / 32 * 16;
    if constexpr (kResult == LinearResult::kSwiGlu) {
      StoreSwiGlu<kOutputs>(task, d, first_row, tile.output);
    } else {
      StoreTile<kOutputs>(task, d, first_row, tile.output);
    }
  }
}

template <int kOutputs, LinearResult kResult>
__global__ void __launch_bounds__(kThreads, 1)
    LinearTiledKernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap weight,
                      const TiledTask task) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Shape = TiledShape<kOutputs>;
  extern __shared__ uint8_t shared[];
  const uint32_t stages = (ptx::SharedAddress(shared) + 1023u) & ~1023u;
  const uint32_t full = stages + Shape::kStages * Shape::kStageBytes, empty = full + 8 * Shape::kStages;
  if (threadIdx.x == kConsumers) {
    ptx::PrefetchTensorMap(&x);
    ptx::PrefetchTensorMap(&weight);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      ptx::BarrierInit(full + 8 * stage, 1);
      ptx::BarrierInit(empty + 8 * stage, kConsumerWarps);
    }
    ptx::BarrierInitFence();
  }
  __syncthreads();
  LetNextKernelStart();
  WaitForPreviousKernel();
  // In this order: with the consumers' branch first, nvcc 13.0 serializes the products (ptxas C7518).
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) Produce<kOutputs>(task, &x, &weight, stages, full, empty);
  } else {
    Consume<kOutputs, kResult>(task, stages, full, empty);
  }
#endif
}

template <int kOutputs>
cudaError_t LaunchTiles(ConstMatrixView x, const PackedWeight& weight, TiledTask task,
                        const CudaContext& context, LinearResult result) {
  using Shape = TiledShape<kOutputs>;
  const auto kernel = result == LinearResult::kSwiGlu ? LinearTiledKernel<kOutputs, LinearResult::kSwiGlu>
                                                      : LinearTiledKernel<kOutputs, LinearResult::kSums>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (error != cudaSuccess) return error;
  CUtensorMap x_map, weight_map;
  error = MakeRowsTensorMap(x, kTileRows, BoxLayout::kSwizzled, &x_map);
  if (error != cudaSuccess) return error;
  const ConstMatrixView packed(weight.data, DType::kBf16, weight.PackedRows(), kBlockK, kBlockK);
  error = MakeRowsTensorMap(packed, Shape::kCopyRows, BoxLayout::kPlain, &weight_map);
  if (error != cudaSuccess) return error;
  task.output_tiles = static_cast<int32_t>(CeilDiv(task.out_features, kOutputs));
  const int64_t blocks =
      std::min<int64_t>(context.multiprocessors, int64_t{task.row_tiles} * task.output_tiles);
  const LaunchShape shape = {
      .grid = Grid(blocks), .block = dim3(kThreads), .shared_bytes = Shape::kSharedBytes};
  return Launch(context, shape, kernel, x_map, weight_map, task);
}

// The widths, with the time of one tile as measured on an H200 (in outputs of the widest).
struct Width {
  int outputs;
  int64_t time;
  cudaError_t (*launch)(ConstMatrixView, const PackedWeight&, TiledTask, const CudaContext&, LinearResult);
};
constexpr Width kWidths[] = {{256, 256, LaunchTiles<256>},
                             {192, 190, LaunchTiles<192>},
                             {160, 176, LaunchTiles<160>},
                             {128, 135, LaunchTiles<128>}};

}  // namespace

cudaError_t LaunchLinearTiled(ConstMatrixView x, const PackedWeight& weight, MatrixView y,
                              const CudaContext& context, LinearResult result) {
  if (context.compute_capability != 90) return cudaErrorNotSupported;
  if (!IsLegalResult(weight, y, result)) return cudaErrorInvalidValue;
  if (weight.PackedRows() > INT32_MAX / 2) return cudaErrorNotSupported;  // row numbers are 32-bit
  TiledTask task = {};
  task.y = y.data;
  task.y_stride = y.row_stride;
  task.rows = static_cast<int32_t>(x.rows);
  task.out_features = static_cast<int32_t>(weight.out_features);
  task.features = static_cast<int32_t>(weight.features);
  task.k_blocks = static_cast<int32_t>(weight.KBlocks());
  task.last_tile = static_cast<int32_t>(weight.Tiles() - 1);
  task.last_tile_rows = static_cast<int32_t>(weight.LastTileRows());
  task.row_tiles = static_cast<int32_t>(CeilDiv(x.rows, kTileRows));
  task.y_is_f32 = y.dtype == DType::kF32;
  task.y_is_aligned =
      reinterpret_cast<uintptr_t>(y.data) % 16 == 0 && y.row_stride * SizeOf(y.dtype) % 16 == 0;
  // The last wave of tiles leaves multiprocessors idle; how many depends on the width.
  const Width* best = nullptr;
  int64_t best_time = 0;
  for (const Width& width : kWidths) {
    const int64_t tiles = task.row_tiles * CeilDiv(weight.out_features, width.outputs);
    const int64_t time = CeilDiv(tiles, context.multiprocessors) * width.time;
    if (best == nullptr || time < best_time) {
      best = &width;
      best_time = time;
    }
  }
  return best->launch(x, weight, task, context, result);
}

}  // namespace dflash
