// VERIFY rows: y[t, n] = sum_k x[t, k] W[n, k] for few rows t, with the weight streamed from memory once.
//
// The weight's rows are the matrix instruction's 64 (or 16) rows and x's rows its columns, so one row costs
// no more tensor time than eight. The unit of work is one packed block (256 outputs x 64 k, 32 KiB). The
// units, in the order of memory, are cut into one contiguous range per multiprocessor, so all finish
// together. A tile of 256 outputs that a cut divides is summed from its pieces in a fixed order.
//
//   grid      min(multiprocessors, units) blocks of 288 threads
//   warp 8    one thread copies blocks of W and tiles of x into a ring of stages
//   warps 0-7 two warpgroups multiply; each holds half of the 256 outputs
//   shared    stages x (W block + x tile), then a full and an empty barrier per stage
//
// What a row's bits depend on: N, K, the number of multiprocessors and the instruction. Not on the number of
// rows: kRows only widens the instruction's column dimension and never moves a cut.
//
// A block works from the end of its range to the start, tile by tile. Its first piece is then the one that
// the next block's tile needs, written long before anyone reads it, and a block waits only for blocks of
// lower index, which the hardware has started before it.
#include <cuda.h>
#include <cuda_bf16.h>

#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/ptx.cuh"
#include "kernels/device/cuda/tensor_map.h"
#include "kernels/device/cuda/wgmma.cuh"
#include "kernels/linear/linear_cuda.h"

namespace dflash {
namespace {

constexpr int kConsumerWarps = 8;
constexpr int kConsumers = 32 * kConsumerWarps;
constexpr int kThreads = kConsumers + 32;
constexpr int kRowBytes = kBlockK * 2;  // of a packed row

// Bytes that two blocks of different kernels may use on one multiprocessor together with each other
// (228 KiB, of which each block's own 1 KiB is the system's). While one kernel drains, the next has its first
// stages loaded. The lower bound keeps a third block away, which would make the ranges uneven.
constexpr int kSharedOfTwo = 113 * 1024;
constexpr int kSharedOfOne = 227 * 1024;
constexpr int kSharedAtLeast = 77 * 1024;

template <int kRows, bool kExclusive>
struct StreamShape {
  // 256 rows: the accumulators of 256 outputs would need the whole register file, so a piece is worked off in
  // two passes of 128 outputs each. W is still read once.
  static constexpr int kPasses = kRows > 128 ? 2 : 1;
  static constexpr int kOutputs = kBlockOutputs / kPasses;  // of a stage
  static constexpr int kWeightBytes = kOutputs * kRowBytes;
  static constexpr int kXBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kXBytes;
  static constexpr bool kSharesMultiprocessor = kRows <= 64 && !kExclusive;
  static constexpr int kStages =
      ((kSharesMultiprocessor ? kSharedOfTwo : kSharedOfOne) - 1024 - 256) / kStageBytes;
  static constexpr int kSharedBytes = std::max(1024 + kStages * (kStageBytes + 16), kSharedAtLeast);
  static_assert(kStages >= 2 && kStageBytes % 1024 == 0);
};

struct StreamTask {
  const uint8_t* weight;
  void* y;
  int64_t y_stride;
  float* partials;  // kBlockOutputs * kRows floats per block
  int32_t* flags;   // one per block: its partial is complete
  int32_t rows, out_features;
  int32_t k_blocks, tiles, last_tile_rows;
  int32_t prefetch_blocks;
  bool y_is_f32;
};

// The range of one block, walked tile by tile from its end. Producer and consumers walk alike.
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

// Where one pass over one k block finds its bytes; `rows` of the block exist.
struct Source {
  const uint8_t* weight;
  uint32_t bytes;
  int32_t column;  // of x
};

// A tile of at most 128 outputs has nothing in the second pass.
template <int kRows, bool kExclusive>
__device__ __forceinline__ int Passes(const StreamTask& task, int32_t tile) {
  using Shape = StreamShape<kRows, kExclusive>;
  return Shape::kPasses == 2 && !(tile == task.tiles - 1 && task.last_tile_rows <= Shape::kOutputs) ? 2 : 1;
}

// Walks the stages of a block: pieces, passes, k blocks.
template <int kRows, bool kExclusive>
struct StageWalk {
  using Shape = StreamShape<kRows, kExclusive>;
  Piece piece;
  int32_t pass = 0, k;
  bool more = true;

  __device__ __forceinline__ StageWalk(const StreamTask& task, int64_t units)
      : piece(units, task.k_blocks), k(piece.k_begin) {}

  __device__ __forceinline__ Source Get(const StreamTask& task) const {
    const int32_t tile_rows = piece.tile == task.tiles - 1 ? task.last_tile_rows : kBlockOutputs;
    const int64_t tile_start = int64_t{piece.tile} * kBlockOutputs * task.k_blocks;
    const int64_t row = tile_start + int64_t{k} * tile_rows + pass * Shape::kOutputs;
    const int32_t rows = min(tile_rows - pass * Shape::kOutputs, Shape::kOutputs);
    return {task.weight + row * kRowBytes, static_cast<uint32_t>(rows * kRowBytes), k * kBlockK};
  }
  __device__ __forceinline__ void Advance(const StreamTask& task) {
    if (++k < piece.k_end) return;
    if (++pass == Passes<kRows, kExclusive>(task, piece.tile)) {
      pass = 0;
      more = piece.Next();
    }
    k = piece.k_begin;
  }
};

template <int kRows, bool kExclusive>
__device__ __forceinline__ void Produce(const StreamTask& task, const CUtensorMap* x, int64_t units,
                                        uint32_t stages, uint32_t full, uint32_t empty) {
  using Shape = StreamShape<kRows, kExclusive>;
  const auto copy_weight = [&](const Source& source, int stage) {
    ptx::BarrierArriveExpecting(full + 8 * stage, source.bytes + Shape::kXBytes);
    ptx::CopyBulk(stages + stage * Shape::kStageBytes, source.weight, source.bytes, full + 8 * stage,
                  ptx::kEvictFirst);
  };
  const auto copy_x = [&](const Source& source, int stage) {
    ptx::CopyTile(stages + stage * Shape::kStageBytes + Shape::kWeightBytes, x, source.column, 0,
                  full + 8 * stage, ptx::kEvictLast);
  };
  // Weights do not depend on the kernel before, x does.
  StageWalk<kRows, kExclusive> weights(task, units);
  int filled = 0;
  for (; filled < Shape::kStages && weights.more; ++filled, weights.Advance(task)) {
    copy_weight(weights.Get(task), filled);
  }
  LetNextKernelStart();
  {
    StageWalk<kRows, kExclusive> ahead = weights;
    for (int i = 0; i < task.prefetch_blocks && ahead.more; ++i, ahead.Advance(task)) {
      const Source source = ahead.Get(task);
      ptx::PrefetchBulk(source.weight, source.bytes);
    }
  }
  WaitForPreviousKernel();
  StageWalk<kRows, kExclusive> tiles(task, units);
  for (int i = 0; i < filled; ++i, tiles.Advance(task)) copy_x(tiles.Get(task), i);
  Ring<Shape::kStages> ring;
  for (; weights.more; weights.Advance(task), ring.Advance()) {
    const Source source = weights.Get(task);
    ptx::BarrierWait(empty + 8 * ring.stage, ring.parity);
    copy_weight(source, ring.stage);
    copy_x(source, ring.stage);
  }
}

// The accumulators of one thread: d[i][4 j + e] is output Output(i) + lane / 4 + 8 (e / 2) of the pass, row
// 8 j + 2 (lane mod 4) + e mod 2 of x.
template <int kRows, MatrixUnit kUnit, bool kExclusive>
struct Consumer {
  using Shape = StreamShape<kRows, kExclusive>;
  static constexpr int kOutputsPerStep = kUnit == MatrixUnit::kWarpgroup ? 64 : 16;
  static constexpr int kGroups = kUnit == MatrixUnit::kWarpgroup ? 2 : kConsumerWarps;
  static constexpr int kSteps = Shape::kOutputs / kGroups / kOutputsPerStep;
  static constexpr int kFloats = kRows * kOutputsPerStep / (kUnit == MatrixUnit::kWarpgroup ? 128 : 32);

  float d[kSteps][kFloats];

  static __device__ __forceinline__ int Group() {
    return static_cast<int>(threadIdx.x) / (kConsumers / kGroups);
  }
  static __device__ __forceinline__ int FirstOutput() { return Group() * (Shape::kOutputs / kGroups); }
  static __device__ __forceinline__ int Output(int step) {
    const int warp_rows = kUnit == MatrixUnit::kWarpgroup ? static_cast<int>(threadIdx.x) / 32 % 4 * 16 : 0;
    return FirstOutput() + step * kOutputsPerStep + warp_rows;
  }

  static __device__ __forceinline__ void Release(uint32_t empty, int stage) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::BarrierArrive(empty + 8 * stage);
  }

  // Sums k blocks [0, count) of the ring into d.
  __device__ __forceinline__ void Multiply(int count, Ring<Shape::kStages>& ring, uint32_t stages,
                                           uint32_t full, uint32_t empty) {
    if constexpr (kUnit == MatrixUnit::kWarpgroup) {
      int busy = -1;  // the stage that the products before this block's still read
      for (int i = 0; i < count; ++i, ring.Advance()) {
        ptx::BarrierWait(full + 8 * ring.stage, ring.parity);
        const uint32_t weight = stages + ring.stage * Shape::kStageBytes;
        const uint64_t a = ptx::SwizzledOperand(weight + FirstOutput() * kRowBytes);
        const uint64_t b = ptx::SwizzledOperand(weight + Shape::kWeightBytes);
        ptx::WgmmaFence();
#pragma unroll
        for (int k = 0; k < kBlockK / 16; ++k) {  // 32 bytes, 2 units of the descriptor's address
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            ptx::Wgmma<kRows>::Run(d[step], a + 2 * k + step * (64 * kRowBytes / 16), b + 2 * k,
                                   i > 0 || k > 0);
          }
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
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int j = 0; j < kFloats; ++j) d[step][j] = 0;
      }
      // Lane l addresses row l mod 16 (W) or l mod 8 + 8 (l / 16) (x) and one 16-byte piece of it.
      const int lane = static_cast<int>(threadIdx.x) % 32, row = lane % 8;
      const uint32_t a_offset = (FirstOutput() + lane % 16) * kRowBytes;
      const uint32_t b_offset = (row + (kRows > 8 ? lane / 16 * 8 : 0)) * kRowBytes;
      const int a_piece = lane / 16, b_piece = lane / 8 % 2;
      for (int i = 0; i < count; ++i, ring.Advance()) {
        ptx::BarrierWait(full + 8 * ring.stage, ring.parity);
        const uint32_t a_base = stages + ring.stage * Shape::kStageBytes + a_offset;
        const uint32_t b_base = stages + ring.stage * Shape::kStageBytes + Shape::kWeightBytes + b_offset;
#pragma unroll
        for (int k = 0; k < kBlockK / 16; ++k) {
          uint32_t a[kSteps][4];
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            ptx::LoadMatrix4(a[step], a_base + step * (16 * kRowBytes) + ((2 * k + a_piece) ^ row) * 16);
          }
          const uint32_t b_address = b_base + ((2 * k + b_piece) ^ row) * 16;
          if constexpr (kRows == 8) {
            uint32_t b[2];
            ptx::LoadMatrix2(b, b_address);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) ptx::Mma16x8x16(&d[step][0], a[step], b[0], b[1]);
          } else {
#pragma unroll
            for (int pair = 0; pair < kRows / 16; ++pair) {
              uint32_t b[4];
              ptx::LoadMatrix4(b, b_address + pair * (16 * kRowBytes));
#pragma unroll
              for (int step = 0; step < kSteps; ++step) {
                ptx::Mma16x8x16(&d[step][8 * pair], a[step], b[0], b[1]);
                ptx::Mma16x8x16(&d[step][8 * pair + 4], a[step], b[2], b[3]);
              }
            }
          }
        }
        Release(empty, ring.stage);
      }
    }
  }

  // The slot of a block and pass: four floats of every thread, then the next four.
  static __device__ __forceinline__ float4* Slot(const StreamTask& task, int block, int pass) {
    constexpr int kFloatsPerPass = Shape::kOutputs * kRows;
    return reinterpret_cast<float4*>(task.partials) +
           (int64_t{block} * Shape::kPasses + pass) * (kFloatsPerPass / 4) + threadIdx.x;
  }

  __device__ __forceinline__ void WritePartial(const StreamTask& task, int pass) const {
    float4* slot = Slot(task, static_cast<int>(blockIdx.x), pass);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < kFloats / 4; ++j, slot += kConsumers) {
        const float* v = &d[step][4 * j];
        __stcg(slot, make_float4(v[0], v[1], v[2], v[3]));
      }
    }
  }

  // Adds the partials of blocks [first, this one) in ascending order of k.
  __device__ __forceinline__ void AddPartials(const StreamTask& task, int first, int pass) {
#pragma unroll 1
    for (int block = first; block < static_cast<int>(blockIdx.x); ++block) {
      const float4* slot = Slot(task, block, pass);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int j = 0; j < kFloats / 4; ++j, slot += kConsumers) {
          const float4 part = __ldcg(slot);
          float* v = &d[step][4 * j];
          v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
        }
      }
    }
  }

  __device__ __forceinline__ void StoreOutputs(const StreamTask& task, int32_t tile, int pass) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int n = tile * kBlockOutputs + pass * Shape::kOutputs + Output(0) + lane / 4;
    int row = lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kFloats / 4; ++j, row += 8) {
      if (row < task.rows) StoreRow<0>(task, row, n, j);
      if (row + 1 < task.rows) StoreRow<1>(task, row + 1, n, j);
    }
  }

  template <int e>
  __device__ __forceinline__ void StoreRow(const StreamTask& task, int row, int n, int j) const {
    const int64_t first = row * task.y_stride + n;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int offset = step * kOutputsPerStep + 8 * half;
        const float value = d[step][4 * j + 2 * half + e];
        if (n + offset >= task.out_features) continue;
        if (task.y_is_f32) {
          static_cast<float*>(task.y)[first + offset] = value;
        } else {
          static_cast<__nv_bfloat16*>(task.y)[first + offset] = __float2bfloat16_rn(value);
        }
      }
    }
  }
};

template <int kRows, MatrixUnit kUnit, bool kExclusive>
__device__ __forceinline__ void Consume(const StreamTask& task, int64_t units, uint32_t stages, uint32_t full,
                                        uint32_t empty) {
  const int block = static_cast<int>(blockIdx.x);
  Ring<StreamShape<kRows, kExclusive>::kStages> ring;
  Consumer<kRows, kUnit, kExclusive> consumer;
  WaitForPreviousKernel();  // before the first access to the workspace and to y
  Piece piece(units, task.k_blocks);
  do {
    const bool has_last = piece.k_end == task.k_blocks;  // this block finishes the tile
    const int64_t tile_start = int64_t{piece.tile} * task.k_blocks;
    // The block whose range holds the tile's first unit.
    const int first = static_cast<int>(((tile_start + 1) * gridDim.x - 1) / units);
    const int passes = Passes<kRows, kExclusive>(task, piece.tile);
    for (int pass = 0; pass < passes; ++pass) {
      consumer.Multiply(piece.k_end - piece.k_begin, ring, stages, full, empty);
      if (!has_last) {
        consumer.WritePartial(task, pass);
        continue;
      }
      if (first < block) {
        for (int other = first; pass == 0 && other < block; ++other) {
          for (uint32_t spins = 0; ptx::LoadAcquire(task.flags + other) == 0; ++spins) {
            if (spins > ptx::kSpinLimit) __trap();
          }
        }
        consumer.AddPartials(task, first, pass);
      }
      consumer.StoreOutputs(task, piece.tile, pass);
    }
    if (!has_last) {
      __threadfence();
      ptx::NamedBarrier(1, kConsumers);
      if (threadIdx.x == 0) ptx::StoreRelease(task.flags + block, 1);
    } else if (first < block) {
      ptx::NamedBarrier(1, kConsumers);  // all have seen the flags: clear them for the next launch
      for (int other = first + static_cast<int>(threadIdx.x); other < block; other += kConsumers) {
        task.flags[other] = 0;
      }
    }
  } while (piece.Next());
}

template <int kRows, MatrixUnit kUnit, bool kExclusive>
__global__ void __launch_bounds__(kThreads, StreamShape<kRows, kExclusive>::kSharesMultiprocessor ? 2 : 1)
    LinearStreamKernel(const __grid_constant__ CUtensorMap x, const StreamTask task) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Shape = StreamShape<kRows, kExclusive>;
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
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) Produce<kRows, kExclusive>(task, &x, units, stages, full, empty);
  } else {
    Consume<kRows, kUnit, kExclusive>(task, units, stages, full, empty);
  }
#endif
}

template <int kRows, MatrixUnit kUnit, bool kExclusive>
cudaError_t LaunchRows(ConstMatrixView x, const PackedWeight& weight, MatrixView y,
                       const CudaContext& context, int prefetch_blocks) {
  using Shape = StreamShape<kRows, kExclusive>;
  const auto kernel = LinearStreamKernel<kRows, kUnit, kExclusive>;
  const int64_t units = weight.Tiles() * weight.KBlocks();
  const int64_t blocks = std::min<int64_t>(context.multiprocessors, units);
  if (blocks > kWorkspaceFlags ||
      blocks * kBlockOutputs * kRows * static_cast<int64_t>(sizeof(float)) > kWorkspaceBytes) {
    return cudaErrorNotSupported;
  }
  // Set at every call: it belongs to the device, and costs less than remembering where it has been set.
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (error != cudaSuccess) return error;
  CUtensorMap map;
  error = MakeRowsTensorMap(x, kRows, &map);
  if (error != cudaSuccess) return error;
  StreamTask task;
  task.weight = static_cast<const uint8_t*>(weight.data);
  task.y = y.data;
  task.y_stride = y.row_stride;
  task.partials = static_cast<float*>(context.workspace);
  task.flags = context.flags;
  task.rows = static_cast<int32_t>(x.rows);
  task.out_features = static_cast<int32_t>(weight.out_features);
  task.k_blocks = static_cast<int32_t>(weight.KBlocks());
  task.tiles = static_cast<int32_t>(weight.Tiles());
  task.last_tile_rows = static_cast<int32_t>(weight.LastTileRows());
  task.y_is_f32 = y.dtype == DType::kF32;
  task.prefetch_blocks = prefetch_blocks;
  const LaunchShape shape = {
      .grid = Grid(blocks), .block = dim3(kThreads), .shared_bytes = Shape::kSharedBytes};
  return Launch(context, shape, kernel, map, task);
}

template <MatrixUnit kUnit, bool kExclusive>
cudaError_t LaunchUnit(ConstMatrixView x, const PackedWeight& weight, MatrixView y,
                       const CudaContext& context, int prefetch) {
  if (x.rows <= 8) return LaunchRows<8, kUnit, kExclusive>(x, weight, y, context, prefetch);
  if (x.rows <= 16) return LaunchRows<16, kUnit, kExclusive>(x, weight, y, context, prefetch);
  if (x.rows <= 32) return LaunchRows<32, kUnit, kExclusive>(x, weight, y, context, prefetch);
  if (x.rows <= 64) return LaunchRows<64, kUnit, kExclusive>(x, weight, y, context, prefetch);
  if (x.rows <= 128) return LaunchRows<128, kUnit, true>(x, weight, y, context, prefetch);
  return LaunchRows<256, kUnit, true>(x, weight, y, context, prefetch);
}

}  // namespace

cudaError_t LaunchLinearStream(ConstMatrixView x, const PackedWeight& weight, MatrixView y, MatrixUnit unit,
                               const CudaContext& context, const StreamTuning& tuning) {
  if (context.compute_capability < 90) return cudaErrorNotSupported;
  if (unit == MatrixUnit::kWarpgroup && context.compute_capability != 90) return cudaErrorNotSupported;
  for (int64_t row = 0; row < x.rows; row += kStreamRows) {
    const int64_t rows = std::min(kStreamRows, x.rows - row);
    const ConstMatrixView from = x.Rows(row, rows);
    const MatrixView to = y.Rows(row, rows);
    const int prefetch = tuning.prefetch_blocks;
    cudaError_t error;
    if (unit == MatrixUnit::kWarp) {
      error = LaunchUnit<MatrixUnit::kWarp, false>(from, weight, to, context, prefetch);
    } else if (tuning.exclusive) {
      error = LaunchUnit<MatrixUnit::kWarpgroup, true>(from, weight, to, context, prefetch);
    } else {
      error = LaunchUnit<MatrixUnit::kWarpgroup, false>(from, weight, to, context, prefetch);
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace dflash
