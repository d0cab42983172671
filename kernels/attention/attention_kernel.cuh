// The attention kernel of one padded head_dim for every machine and alignment. Included by
// attention_cuda_{64,128,256}.cu.
//
//   grid      as many blocks as run at once; items come from a counter
//   block     8 warps = 2 groups of rows x 4 groups of columns. Of scores, a warp has 16 * kMTiles rows x 16
//             keys; of outputs, the same rows x kDim / 4 columns
//   shared    Q tile | 2 key blocks | 2 value blocks | weights | one float per row and column group
//   registers outputs of the current split
//
// Bytes: every key block that a tile sees is read once per tile (16 query rows of one sequence: once). Per
// key block of 64 x 256 and 96 rows: 64 KiB, 6.3 MFLOP.
#pragma once

#include <algorithm>

#include "kernels/attention/attention_merge.cuh"
#include "kernels/attention/attention_plan.cuh"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/ptx.cuh"
#include "kernels/device/cuda/shared_tile.cuh"

namespace dflash {
namespace {

constexpr int kAttentionThreads = 256;

template <int kDim, int kMTiles>
struct AttentionShape {
  static constexpr int kRows = 32 * kMTiles;
  static constexpr int kPieces = kDim / 8;  // of a row
  static constexpr int kQBytes = kRows * kDim * 2;
  static constexpr int kBlockBytes = kAttentionBlock * kDim * 2;
  static constexpr int kWeightBytes = kRows * kAttentionBlock * 2;
  static constexpr int kSharedBytes = kQBytes + 4 * kBlockBytes + kWeightBytes + 4 * kRows * 4;
  static constexpr int kBlocksPerMultiprocessor = kDim <= 128 ? 2 : 1;
  static constexpr int kColumns = kDim / 4;  // of outputs, per warp
};

// Starts copying a piece of a head's row; columns beyond head_dim become zeros.
__device__ __forceinline__ void LoadPiece(const __nv_bfloat16* head, int piece, int32_t head_dim,
                                          bool aligned, uint32_t to) {
  const int count = head_dim - piece * 8;
  if (aligned) {
    ptx::CopyAsync16(to, head + (count > 0 ? piece * 8 : 0), count > 0);
  } else {
    ptx::StoreShared16(to, GatherPiece(head + piece * 8, count));
  }
}

// Starts copying the keys (kind 0) or values (kind 1) of a block. Positions without a key become zeros.
template <int kDim>
__device__ __forceinline__ void LoadBlock(const AttentionTask& task, const Item& item, int32_t block,
                                          int32_t page, int kind, uint32_t to) {
  constexpr int kPieces = kDim / 8, kStep = kAttentionThreads / kPieces;
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
  const __nv_bfloat16* in_page =
      task.pool +
      ((int64_t{max(page, 0)} * task.kv_heads.value + item.kv_head) * 2 + kind) * (kAttentionBlock * kDim);
  const Bf16Rows& own = kind == 0 ? task.block_k : task.block_v;
  const int32_t start = item.segment.start_position, end = start + item.segment.row_count;
#pragma unroll
  for (int i = 0; i < kAttentionBlock / kStep; ++i) {
    const int row = static_cast<int>(threadIdx.x) / kPieces + i * kStep;
    const int32_t position = block * kAttentionBlock + row;
    const uint32_t target = to + PieceOffset(row, piece, kPieces);
    if (position < start || position >= end) {
      ptx::CopyAsync16(target, in_page + PagePiece(row, piece),
                       position < start && page >= 0 && position >= item.first_key);
      continue;
    }
    LoadPiece(own.Row(item.segment.first_row + (position - start)) + int64_t{item.kv_head} * task.head_dim,
              piece, task.head_dim, task.block_aligned, target);
  }
}

template <int kDim, int kMTiles>
__device__ __forceinline__ void LoadQueries(const AttentionTask& task, const Item& item, uint32_t to) {
  constexpr int kPieces = kDim / 8, kStep = kAttentionThreads / kPieces;
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
#pragma unroll
  for (int i = 0; i < AttentionShape<kDim, kMTiles>::kRows / kStep; ++i) {
    const int row = static_cast<int>(threadIdx.x) / kPieces + i * kStep;
    const uint32_t target = to + PieceOffset(row, piece, kPieces);
    if (row >= item.rows) {
      ptx::StoreShared16(target, make_uint4(0, 0, 0, 0));
      continue;
    }
    LoadPiece(task.q.Row(item.segment.first_row + item.Token(task, row)) +
                  int64_t{item.Head(task, row)} * task.head_dim,
              piece, task.head_dim, task.q_aligned, target);
  }
}

// What a warp holds of a tile. Element [m][n][e] is row Row(m, e / 2), column 8 n + 2 (lane mod 4) + e mod 2
// of the warp's columns.
template <int kDim, int kMTiles>
struct WarpTile {
  using Shape = AttentionShape<kDim, kMTiles>;
  float outputs[kMTiles][kDim / 32][4];
  float scores[kMTiles][2][4];
  float maximum[kMTiles][2];  // of scaled scores, in units of log2
  float sum[kMTiles][2];      // over this thread's keys alone until Finish

  static __device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __device__ __forceinline__ int RowGroup() { return static_cast<int>(threadIdx.x) / 128; }
  static __device__ __forceinline__ int ColumnGroup() { return static_cast<int>(threadIdx.x) / 32 % 4; }
  static __device__ __forceinline__ int FirstRow(int m) { return RowGroup() * (16 * kMTiles) + 16 * m; }
  static __device__ __forceinline__ int Row(int m, int half) { return FirstRow(m) + Lane() / 4 + 8 * half; }

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kDim / 32; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) outputs[m][n][e] = 0;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maximum[m][half] = -INFINITY;
        sum[m][half] = 0;
      }
    }
  }

  // Scores of the warp's 16 keys.
  __device__ __forceinline__ void Multiply(uint32_t queries, uint32_t keys) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[m][n][e] = 0;
      }
    }
    const int lane = Lane(), q_row = FirstRow(0) + lane % 16;
    const int key = ColumnGroup() * 16 + lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t b[4];
      ptx::LoadMatrix4(b, keys + PieceOffset(key, 2 * k + lane / 8 % 2, Shape::kPieces));
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        uint32_t a[4];
        ptx::LoadMatrix4(a, queries + PieceOffset(q_row + 16 * m, 2 * k + lane / 16, Shape::kPieces));
        ptx::Mma16x8x16(scores[m][0], a, b[0], b[1]);
        ptx::Mma16x8x16(scores[m][1], a, b[2], b[3]);
      }
    }
  }

  // Scores of keys that a row does not see become -infinity.
  __device__ __forceinline__ void Mask(const AttentionTask& task, const Item& item, int32_t block) {
    const int32_t first_key = block * kAttentionBlock + ColumnGroup() * 16 + Lane() % 4 * 2;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t position = item.Position(task, Row(m, half));
        const KeyRange keys = VisibleKeys(task, item.segment, item.context_start, position, position);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int32_t key = first_key + 8 * n + e;
            if (key < keys.first || key >= keys.end) scores[m][n][2 * half + e] = -INFINITY;
          }
        }
      }
    }
  }

  // Writes the maxima over the warp's keys to of_group[ColumnGroup()][row].
  __device__ __forceinline__ void WriteMaxima(float* of_group) const {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float best = fmaxf(fmaxf(scores[m][0][2 * half], scores[m][0][2 * half + 1]),
                           fmaxf(scores[m][1][2 * half], scores[m][1][2 * half + 1]));
        best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1));
        best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2));
        if (Lane() % 4 == 0) of_group[ColumnGroup() * Shape::kRows + Row(m, half)] = best;
      }
    }
  }

  // Turns scores into weights relative to the new maxima, writes them as bf16, and brings sums and outputs to
  // the new maxima. A row that sees nothing of the block keeps all its bits: factor 1, weights 0.
  __device__ __forceinline__ void WriteWeights(const float* of_group, float scale_log2, uint32_t weights) {
    const int lane = Lane(), piece = ColumnGroup() * 2;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      float factor[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = Row(m, half);
        const float best = fmaxf(fmaxf(of_group[row], of_group[Shape::kRows + row]),
                                 fmaxf(of_group[2 * Shape::kRows + row], of_group[3 * Shape::kRows + row]));
        const float before = maximum[m][half], now = fmaxf(before, best * scale_log2);
        const float reference = now == -INFINITY ? 0.0f : now;
        maximum[m][half] = now;
        factor[half] = ptx::Exp2(before - reference);
        float total = 0;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const uint32_t pair = PackBf16(ptx::Exp2(fmaf(scores[m][n][2 * half], scale_log2, -reference)),
                                         ptx::Exp2(fmaf(scores[m][n][2 * half + 1], scale_log2, -reference)));
          ptx::StoreShared4(weights + PieceOffset(row, piece + n, 8) + lane % 4 * 4, pair);
          // The sum is that of the rounded weights, so that they add up to 1.
          total += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xffff0000u);
        }
        sum[m][half] = fmaf(sum[m][half], factor[half], total);
      }
      if (__any_sync(0xffffffffu, factor[0] != 1 || factor[1] != 1)) {
#pragma unroll
        for (int n = 0; n < kDim / 32; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) outputs[m][n][e] *= factor[e / 2];
        }
      }
    }
  }

  // Adds the block's values to the outputs.
  __device__ __forceinline__ void Accumulate(uint32_t weights, uint32_t values) {
    const int lane = Lane(), row = FirstRow(0) + lane % 16;
    const int first_piece = ColumnGroup() * (Shape::kColumns / 8) + lane / 16;
#pragma unroll
    for (int k = 0; k < kAttentionBlock / 16; ++k) {
      uint32_t a[kMTiles][4];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        ptx::LoadMatrix4(a[m], weights + PieceOffset(row + 16 * m, 2 * k + lane / 16, 8));
      }
      const int key = 16 * k + lane % 16;
#pragma unroll
      for (int n = 0; n < Shape::kColumns / 16; ++n) {
        uint32_t b[4];
        ptx::LoadMatrix4Transposed(b, values + PieceOffset(key, first_piece + 2 * n, Shape::kPieces));
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          ptx::Mma16x8x16(outputs[m][2 * n], a[m], b[0], b[1]);
          ptx::Mma16x8x16(outputs[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // Sums over all keys. Called by all threads of the block.
  __device__ __forceinline__ void Finish(float* of_group) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = sum[m][half];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        if (Lane() % 4 == 0) of_group[ColumnGroup() * Shape::kRows + Row(m, half)] = total;
      }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* group = of_group + Row(m, half);
        sum[m][half] = (group[0] + group[Shape::kRows]) + (group[2 * Shape::kRows] + group[3 * Shape::kRows]);
      }
    }
  }

  // Calls f(outputs[0], outputs[1], row, column) for the pairs of neighbouring columns of the item's rows.
  template <typename F>
  __device__ __forceinline__ void ForPairs(int rows, const F& f) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = Row(m, half);
        if (row >= rows) continue;
#pragma unroll
        for (int n = 0; n < kDim / 32; ++n) {
          f(m, half, row, ColumnGroup() * Shape::kColumns + 8 * n + Lane() % 4 * 2, outputs[m][n][2 * half],
            outputs[m][n][2 * half + 1]);
        }
      }
    }
  }

  __device__ __forceinline__ void WritePartial(float* slot, int rows) {
    ForPairs(rows, [&](int, int, int row, int column, float first, float second) {
      *reinterpret_cast<float2*>(slot + SlotOutput<kDim>(row, column)) = make_float2(first, second);
    });
    if (ColumnGroup() != 0 || Lane() % 4 != 0) return;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        slot[SlotMaximum<kDim>(Shape::kRows, Row(m, half))] = maximum[m][half];
        slot[SlotSum<kDim>(Shape::kRows, Row(m, half))] = sum[m][half];
      }
    }
  }

  // The split is merged into what `slot` holds of the splits before it (nothing when `is_first`).
  __device__ __forceinline__ void MergeInto(float* slot, int rows, bool is_first,
                                            float (&total_maximum)[kMTiles][2],
                                            float (&total_sum)[kMTiles][2]) {
    MergeFactors factors[kMTiles][2];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (is_first) total_sum[m][half] = 0;
        factors[m][half] =
            MergeRow(total_maximum[m][half], total_sum[m][half], maximum[m][half], sum[m][half]);
        maximum[m][half] = total_maximum[m][half];
        sum[m][half] = total_sum[m][half];
      }
    }
    ForPairs(rows, [&](int m, int half, int row, int column, float& first, float& second) {
      auto* place = reinterpret_cast<float2*>(slot + SlotOutput<kDim>(row, column));
      const float2 before = is_first ? make_float2(0, 0) : *place;
      const MergeFactors& f = factors[m][half];
      first = fmaf(first, f.take, before.x * f.keep);
      second = fmaf(second, f.take, before.y * f.keep);
      *place = make_float2(first, second);
    });
  }

  __device__ __forceinline__ void WriteOutputs(const AttentionTask& task, const Item& item) {
    ForPairs(item.rows, [&](int m, int half, int row, int column, float first, float second) {
      WriteRow(task, item.segment.first_row + item.Token(task, row), item.Head(task, row), column,
               Normalized(first, sum[m][half]), Normalized(second, sum[m][half]));
    });
  }
};

template <int kDim, int kMTiles>
__device__ __forceinline__ void RunItem(const AttentionTask& task, const Item& item, float* slot,
                                        uint32_t shared, float* of_group) {
  using Shape = AttentionShape<kDim, kMTiles>;
  using Tile = WarpTile<kDim, kMTiles>;
  const uint32_t queries = shared, keys = queries + Shape::kQBytes, values = keys + 2 * Shape::kBlockBytes;
  const uint32_t weights = values + 2 * Shape::kBlockBytes;
  const bool works = Tile::FirstRow(0) < item.rows;  // the same for all threads of a warp
  Tile tile;
  tile.Clear();
  float total_maximum[kMTiles][2] = {}, total_sum[kMTiles][2] = {};
  bool is_first = true;

  // Keys and values of block b lie in buffer (b - first) mod 2. The groups of copies, in order: keys 0 (with
  // the queries), values 0, keys 1, values 1, ... Keys are asked for two blocks ahead, values one.
  const auto buffer = [&](int32_t block) { return ((block - item.first_block) & 1) * Shape::kBlockBytes; };
  const auto load = [&](int32_t block, int32_t page, int kind) {
    if (block < item.end_block) {
      LoadBlock<kDim>(task, item, block, page, kind, (kind == 0 ? keys : values) + buffer(block));
    }
    ptx::CopyAsyncCommit();
  };
  int32_t page = PageOf(task, item, item.first_block), next_page = PageOf(task, item, item.first_block + 1);
  if (item.first_block < item.end_block) LoadQueries<kDim, kMTiles>(task, item, queries);
  load(item.first_block, page, 0);
  load(item.first_block, page, 1);
  load(item.first_block + 1, next_page, 0);

  for (int32_t block = item.first_block; block < item.end_block; ++block) {
    ptx::CopyAsyncWait<2>();
    __syncthreads();  // the block's keys are here; nobody reads the values of the block before
    load(block + 1, next_page, 1);
    page = PageOf(task, item, block + 2);
    if (works) {
      tile.Multiply(queries, keys + buffer(block));
      if (!item.IsMaskFree(block)) tile.Mask(task, item, block);
      tile.WriteMaxima(of_group);
    }
    __syncthreads();  // maxima are written; nobody reads the block's keys
    load(block + 2, page, 0);
    next_page = page;
    if (works) tile.WriteWeights(of_group, task.scale_log2, weights);
    ptx::CopyAsyncWait<3>();
    __syncthreads();  // weights are written, the block's values are here
    if (works) tile.Accumulate(weights, values + buffer(block));

    const bool is_last = block + 1 == item.end_block;
    if (!is_last && task.schedule.SplitOf(block + 1) == task.schedule.SplitOf(block)) continue;
    tile.Finish(of_group);
    if (!item.is_final) break;  // an item of one split
    if (is_first && is_last) break;
    tile.MergeInto(slot, item.rows, is_first, total_maximum, total_sum);
    is_first = false;
    if (!is_last) tile.Clear();
  }
  if (item.is_final) {
    tile.WriteOutputs(task, item);
  } else {
    tile.WritePartial(slot, item.rows);
  }
}

template <int kDim, int kMTiles>
__global__ void __launch_bounds__(kAttentionThreads,
                                  (AttentionShape<kDim, kMTiles>::kBlocksPerMultiprocessor))
    AttentionKernel(const AttentionTask task) {
  using Shape = AttentionShape<kDim, kMTiles>;
  extern __shared__ uint4 shared_memory[];
  __shared__ ItemTable table;
  __shared__ int32_t next_item;
  const uint32_t shared = ptx::SharedAddress(shared_memory);
  auto* of_group = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(shared_memory) + Shape::kSharedBytes -
                                            4 * Shape::kRows * 4);
  WaitForPreviousKernel();
  LetNextKernelStart();  // after the wait: the merge relies on it
  if (threadIdx.x < 32) BuildItemTable(task, table);
  __syncthreads();
  const bool is_split = IsSplit(task, table);
  const int32_t items = is_split ? table.of_splits[task.segment_count] : table.of_tiles[task.segment_count];
  for (auto index = static_cast<int32_t>(blockIdx.x); index < items;) {
    int32_t next = 0;
    if (threadIdx.x == 0) next = static_cast<int32_t>(gridDim.x) + atomicAdd(task.counters, 1);
    const Item item = ItemAt(task, table, is_split, index);
    const int64_t slot = is_split ? item.slot : static_cast<int64_t>(blockIdx.x);
    RunItem<kDim, kMTiles>(task, item, task.workspace + slot * SlotFloats<kDim>(Shape::kRows), shared,
                           of_group);
    if (threadIdx.x == 0) next_item = next;
    __syncthreads();  // nobody reads the item's shared memory; the next one is known
    index = next_item;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(task.counters + 1, 1) == static_cast<int32_t>(gridDim.x) - 1) {
      task.counters[0] = 0;
      task.counters[1] = 0;
    }
  }
}

template <int kDim, int kMTiles>
constexpr bool TilesFit(int64_t shared_bytes) {
  // The kernel's static variables beside it.
  constexpr int64_t kStatic = static_cast<int64_t>(sizeof(ItemTable)) + 16;
  return AttentionShape<kDim, kMTiles>::kSharedBytes + kStatic <= shared_bytes;
}
template <int kDim>
constexpr int TilesThatFit(int64_t shared_bytes) {
  if (TilesFit<kDim, 3>(shared_bytes)) return 3;
  return TilesFit<kDim, 2>(shared_bytes) ? 2 : TilesFit<kDim, 1>(shared_bytes) ? 1 : 0;
}
// An H100 has 227 KiB for a block, an A100 163, other parts of its generation 99.
static_assert(TilesThatFit<256>(227 * 1024) == 3 && TilesThatFit<256>(163 * 1024) == 1 &&
              TilesThatFit<256>(99 * 1024) == 0);
static_assert(TilesThatFit<128>(163 * 1024) == 3 && TilesThatFit<64>(99 * 1024) == 3);

template <int kDim, int kMTiles>
cudaError_t LaunchTiles(AttentionTask task, int64_t items, int64_t rows, const CudaContext& context) {
  using Shape = AttentionShape<kDim, kMTiles>;
  const auto kernel = AttentionKernel<kDim, kMTiles>;
  const int64_t blocks =
      std::min<int64_t>(items, int64_t{context.multiprocessors} * Shape::kBlocksPerMultiprocessor);
  const int64_t slots =
      kWorkspaceBytes / (SlotFloats<kDim>(Shape::kRows) * static_cast<int64_t>(sizeof(float)));
  if (slots < blocks) return cudaErrorNotSupported;
  task.slots = static_cast<int32_t>(slots);
  // Set at every call: it belongs to the device, and costs less than remembering where it has been set.
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (error != cudaSuccess) return error;
  const LaunchShape shape = {
      .grid = Grid(blocks), .block = dim3(kAttentionThreads), .shared_bytes = Shape::kSharedBytes};
  error = Launch(context, shape, kernel, task);
  if (error != cudaSuccess || !task.may_split) return error;
  return LaunchMerge<kDim>(task, rows, context);
}

}  // namespace

template <int kDim>
int AttentionTilesThatFit(int64_t shared_bytes) {
  return TilesThatFit<kDim>(shared_bytes);
}

template <int kDim>
cudaError_t LaunchAttention(AttentionTask task, int m_tiles, int64_t items, int64_t rows,
                            const CudaContext& context) {
  switch (m_tiles) {
    case 1:
      return LaunchTiles<kDim, 1>(task, items, rows, context);
    case 2:
      return LaunchTiles<kDim, 2>(task, items, rows, context);
    default:
      return LaunchTiles<kDim, 3>(task, items, rows, context);
  }
}

}  // namespace dflash
