#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/device/cuda/vector.cuh"
#include "kernels/embedding/embedding_backend.h"

namespace dflash::backend {
namespace {

constexpr int kThreads = 256;

// Block (row, 256 chunks of columns). The table has ids [first_id, first_id + table_rows); others give zeros.
template <bool kVectorized>
__global__ void EmbedRowsKernel(const int32_t* ids, Parameters table, int64_t first_id, int64_t table_rows,
                                Bf16Rows y, int64_t cols) {
  LetNextKernelStart();
  const int64_t col = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kChunk;
  if (col >= cols) return;
  const int count = static_cast<int>(min(cols - col, int64_t{kChunk}));
  WaitForPreviousKernel();
  const int64_t row = ids[blockIdx.x] - first_id;
  float values[kChunk] = {};
  if (row < 0 || row >= table_rows) {
    // zeros
  } else if (table.is_bf16) {
    Load<kVectorized>(static_cast<const __nv_bfloat16*>(table.data) + row * table.stride + col, count,
                      values);
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) values[i] = i < count ? table.At(row, col + i) : 0.0f;
  }
  Store<kVectorized>(y.Row(blockIdx.x) + col, count, values);
}

}  // namespace

absl::Status EmbedOwnRows(const int32_t* ids, ConstMatrixView table, int64_t first_id, MatrixView y,
                          const Stream& stream) {
  const LaunchShape shape = {.grid = Grid(y.rows, CeilDiv(y.cols, kThreads * kChunk)),
                             .block = dim3(kThreads)};
  if (y.cols == 0) return absl::OkStatus();
  const auto kernel = IsVectorized(table) && IsVectorized(y) ? EmbedRowsKernel<true> : EmbedRowsKernel<false>;
  return CudaStatus(Launch(CudaOf(stream), shape, kernel, ids, ParametersOf(table), first_id, table.rows,
                           Bf16RowsOf(y), y.cols),
                    "EmbedRows");
}

absl::Status EmbedRows(const int32_t* ids, ConstMatrixView table, MatrixView y, const Stream& stream) {
  return EmbedOwnRows(ids, table, /*first_id=*/0, y, stream);
}

}  // namespace dflash::backend
