// One block per row: it puts its row of the product into this rank's area, tells the others, waits for
// theirs, and goes on as AddRmsNorm does, with the same elements in the same threads. N - 1 rows of 2 D bytes
// come over the link, about a microsecond each way; no block waits for another row.
#include <algorithm>

#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/device/cuda/vector.cuh"
#include "kernels/peer_sum/peer_area.h"
#include "kernels/peer_sum/peer_sum_backend.h"

namespace dflash::backend {
namespace {

constexpr int kMaxThreads = 1024;
constexpr uint32_t kLooks = 64;         // for a row, before the clock and the stop word get one
constexpr int64_t kWarpColumns = 1024;  // up to here AddRmsNorm sums in one warp

struct PeerSumTask {
  PeerAreas areas;
  Bf16Rows product, residual, y;
  Parameters weight;
  int64_t cols;
  float offset, eps;
  uint64_t timeout_ns;
  int32_t* late;
};

__device__ __forceinline__ uint32_t LoadAcquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void StoreRelease(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ __forceinline__ uint32_t* Counters(const PeerAreas& areas, int rank) {
  return reinterpret_cast<uint32_t*>(static_cast<char*>(areas.area[rank]) + kPeerCountersOffset);
}
__device__ __forceinline__ __nv_bfloat16* Place(const PeerAreas& areas, int rank, uint32_t count,
                                                int64_t row) {
  auto* rows =
      reinterpret_cast<__nv_bfloat16*>(static_cast<char*>(areas.area[rank]) + PeerRowsOffset(areas.max_rows));
  return rows + ((count & 1) * areas.max_rows + row) * areas.cols;
}

// As in AddRmsNorm: the same order in every thread.
__device__ __forceinline__ float BlockSum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  if (blockDim.x == 32) return value;
  __shared__ float of_warp[kMaxThreads / 32];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) value += of_warp[warp];
  return value;
}

// A peer's row is never cached here: it was written by another device.
template <bool kVectorized>
__device__ __forceinline__ void LoadPeer(const __nv_bfloat16* from, int count, float (&values)[kChunk]) {
  if constexpr (kVectorized) {
    Unpack(__ldcv(reinterpret_cast<const uint4*>(from)), values);
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      values[i] =
          i < count
              ? __uint_as_float(uint32_t{__ldcv(reinterpret_cast<const unsigned short*>(from + i))} << 16)
              : 0.0f;
    }
  }
}

// Grid (rows).
template <bool kVectorized>
__global__ void PeerSumKernel(const PeerSumTask task) {
  WaitForPreviousKernel();
  const PeerAreas& areas = task.areas;
  const int64_t row = blockIdx.x;
  const int64_t first_col = static_cast<int64_t>(threadIdx.x) * kChunk, step = int64_t{blockDim.x} * kChunk;
  const auto count_at = [&](int64_t col) {
    return static_cast<int>(max(min(task.cols - col, int64_t{kChunk}), int64_t{0}));
  };
  const uint32_t count = Counters(areas, areas.rank)[row] + 1;
  __nv_bfloat16* own = Place(areas, areas.rank, count, row);
  for (int64_t col = first_col; col < task.cols; col += step) {
    float values[kChunk];
    Load<kVectorized>(task.product.Row(row) + col, count_at(col), values);
    Store<kVectorized>(own + col, count_at(col), values);
  }
  __syncthreads();  // all of the row is written, and every thread has read the counter
  if (threadIdx.x == 0) {
    __threadfence_system();
    StoreRelease(Counters(areas, areas.rank) + row, count);
  }
  if (static_cast<int>(threadIdx.x) < areas.size) {
    const uint32_t* counter = Counters(areas, static_cast<int>(threadIdx.x)) + row;
    const auto* stop = static_cast<const uint32_t*>(areas.area[areas.rank]);
    const uint64_t start = Nanoseconds();
    for (uint32_t looks = 1; static_cast<int32_t>(LoadAcquire(counter) - count) < 0; ++looks) {
      if (looks % kLooks != 0) continue;
      if (LoadAcquire(stop) != 0) {
        *static_cast<volatile int32_t*>(task.late) = kPeerSumStopped;
        break;
      }
      if (Nanoseconds() - start > task.timeout_ns) {
        *static_cast<volatile int32_t*>(task.late) = 1 + static_cast<int32_t>(threadIdx.x);
        break;
      }
    }
  }
  __syncthreads();
  // Not earlier: blocks of the next kernel could take the place of those of a rank on the same device that is
  // waited for.
  LetNextKernelStart();

  __nv_bfloat16* residual = task.residual.Row(row);
  __nv_bfloat16* y = task.y.Row(row);
  const auto load = [&](int64_t col, int elements, float(&values)[kChunk]) {
    float sum[kChunk];
    LoadPeer<kVectorized>(Place(areas, 0, count, row) + col, elements, sum);
    for (int rank = 1; rank < areas.size; ++rank) {
      float term[kChunk];
      LoadPeer<kVectorized>(Place(areas, rank, count, row) + col, elements, term);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) sum[i] += term[i];
    }
    Load<kVectorized>(residual + col, elements, values);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) values[i] = Rounded(values[i] + Rounded(sum[i]));
    Store<kVectorized>(residual + col, elements, values);
  };
  float first[kChunk] = {};
  if (count_at(first_col) > 0) load(first_col, count_at(first_col), first);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) sum = fmaf(first[i], first[i], sum);
  for (int64_t col = first_col + step; col < task.cols; col += step) {
    float values[kChunk];
    load(col, count_at(col), values);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum = fmaf(values[i], values[i], sum);
  }
  const float scale = 1.0f / sqrtf(BlockSum(sum) / static_cast<float>(task.cols) + task.eps);
  const auto finish = [&](int64_t col, int elements, float(&values)[kChunk]) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float weight = kVectorized || i < elements ? task.weight.At(0, col + i) : 0.0f;
      values[i] = values[i] * scale * (task.offset + weight);
    }
    Store<kVectorized>(y + col, elements, values);
  };
  if (count_at(first_col) > 0) finish(first_col, count_at(first_col), first);
  for (int64_t col = first_col + step; col < task.cols; col += step) {
    float values[kChunk];
    Load<kVectorized>(residual + col, count_at(col), values);
    finish(col, count_at(col), values);
  }
}

}  // namespace

absl::Status PeerSumAddRmsNorm(const PeerAreas& areas, ConstMatrixView product, MatrixView residual,
                               ConstMatrixView w, NormWeight weight, float eps, MatrixView y,
                               absl::Duration timeout, int32_t* late, const Stream& stream) {
  PeerSumTask task = {};
  task.areas = areas;
  task.product = Bf16RowsOf(product);
  task.residual = Bf16RowsOf(residual);
  task.y = Bf16RowsOf(y);
  task.weight = ParametersOf(w);
  task.cols = product.cols;
  task.offset = weight == NormWeight::kOnePlus ? 1.0f : 0.0f;
  task.eps = eps;
  task.timeout_ns = static_cast<uint64_t>(std::max<int64_t>(0, absl::ToInt64Nanoseconds(timeout)));
  task.late = late;
  const bool vectorized =
      IsVectorized(product) && IsVectorized(residual) && IsVectorized(y) && product.cols % kChunk == 0;
  const int64_t threads =
      product.cols <= kWarpColumns
          ? 32
          : std::min<int64_t>(CeilDiv(CeilDiv(product.cols, kChunk), 32) * 32, kMaxThreads);
  const LaunchShape shape = {.grid = Grid(product.rows), .block = dim3(static_cast<unsigned>(threads))};
  return CudaStatus(
      Launch(CudaOf(stream), shape, vectorized ? PeerSumKernel<true> : PeerSumKernel<false>, task),
      "PeerSumAddRmsNorm");
}

}  // namespace dflash::backend
