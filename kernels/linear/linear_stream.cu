// VERIFY rows: y[t, n] = sum_k x[t, k] W[n, k] for few rows t, with the weight streamed from memory once.
//
// The weight's rows are the 64 rows of the warpgroup product and x's rows its columns, so one row costs no
// more tensor time than eight. The unit of work is one packed block (128 outputs x 64 k). The units, in the
// order of memory, are cut into one contiguous range per thread block, so all finish together. A tile of 128
// outputs that a cut divides is summed from its pieces in a fixed order.
//
//   grid      about as many thread blocks of 288 threads as there are multiprocessors, see Blocks()
//   warp 8    one thread copies W and x into a ring of stages that fills the shared memory
//   warps 0-7 two warpgroups multiply, 64 outputs each
//   shared    stages x (rows of W, then rows of x), then a full and an empty barrier per stage
//
// The next kernel's block starts on a multiprocessor as soon as this one's ends and fills its ring with W
// (some 200 KB) before it waits for this kernel's results: that hides the end of this kernel and small
// kernels in between. Since no two such blocks fit on a multiprocessor, none ever holds two.
//
// What a row's bits depend on: N, K and the number of multiprocessors. Not on the number of rows: kRows only
// widens the product's column dimension and never moves a cut.
//
// A block works from the end of its range to the start, tile by tile. Its first piece is then the one that
// the next block's tile needs, written long before anyone reads it, and a block waits only for blocks of
// lower index, which the hardware has started before it.
//
// Floor: 2 N K bytes at the rate of reading memory (about 4.5 TB/s on an H200).
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
constexpr int kShared = 227 * 1024;  // the most a block can have
constexpr unsigned kAllLanes = 0xffffffffu;

// kRows: rows of x, padded.
template <int kRows_>
struct StreamShape {
  static constexpr int kRows = kRows_;
  static constexpr int kWeightBytes = kBlockOutputs * kBlockRowBytes;
  static constexpr int kXBytes = kRows * kBlockRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kXBytes;
  static constexpr int kStages = (kShared - 1024 - 256) / kStageBytes;
  static constexpr int kSharedBytes = 1024 + kStages * (kStageBytes + 16);
  static_assert(kStages >= 3 && kStages <= 16 && kStageBytes % 1024 == 0);
  static_assert(2 * kSharedBytes > kShared, "one block per multiprocessor");
};

struct StreamTask {
  const uint8_t* weight;
  void* y;
  int64_t y_stride;
  float* partials;  // kBlockOutputs x kRows floats per block
  int32_t* flags;   // one per block: its partial is complete
  int32_t rows, out_features, features;
  int32_t k_blocks, tiles, last_tile_rows;
  bool y_is_f32;
  bool y_in_pairs;  // two consecutive columns, the first even, lie at an address that allows one store
};

// The range of a block, walked tile by tile from its end. Producer and consumers walk alike.
struct Piece {
  int64_t low, high;  // units of the block
  int32_t k_blocks;
  int32_t tile, k_begin, k_end;

  __device__ __forceinline__ Piece(int64_t units, int32_t k_blocks_) : k_blocks(k_blocks_) {
    low = blockIdx.x * units / gridDim.x;
    high = (blockIdx.x + int64_t{1}) * units / gridDim.x;
    tile = static_cast<int32_t>((high - 1) / k_blocks);
    Cut();
  }
  __device__ __forceinline__ bool Next() {
    --tile;
    if (tile < 0 || (tile + int64_t{1}) * k_blocks <= low) return false;
    Cut();
    return true;
  }

 private:
  __device__ __forceinline__ void Cut() {
    const int64_t start = int64_t{tile} * k_blocks;
    k_begin = static_cast<int32_t>((low > start ? low : start) - start);
    k_end = static_cast<int32_t>((high < start + k_blocks ? high : start + k_blocks) - start);
  }
};

// The stages' ring: which stage is next, and the parity of its barriers' phases.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Walks the stages of a block: pieces, and their k blocks.
struct StageWalk {
  Piece piece;
  int32_t k;
  bool more = true;

  __device__ __forceinline__ StageWalk(const StreamTask& task, int64_t units)
      : piece(units, task.k_blocks), k(piece.k_begin) {}

  __device__ __forceinline__ int32_t WeightRows(const StreamTask& task) const {
    return piece.tile == task.tiles - 1 ? task.last_tile_rows : kBlockOutputs;
  }
  __device__ __forceinline__ const uint8_t* Weight(const StreamTask& task) const {
    const int64_t row = int64_t{piece.tile} * kBlockOutputs * task.k_blocks + int64_t{k} * WeightRows(task);
    return task.weight + row * kBlockRowBytes;
  }
  __device__ __forceinline__ void Advance() {
    if (++k < piece.k_end) return;
    more = piece.Next();
    k = piece.k_begin;
  }
};

template <typename Shape>
__device__ __forceinline__ void Produce(const StreamTask& task, const CUtensorMap* x, int64_t units,
                                        uint32_t stages, uint32_t full, uint32_t empty) {
  const auto copy_weight = [&](const StageWalk& walk, int stage) {
    const auto bytes = static_cast<uint32_t>(walk.WeightRows(task) * kBlockRowBytes);
    ptx::BarrierArriveExpecting(full + 8 * stage, bytes + Shape::kXBytes);
    ptx::CopyBulk(stages + stage * Shape::kStageBytes, walk.Weight(task), bytes, full + 8 * stage,
                  ptx::kEvictFirst);
  };
  const auto copy_x = [&](const StageWalk& walk, int stage) {
    ptx::CopyTile(stages + stage * Shape::kStageBytes + Shape::kWeightBytes, x, walk.k * kBlockK, 0,
                  full + 8 * stage, ptx::kEvictLast);
  };
  // Weights do not depend on the kernel before, x does.
  StageWalk weights(task, units);
  int filled = 0;
  for (; filled < Shape::kStages && weights.more; ++filled, weights.Advance()) copy_weight(weights, filled);
  LetNextKernelStart();
  WaitForPreviousKernel();
  StageWalk tiles(task, units);
  for (int i = 0; i < filled; ++i, tiles.Advance()) copy_x(tiles, i);
  Ring<Shape::kStages> ring;
  for (; weights.more; weights.Advance(), ring.Advance()) {
    ptx::BarrierWait(empty + 8 * ring.stage, ring.parity);
    copy_weight(weights, ring.stage);
    copy_x(weights, ring.stage);
  }
}

// The accumulators of one thread: d[4 j + e] is output FirstOutput() + lane / 4 + 8 (e / 2) of the tile, row
// 8 j + 2 (lane mod 4) + e mod 2 of x.
template <typename Shape>
struct Consumer {
  float d[Shape::kRows / 2];

  static __device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __device__ __forceinline__ int FirstOutput() { return static_cast<int>(threadIdx.x) / 32 * 16; }

  static __device__ __forceinline__ void Release(uint32_t empty, int stage) {
    __syncwarp();
    if (Lane() == 0) ptx::BarrierArrive(empty + 8 * stage);
  }

  // d = the sum over the ring's next `count` stages.
  __device__ __forceinline__ void Multiply(int count, Ring<Shape::kStages>& ring, uint32_t stages,
                                           uint32_t full, uint32_t empty) {
    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    int busy = -1;  // the stage that the products before this one's still read
    for (int i = 0; i < count; ++i, ring.Advance()) {
      ptx::BarrierWait(full + 8 * ring.stage, ring.parity);
      const uint32_t weight = stages + ring.stage * Shape::kStageBytes;
      const uint64_t a = ptx::SwizzledOperand(weight + warpgroup * (64 * kBlockRowBytes));
      const uint64_t b = ptx::SwizzledOperand(weight + Shape::kWeightBytes);
      ptx::WgmmaFence();
#pragma unroll
      for (int k = 0; k < kBlockK / 16; ++k) {  // 32 bytes, 2 units of the descriptor's address
        ptx::Wgmma<Shape::kRows>::Run(d, a + 2 * k, b + 2 * k, i > 0 || k > 0);
      }
      ptx::WgmmaCommit();
      if (busy >= 0) {
        ptx::WgmmaWait<1>();
        Release(empty, busy);
      }
      busy = ring.stage;
    }
    ptx::WgmmaWait<0>();
    Release(empty, busy);
  }

  // The slot of a block: four floats of every thread, then the next four.
  static constexpr int kWords = Shape::kRows / 8;  // of a thread
  static __device__ __forceinline__ float4* Slot(const StreamTask& task, int block) {
    return reinterpret_cast<float4*>(task.partials) + int64_t{block} * (kWords * kConsumers) + threadIdx.x;
  }

  __device__ __forceinline__ void WritePartial(const StreamTask& task) const {
    float4* slot = Slot(task, static_cast<int>(blockIdx.x));
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const float* v = &d[4 * word];
      __stcg(slot + word * kConsumers, make_float4(v[0], v[1], v[2], v[3]));
    }
  }

  // Adds the partials of blocks [first, last), in ascending order of k. Several are read at once: each read
  // takes a trip to L2.
  __device__ __forceinline__ void AddPartials(const StreamTask& task, int first, int last) {
    constexpr int kAtOnce = kWords >= 16 ? 1 : std::min(16 / kWords, 4);
#pragma unroll 1
    for (int block = first; block < last; block += kAtOnce) {
      float4 parts[kAtOnce][kWords];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (block + i >= last) continue;
        const float4* slot = Slot(task, block + i);
#pragma unroll
        for (int word = 0; word < kWords; ++word) parts[i][word] = __ldcg(slot + word * kConsumers);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (block + i >= last) continue;
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
          float* v = &d[4 * word];
          const float4& part = parts[i][word];
          v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
        }
      }
    }
  }

  template <LinearResult kResult>
  __device__ __forceinline__ void StoreOutputs(const StreamTask& task, int32_t tile) const {
    const int32_t place = tile * kBlockOutputs + FirstOutput() + Lane() / 4;
    const int32_t column = OutputAt(place, task.features);
    int row = Lane() % 4 * 2;
#pragma unroll
    for (int j = 0; j < kWords; ++j, row += 8) {
      const float* v = &d[4 * j];
      if constexpr (kResult == LinearResult::kSwiGlu) {  // the first half are gates, the other half is up
        StoreRows(task, row, place, column, SwiGluOf(v[0], v[2]), SwiGluOf(v[1], v[3]));
      } else {
        const int32_t step = task.features == 0 ? 8 : task.features;  // to the output at place + 8
        StoreRows(task, row, place, column, v[0], v[1]);
        StoreRows(task, row, place + 8, column + step, v[2], v[3]);
      }
    }
  }

  // Stores rows `row` and `row` + 1 of the column that belongs to a place.
  static __device__ __forceinline__ void StoreRows(const StreamTask& task, int row, int32_t place,
                                                   int32_t column, float first, float second) {
    if (task.y_in_pairs) {
      StorePair(task, row, place, column, first, second);
    } else if (place < task.out_features) {
      if (row < task.rows) StoreOne(task, row, column, first);
      if (row + 1 < task.rows) StoreOne(task, row + 1, column, second);
    }
  }

  static __device__ __forceinline__ void StoreOne(const StreamTask& task, int row, int32_t column, float v) {
    const int64_t at = row * task.y_stride + column;
    if (task.y_is_f32) {
      static_cast<float*>(task.y)[at] = v;
    } else {
      static_cast<__nv_bfloat16*>(task.y)[at] = __float2bfloat16_rn(v);
    }
  }

  // Neighbours (places n even and n + 1, whose columns are neighbours, too) exchange one value each, so that
  // each holds both columns of one row.
  static __device__ __forceinline__ void StorePair(const StreamTask& task, int row, int32_t place,
                                                   int32_t column, float first, float second) {
    const bool odd = Lane() / 4 % 2 != 0;
    const float received = __shfl_xor_sync(kAllLanes, odd ? first : second, 4);
    const float low = odd ? received : first, high = odd ? second : received;
    row += odd ? 1 : 0;
    place -= odd ? 1 : 0;
    column -= odd ? 1 : 0;
    if (row >= task.rows || place >= task.out_features) return;
    if (place + 1 >= task.out_features) return StoreOne(task, row, column, low);
    const int64_t at = row * task.y_stride + column;
    if (task.y_is_f32) {
      *reinterpret_cast<float2*>(static_cast<float*>(task.y) + at) = make_float2(low, high);
    } else {
      *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(task.y) + at) = PackBf16(low, high);
    }
  }
};

template <typename Shape, LinearResult kResult>
__device__ __forceinline__ void Consume(const StreamTask& task, int64_t units, uint32_t stages, uint32_t full,
                                        uint32_t empty) {
  const int block = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x) % 32;
  Ring<Shape::kStages> ring;
  Consumer<Shape> consumer;
  WaitForPreviousKernel();  // before the first access to the workspace and to y
  Piece piece(units, task.k_blocks);
  do {
    consumer.Multiply(piece.k_end - piece.k_begin, ring, stages, full, empty);
    if (piece.k_end != task.k_blocks) {  // a later block finishes the tile
      consumer.WritePartial(task);
      ptx::NamedBarrier(1, kConsumers);
      if (threadIdx.x == 0) ptx::StoreRelease(task.flags + block, 1);  // and what the others wrote
      continue;
    }
    // The block whose range holds the tile's first unit.
    const int64_t tile_start = int64_t{piece.tile} * task.k_blocks;
    const int first = static_cast<int>(((tile_start + 1) * gridDim.x - 1) / units);
    if (first < block) {
      for (int other = first + lane; other < block; other += 32) {
        for (uint32_t spins = 0; ptx::LoadAcquire(task.flags + other) == 0; ++spins) {
          if (spins > ptx::kSpinLimit) __trap();
        }
      }
      __syncwarp();
      consumer.AddPartials(task, first, block);
    }
    consumer.template StoreOutputs<kResult>(task, piece.tile);
    if (first < block) {
      ptx::NamedBarrier(1, kConsumers);  // all have seen the flags: clear them for the next launch
      for (int other = first + static_cast<int>(threadIdx.x); other < block; other += kConsumers) {
        task.flags[other] = 0;
      }
    }
  } while (piece.Next());
}

template <int kRows, LinearResult kResult>
__global__ void __launch_bounds__(kThreads, 1)
    LinearStreamKernel(const __grid_constant__ CUtensorMap x, const StreamTask task) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Shape = StreamShape<kRows>;
  extern __shared__ uint8_t shared[];
  const uint32_t stages = (ptx::SharedAddress(shared) + 1023u) & ~1023u;
  const uint32_t full = stages + Shape::kStages * Shape::kStageBytes, empty = full + 8 * Shape::kStages;
  const int64_t units = int64_t{task.tiles} * task.k_blocks;
  if (threadIdx.x == kConsumers) {
    ptx::PrefetchTensorMap(&x);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      ptx::BarrierInit(full + 8 * stage, 1);
      ptx::BarrierInit(empty + 8 * stage, kConsumerWarps);
    }
    ptx::BarrierInitFence();
  }
  __syncthreads();
  // In this order: with the consumers' branch first, nvcc 13.0 serializes the products (ptxas C7518).
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) Produce<Shape>(task, &x, units, stages, full, empty);
  } else {
    Consume<Shape, kResult>(task, units, stages, full, empty);
  }
#endif
}

// Ranges: one per multiprocessor; but where that leaves at most a tenth of them idle, equally many for each
// tile. The memory is no less busy, and a tile has fewer pieces, for which its last block would have to wait.
int64_t Blocks(const PackedWeight& weight, int multiprocessors) {
  const int64_t most = std::min<int64_t>(multiprocessors, weight.Tiles() * weight.KBlocks());
  const int64_t even = most / weight.Tiles() * weight.Tiles();
  return 10 * even >= 9 * most ? even : most;
}

template <int kRows>
cudaError_t LaunchRows(ConstMatrixView x, const PackedWeight& weight, MatrixView y,
                       const CudaContext& context, LinearResult result) {
  using Shape = StreamShape<kRows>;
  // One kernel for both would use more registers than there are.
  const auto kernel = result == LinearResult::kSwiGlu ? LinearStreamKernel<kRows, LinearResult::kSwiGlu>
                                                      : LinearStreamKernel<kRows, LinearResult::kSums>;
  const int64_t blocks = Blocks(weight, context.multiprocessors);
  if (blocks > kWorkspaceFlags ||
      blocks * kBlockOutputs * kRows * static_cast<int64_t>(sizeof(float)) > kWorkspaceBytes) {
    return cudaErrorNotSupported;
  }
  // Set at every call: it belongs to the device, and costs less than remembering where it has been set.
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (error != cudaSuccess) return error;
  CUtensorMap map;
  error = MakeRowsTensorMap(x, kRows, BoxLayout::kSwizzled, &map);
  if (error != cudaSuccess) return error;
  StreamTask task;
  task.weight = static_cast<const uint8_t*>(weight.data);
  task.y = y.data;
  task.y_stride = y.row_stride;
  task.partials = static_cast<float*>(context.workspace);
  task.flags = context.flags;
  task.rows = static_cast<int32_t>(x.rows);
  task.out_features = static_cast<int32_t>(weight.out_features);
  task.features = static_cast<int32_t>(weight.features);
  task.k_blocks = static_cast<int32_t>(weight.KBlocks());
  task.tiles = static_cast<int32_t>(weight.Tiles());
  task.last_tile_rows = static_cast<int32_t>(weight.LastTileRows());
  task.y_is_f32 = y.dtype == DType::kF32;
  task.y_in_pairs = reinterpret_cast<uintptr_t>(y.data) % (2 * SizeOf(y.dtype)) == 0 && y.row_stride % 2 == 0;
  const LaunchShape shape = {
      .grid = Grid(blocks), .block = dim3(kThreads), .shared_bytes = Shape::kSharedBytes};
  return Launch(context, shape, kernel, map, task);
}

// A kernel for every width: each row that is only padding costs arithmetic and a copy to shared memory.
struct Width {
  int64_t rows;
  cudaError_t (*launch)(ConstMatrixView, const PackedWeight&, MatrixView, const CudaContext&, LinearResult);
};
constexpr Width kWidths[] = {{8, LaunchRows<8>},
                             {16, LaunchRows<16>},
                             {32, LaunchRows<32>},
                             {48, LaunchRows<48>},
                             {64, LaunchRows<64>},
                             {80, LaunchRows<80>},
                             {96, LaunchRows<96>},
                             {112, LaunchRows<112>},
                             {128, LaunchRows<128>},
                             {160, LaunchRows<160>},
                             {192, LaunchRows<192>},
                             {224, LaunchRows<224>},
                             {kStreamRows, LaunchRows<kStreamRows>}};

}  // namespace

cudaError_t LaunchLinearStream(ConstMatrixView x, const PackedWeight& weight, MatrixView y,
                               const CudaContext& context, LinearResult result) {
  if (context.compute_capability != 90) return cudaErrorNotSupported;
  if (!IsLegalResult(weight, y, result)) return cudaErrorInvalidValue;
  for (int64_t row = 0; row < x.rows; row += kStreamRows) {
    const ConstMatrixView from = x.Rows(row, std::min(kStreamRows, x.rows - row));
    const MatrixView to = y.Rows(row, from.rows);
    const Width* width = kWidths;
    while (width->rows < from.rows) ++width;
    if (const cudaError_t error = width->launch(from, weight, to, context, result); error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace dflash
