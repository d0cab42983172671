#include "kernels/attention/attention_cuda.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/attention/attention_backend.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/segment_of_row.cuh"
#include "kernels/device/cuda/stream_cuda.h"

namespace dflash {

static_assert(kAttentionBlock == kPageTokens);

int64_t KeyValuePool::PageBytes() const {
  return kPageTokens * kv_heads * PaddedHeadDim(head_dim) * 2 * SizeOf(DType::kBf16);
}

namespace backend {
namespace {

constexpr int kThreads = 256;

// Keys and values of a layer's pages, and rows beside them.
struct PageTask {
  __nv_bfloat16* pool;
  int64_t page_count, kv_heads, head_dim, padded_dim;
  const int32_t* pages;
  int64_t pages_per_slot;
  Bf16Rows k, v;
  bool is_vectorized;
};

PageTask TaskOf(ConstMatrixView k, ConstMatrixView v, PageTable table, const KeyValuePool& pool) {
  return {.pool = static_cast<__nv_bfloat16*>(pool.data),
          .page_count = pool.page_count,
          .kv_heads = pool.kv_heads,
          .head_dim = pool.head_dim,
          .padded_dim = PaddedHeadDim(pool.head_dim),
          .pages = table.pages,
          .pages_per_slot = table.pages_per_slot,
          .k = Bf16RowsOf(k),
          .v = Bf16RowsOf(v),
          .is_vectorized = IsVectorized(k) && IsVectorized(v) && pool.head_dim % kChunk == 0};
}

// Copies one token between row `row` and its page, in words. Into the page goes the padding too.
template <typename Word, bool kToPage>
__device__ __forceinline__ void CopyWords(const PageTask& task, int64_t page, int64_t token, int64_t row) {
  constexpr int64_t kPerWord = sizeof(Word) / sizeof(__nv_bfloat16);
  const int64_t words = task.padded_dim / kPerWord;  // of a head
  for (int64_t i = threadIdx.x; i < 2 * task.kv_heads * words; i += kThreads) {
    const int64_t d = i % words * kPerWord, kind = i / words % 2, head = i / words / 2;
    const bool exists = d < task.head_dim;
    auto* in_row = reinterpret_cast<Word*>((kind == 0 ? task.k : task.v).Row(row) + head * task.head_dim + d);
    auto* in_page = reinterpret_cast<Word*>(
        task.pool + ((page * task.kv_heads + head) * 2 + kind) * kPageTokens * task.padded_dim +
        PagePiece(token, d / 8) + d % 8);
    if constexpr (kToPage) {
      *in_page = exists ? *in_row : Word{};
    } else if (exists) {
      *in_row = *in_page;
    }
  }
}

template <bool kToPage>
__device__ __forceinline__ void CopyToken(const PageTask& task, int64_t slot, int64_t position, int64_t row) {
  const int64_t index = position / kPageTokens;
  if (index >= task.pages_per_slot) return;
  const int64_t page = task.pages[slot * task.pages_per_slot + index];
  if (page < 0 || page >= task.page_count) return;
  if (task.is_vectorized) {
    CopyWords<uint4, kToPage>(task, page, position % kPageTokens, row);
  } else {
    CopyWords<uint16_t, kToPage>(task, page, position % kPageTokens, row);
  }
}

constexpr int kLayersTogether = 16;
struct StoreTasks {
  PageTask layers[kLayersTogether];
};

// Block (row, layer).
__global__ void StoreKernel(const StoreTasks tasks, const Segment* segments, int64_t segment_count,
                            const int32_t* row_counts) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int32_t index = SegmentOfRow(segments, segment_count, blockIdx.x);
  if (index < 0) return;
  const Segment segment = segments[index];
  const int32_t token = static_cast<int32_t>(blockIdx.x) - segment.first_row;
  if (row_counts != nullptr && token >= row_counts[index]) return;
  CopyToken<true>(tasks.layers[blockIdx.y], segment.slot, int64_t{segment.start_position} + token,
                  blockIdx.x);
}

// Block = position.
__global__ void LoadKernel(const PageTask task, int64_t slot, int64_t first_position) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  CopyToken<false>(task, slot, first_position + blockIdx.x, blockIdx.x);
}

// Whether every head of every row begins at a multiple of so many elements.
bool HeadsAligned(ConstMatrixView view, int64_t head_dim, int64_t elements) {
  return reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(2 * elements) == 0 &&
         view.row_stride % elements == 0 && head_dim % elements == 0;
}

// Positions stay far inside int32, sums with a window too.
constexpr int64_t kMaxPositions = int64_t{1} << 30;
constexpr int64_t kMaxPackedRows = int64_t{1} << 30;

}  // namespace

absl::Status StoreKeyValue(ConstMatrixView k, ConstMatrixView v, SegmentList segments,
                           const int32_t* row_counts, PageTable table, const KeyValuePool& pool,
                           const Stream& stream) {
  return backend::StoreKeyValues({{k, v, pool}}, segments, row_counts, table, stream);
}

absl::Status StoreKeyValues(const std::vector<KeyValueRows>& layers, SegmentList segments,
                            const int32_t* row_counts, PageTable table, const Stream& stream) {
  if (layers.empty() || layers[0].k.rows == 0 || segments.count == 0) return absl::OkStatus();
  for (size_t first = 0; first < layers.size(); first += kLayersTogether) {
    const size_t count = std::min<size_t>(layers.size() - first, kLayersTogether);
    StoreTasks tasks = {};
    for (size_t i = 0; i < count; ++i) {
      const KeyValueRows& layer = layers[first + i];
      tasks.layers[i] = TaskOf(layer.k, layer.v, table, layer.pool);
    }
    const LaunchShape shape = {.grid = Grid(layers[0].k.rows, static_cast<int64_t>(count)),
                               .block = dim3(kThreads)};
    DFLASH_RETURN_IF_ERROR(CudaStatus(
        Launch(CudaOf(stream), shape, StoreKernel, tasks, segments.data, segments.count, row_counts),
        "StoreKeyValues"));
  }
  return absl::OkStatus();
}

absl::Status LoadKeyValue(const KeyValuePool& pool, PageTable table, int64_t slot, int64_t first_position,
                          MatrixView k, MatrixView v, const Stream& stream) {
  if (k.rows == 0) return absl::OkStatus();
  const LaunchShape shape = {.grid = Grid(k.rows), .block = dim3(kThreads)};
  return CudaStatus(
      Launch(CudaOf(stream), shape, LoadKernel, TaskOf(k, v, table, pool), slot, first_position),
      "LoadKeyValue");
}

absl::StatusOr<bool> Attention(ConstMatrixView q, ConstMatrixView block_k, ConstMatrixView block_v,
                               SegmentList segments, const int32_t* context_starts, PageTable table,
                               const KeyValuePool& pool, const AttentionMask& mask, float scale, Phase phase,
                               MatrixView out, const Stream& stream, ContextWritten written,
                               ConstMatrixView gate) {
  const int64_t group = q.cols / (pool.kv_heads * pool.head_dim), rows = q.rows;
  if (pool.head_dim > kMaxHeadDim || rows * group > kMaxPackedRows) {
    return absl::UnimplementedError(absl::StrCat("Attention on CUDA: head_dim ", pool.head_dim, ", ", rows,
                                                 " rows with ", group, " query heads a KV head; at most ",
                                                 kMaxHeadDim, " and ", kMaxPackedRows, " of both are there"));
  }
  if (segments.count > kMaxAttentionSegments || table.pages_per_slot > kMaxPositions / kPageTokens ||
      rows > kMaxPositions) {
    return absl::UnimplementedError(
        absl::StrCat("Attention on CUDA: ", segments.count, " segments, ", rows, " rows, ",
                     table.pages_per_slot, " pages a slot; at most ", kMaxAttentionSegments, " segments, ",
                     kMaxPositions, " rows and ", kMaxPositions / kPageTokens, " pages are there"));
  }
  if (rows == 0 || segments.count == 0) return true;
  const CudaContext& context = CudaOf(stream);
  AttentionTask task = {};
  task.q = Bf16RowsOf(q);
  task.block_k = Bf16RowsOf(block_k);
  task.block_v = Bf16RowsOf(block_v);
  task.out = Bf16RowsOf(out);
  task.q_aligned = HeadsAligned(q, pool.head_dim, kChunk);
  task.block_aligned =
      HeadsAligned(block_k, pool.head_dim, kChunk) && HeadsAligned(block_v, pool.head_dim, kChunk);
  task.out_aligned = HeadsAligned(out, pool.head_dim, 2);
  if (gate.data != nullptr) {
    task.gate = Bf16RowsOf(gate);
    task.gate_aligned = HeadsAligned(gate, pool.head_dim, 2);
  }
  task.pool = static_cast<const __nv_bfloat16*>(pool.data);
  task.page_count = static_cast<int32_t>(pool.page_count);
  task.kv_heads = Divisor(pool.kv_heads);
  task.group = Divisor(group);
  task.head_dim = static_cast<int32_t>(pool.head_dim);
  task.segments = segments.data;
  task.segment_count = static_cast<int32_t>(segments.count);
  task.context_starts = context_starts;
  task.pages = table.pages;
  task.pages_per_slot = static_cast<int32_t>(table.pages_per_slot);
  task.causal = mask.causal;
  task.window = mask.window > kMaxPositions ? 0 : static_cast<int32_t>(mask.window);
  task.schedule.kind = phase == Phase::kPrefill ? SplitKind::kPrefill
                       : task.window > 0        ? SplitKind::kWindowed
                                                : SplitKind::kVerify;
  task.scale_log2 = scale * 1.44269504088896341f;
  task.context_settled = written == ContextWritten::kBeforeLastNormAndRope;
  task.workspace = static_cast<float*>(context.workspace);
  task.counters = context.flags;

  const int64_t padded_dim = PaddedHeadDim(pool.head_dim);
  const bool wgmma = context.compute_capability == 90 && padded_dim == pool.head_dim && padded_dim >= 128 &&
                     group <= kMaxWgmmaRows && task.q_aligned && task.block_aligned && task.out_aligned &&
                     reinterpret_cast<uintptr_t>(pool.data) % 16 == 0;
  // Tiles that hold an average segment, if possible; else several equal ones.
  const int64_t average = CeilDiv(rows, segments.count);
  int64_t tile_tokens = 0, tile_rows = 0;
  if (wgmma) {
    tile_tokens = CeilDiv(average, CeilDiv(average, kMaxWgmmaRows / group));
    tile_rows = tile_tokens * group;
  } else {
    int shared_bytes = 0;
    DFLASH_RETURN_IF_ERROR(CudaStatus(
        cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, context.device),
        "cudaDeviceGetAttribute"));
    const auto tiles_that_fit = padded_dim == 64    ? AttentionTilesThatFit<64>
                                : padded_dim == 128 ? AttentionTilesThatFit<128>
                                                    : AttentionTilesThatFit<256>;
    const int64_t most_rows = 32 * tiles_that_fit(shared_bytes);
    if (most_rows == 0) {
      return absl::UnimplementedError(absl::StrCat("Attention on CUDA: head_dim ", pool.head_dim,
                                                   " on a GPU with ", shared_bytes,
                                                   " bytes of shared memory a block"));
    }
    tile_rows = std::min<int64_t>(CeilDiv(average * group, 32) * 32, most_rows);
  }
  task.tile_rows = Divisor(tile_rows);
  const bool may_halve = wgmma && tile_rows > kMaxWgmmaRows / 2 && tile_tokens > 1;
  task.half_rows = Divisor(may_halve ? CeilDiv(tile_tokens, 2) * group : 0);
  task.multiprocessors = context.multiprocessors;
  // Splits are spread over the machine unless tiles fill it.
  const int64_t tiles = (CeilDiv(rows * group, tile_rows) + segments.count - 1) * pool.kv_heads;
  task.may_split = CeilDiv(rows * group, tile_rows) * pool.kv_heads < context.multiprocessors;
  const int64_t splits =
      task.may_split
          ? task.schedule.SplitOf(static_cast<int32_t>(table.pages_per_slot + CeilDiv(rows, kPageTokens))) + 1
          : 1;
  const int64_t items = tiles * splits * (may_halve ? 2 : 1);
  if (wgmma) {
    const auto launch = padded_dim == 128 ? LaunchWgmmaAttention<128> : LaunchWgmmaAttention<256>;
    DFLASH_RETURN_IF_ERROR(CudaStatus(
        launch(task, static_cast<int32_t>(tile_tokens), items, q, block_k, block_v, context), "Attention"));
    return task.may_split;  // then there was a merge
  }
  const auto launch = padded_dim == 64    ? LaunchAttention<64>
                      : padded_dim == 128 ? LaunchAttention<128>
                                          : LaunchAttention<256>;
  DFLASH_RETURN_IF_ERROR(
      CudaStatus(launch(task, static_cast<int>(tile_rows / 32), items, rows, context), "Attention"));
  return task.may_split;
}

}  // namespace backend
}  // namespace dflash
