// PREFILL rows: y[t, n] = sum_k x[t, k] W[n, k] for many rows t, with warpgroup matrix products.
//
// Every output is one sum over all of K in steps of 16: no split of K, so the bits of a row depend neither on
// the number of rows nor on the tile shape, and the shape may be chosen for speed.
//
//   tile      128 rows x kOutputs outputs; kCluster blocks of a cluster take the same outputs and consecutive
//             rows, and each fetches its share of W for both
//   grid      as many clusters as the device holds at once; each takes every so-manyth tile
//   warp 8    one thread copies tiles of x and rows of W into a ring of stages
//   warps 0-7 two warpgroups of 64 rows each
//
// Floor: 2 T N K floating-point operations at the device's bf16 rate (about 790 TFLOP/s on an H200).
#include <cuda.h>
#include <cuda_bf16.h>

#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/ptx.cuh"
#include "kernels/device/cuda/tensor_map.h"
#include "kernels/device/cuda/vector.cuh"
#include "kernels/device/cuda/wgmma.cuh"
#include "kernels/linear/linear_cuda.h"

namespace dflash {
namespace {

constexpr int kConsumerWarps = 8;
constexpr int kConsumers = 32 * kConsumerWarps;
constexpr int kThreads = kConsumers + 32;
constexpr int kTileRows = 128;
constexpr int kRowBytes = kBlockK * 2;
constexpr int kShared = 227 * 1024;
// Clusters of rows whose tiles are worked on together, so that x and W come from L2 more often than from
// memory.
constexpr int kRowClustersTogether = 8;

template <int kOutputs>
struct TiledShape {
  static constexpr int kXBytes = kTileRows * kRowBytes;
  static constexpr int kStageBytes = kXBytes + kOutputs * kRowBytes;
  static constexpr int kStages = (kShared - 1024 - 256) / kStageBytes;
  static constexpr int kSharedBytes = 1024 + kStages * (kStageBytes + 16);
  static_assert(kStageBytes % 1024 == 0 && kStages >= 3);
};

struct TiledTask {
  const uint8_t* weight;
  void* y;
  int64_t y_stride;
  int32_t rows, out_features, padded_outputs;
  int32_t k_blocks, last_tile, last_tile_rows;  // of the packed weight
  int32_t row_clusters, output_tiles;
  bool y_is_f32, y_is_aligned;
};

struct Tile {
  int32_t row, output;  // the first of the cluster

  // Tiles in groups of kRowClustersTogether clusters of rows, inside a group the rows run fastest.
  template <int kOutputs, int kCluster>
  static __device__ __forceinline__ Tile At(const TiledTask& task, int32_t index) {
    const int32_t per_group = kRowClustersTogether * task.output_tiles;
    const int32_t first = index / per_group * kRowClustersTogether;
    const int32_t together = min(task.row_clusters - first, kRowClustersTogether);
    const int32_t within = index % per_group;
    return {(first + within % together) * (kCluster * kTileRows), within / together * kOutputs};
  }
};

template <int kOutputs, int kCluster>
__device__ __forceinline__ void Produce(const TiledTask& task, const CUtensorMap* x, uint32_t stages,
                                        uint32_t full, uint32_t empty) {
  using Shape = TiledShape<kOutputs>;
  constexpr int kShare = kOutputs / kCluster;
  const int32_t rank = kCluster == 1 ? 0 : static_cast<int32_t>(ptx::ClusterRank());
  const int32_t tiles = task.row_clusters * task.output_tiles;
  const auto step = static_cast<int32_t>(gridDim.x / kCluster);
  int stage = 0;
  uint32_t parity = 1;  // the first round finds the stages empty
  for (auto index = static_cast<int32_t>(blockIdx.x / kCluster); index < tiles; index += step) {
    const Tile tile = Tile::At<kOutputs, kCluster>(task, index);
    const int32_t outputs = min(kOutputs, task.padded_outputs - tile.output);
    const int32_t begin = min(rank * kShare, outputs), end = min(begin + kShare, outputs);
    for (int32_t k = 0; k < task.k_blocks; ++k) {
      if constexpr (kCluster == 1) {
        ptx::BarrierWait(empty + 8 * stage, parity);
      } else {
        ptx::BarrierWaitCluster(empty + 8 * stage, parity);
      }
      const uint32_t to = stages + stage * Shape::kStageBytes, barrier = full + 8 * stage;
      ptx::BarrierArriveExpecting(barrier, Shape::kXBytes + outputs * kRowBytes);
      ptx::CopyTile(to, x, k * kBlockK, tile.row + rank * kTileRows, barrier, ptx::kEvictLast);
      for (int32_t row = begin; row < end;) {  // at most two packed blocks
        const int32_t block = (tile.output + row) / kBlockOutputs,
                      inside = (tile.output + row) % kBlockOutputs;
        const int32_t rows = min(end - row, kBlockOutputs - inside);
        const int32_t block_rows = block == task.last_tile ? task.last_tile_rows : kBlockOutputs;
        const int64_t packed_row =
            int64_t{block} * kBlockOutputs * task.k_blocks + int64_t{k} * block_rows + inside;
        const uint32_t row_to = to + Shape::kXBytes + row * kRowBytes;
        if constexpr (kCluster == 1) {
          ptx::CopyBulk(row_to, task.weight + packed_row * kRowBytes, rows * kRowBytes, barrier,
                        ptx::kEvictLast);
        } else {
          ptx::CopyBulkMulticast(row_to, task.weight + packed_row * kRowBytes, rows * kRowBytes, barrier,
                                 (1 << kCluster) - 1, ptx::kEvictLast);
        }
        row += rows;
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
                                          int32_t first_row, int32_t first_output) {
  const int quad = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = first_row + static_cast<int32_t>(threadIdx.x) % 32 / 4 + 8 * half;
    const bool row_exists = row < task.rows;
    if (task.y_is_f32) {
      float* y = static_cast<float*>(task.y) + row * task.y_stride;
#pragma unroll
      for (int j = 0; j < kOutputs / 8; ++j) {
        const int32_t n = first_output + 8 * j + 2 * quad;
        const float low = d[4 * j + 2 * half], high = d[4 * j + 2 * half + 1];
        if (row_exists && task.y_is_aligned && n + 1 < task.out_features) {
          *reinterpret_cast<float2*>(y + n) = make_float2(low, high);
        } else if (row_exists) {
          if (n < task.out_features) y[n] = low;
          if (n + 1 < task.out_features) y[n + 1] = high;
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
      const int32_t n = first_output + 8 * (4 * group + quad);
      if (!row_exists) continue;
      if (task.y_is_aligned && n + 8 <= task.out_features) {
        *reinterpret_cast<uint4*>(y + n) = make_uint4(words[0], words[1], words[2], words[3]);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const auto bits = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
          if (n + i < task.out_features) y[n + i] = __ushort_as_bfloat16(bits);
        }
      }
    }
  }
}

template <int kOutputs, int kCluster>
__device__ __forceinline__ void Consume(const TiledTask& task, uint32_t stages, uint32_t full,
                                        uint32_t empty) {
  using Shape = TiledShape<kOutputs>;
  const int32_t rank = kCluster == 1 ? 0 : static_cast<int32_t>(ptx::ClusterRank());
  const int32_t tiles = task.row_clusters * task.output_tiles;
  const auto step = static_cast<int32_t>(gridDim.x / kCluster);
  const int warpgroup = static_cast<int>(threadIdx.x) / 128, lane = static_cast<int>(threadIdx.x) % 32;
  const int32_t rank_row = rank * kTileRows + static_cast<int32_t>(threadIdx.x) / 32 * 16;
  const auto release = [&](int stage) {
    __syncwarp();
    if constexpr (kCluster == 1) {
      if (lane == 0) ptx::BarrierArrive(empty + 8 * stage);
    } else {
      if (lane < kCluster) ptx::BarrierArriveRemote(empty + 8 * stage, lane);
    }
  };
  float d[kOutputs / 2];
  int stage = 0;
  uint32_t parity = 0;
  for (auto index = static_cast<int32_t>(blockIdx.x / kCluster); index < tiles; index += step) {
    int busy = -1;  // the stage that the products before this block's still read
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
    const Tile tile = Tile::At<kOutputs, kCluster>(task, index);
    StoreTile<kOutputs>(task, d, tile.row + rank_row, tile.output);
  }
}

template <int kOutputs, int kCluster>
__global__ void __launch_bounds__(kThreads, 1)
    LinearTiledKernel(const __grid_constant__ CUtensorMap x, const TiledTask task) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Shape = TiledShape<kOutputs>;
  extern __shared__ uint8_t shared[];
  const uint32_t stages = (ptx::SharedAddress(shared) + 1023u) & ~1023u;
  const uint32_t full = stages + Shape::kStages * Shape::kStageBytes, empty = full + 8 * Shape::kStages;
  if (threadIdx.x == kConsumers) {
    ptx::PrefetchTensorMap(&x);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      ptx::BarrierInit(full + 8 * stage, 1);
      ptx::BarrierInit(empty + 8 * stage, kConsumerWarps * kCluster);
    }
    ptx::BarrierInitFence();
  }
  __syncthreads();
  if constexpr (kCluster > 1) ptx::ClusterSync();
  LetNextKernelStart();
  WaitForPreviousKernel();
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) Produce<kOutputs, kCluster>(task, &x, stages, full, empty);
    __syncwarp();
  } else {
    Consume<kOutputs, kCluster>(task, stages, full, empty);
  }
  // The other block may still copy into this one's memory or arrive at its barriers.
  if constexpr (kCluster > 1) ptx::ClusterSync();
#endif
}

template <int kOutputs, int kCluster>
int64_t Waves(const TiledTask& task, const CudaContext& context) {
  const int64_t row_clusters = CeilDiv(task.rows, kCluster * kTileRows);
  return CeilDiv(row_clusters * CeilDiv(task.out_features, kOutputs), context.multiprocessors / kCluster);
}

template <int kOutputs, int kCluster>
cudaError_t LaunchTiles(ConstMatrixView x, TiledTask task, const CudaContext& context) {
  using Shape = TiledShape<kOutputs>;
  const auto kernel = LinearTiledKernel<kOutputs, kCluster>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (error != cudaSuccess) return error;
  CUtensorMap map;
  error = MakeRowsTensorMap(x, kTileRows, &map);
  if (error != cudaSuccess) return error;
  task.row_clusters = static_cast<int32_t>(CeilDiv(task.rows, kCluster * kTileRows));
  task.output_tiles = static_cast<int32_t>(CeilDiv(task.out_features, kOutputs));
  const int64_t clusters =
      std::min<int64_t>(context.multiprocessors / kCluster, int64_t{task.row_clusters} * task.output_tiles);
  const LaunchShape shape = {.grid = Grid(clusters * kCluster),
                             .block = dim3(kThreads),
                             .shared_bytes = Shape::kSharedBytes,
                             .cluster = kCluster};
  return Launch(context, shape, kernel, map, task);
}

}  // namespace

cudaError_t LaunchLinearTiled(ConstMatrixView x, const PackedWeight& weight, MatrixView y,
                              const CudaContext& context) {
  if (context.compute_capability != 90) return cudaErrorNotSupported;
  TiledTask task = {};
  task.weight = static_cast<const uint8_t*>(weight.data);
  task.y = y.data;
  task.y_stride = y.row_stride;
  task.rows = static_cast<int32_t>(x.rows);
  task.out_features = static_cast<int32_t>(weight.out_features);
  task.padded_outputs = static_cast<int32_t>(CeilDiv(weight.out_features, 8) * 8);
  task.k_blocks = static_cast<int32_t>(weight.KBlocks());
  task.last_tile = static_cast<int32_t>(weight.Tiles() - 1);
  task.last_tile_rows = static_cast<int32_t>(weight.LastTileRows());
  task.y_is_f32 = y.dtype == DType::kF32;
  task.y_is_aligned =
      reinterpret_cast<uintptr_t>(y.data) % 16 == 0 && y.row_stride * SizeOf(y.dtype) % 16 == 0;
  if (x.rows <= kTileRows) return LaunchTiles<128, 1>(x, task, context);
  // The last wave of tiles leaves multiprocessors idle; narrower tiles leave fewer, and are a little slower.
  constexpr int64_t kOverhead = 16;  // in outputs, per tile
  const int64_t wide = Waves<256, 2>(task, context) * (256 + kOverhead);
  const int64_t narrow = Waves<160, 2>(task, context) * (160 + kOverhead);
  return narrow < wide ? LaunchTiles<160, 2>(x, task, context) : LaunchTiles<256, 2>(x, task, context);
}

}  // namespace dflash
