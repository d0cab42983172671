// One block per row: it writes its row of the product to where it is summed, waits there for the others', and
// goes on as AddRmsNorm does, with the same elements in the same threads.
//   one step   every rank gets all rows of the others and sums them: N - 1 rows of 2 D bytes out and in.
//   two steps  row r is summed by rank r mod N, which sends the sum to the others: two ways instead of one,
//   but
//              2 (N - 1) / N rows out and in. For many ranks and rows.
// Both round the sum once and add in the order of ranks, so they have the same bits.
#include <algorithm>

#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/peer_sum/peer_area_cuda.cuh"
#include "kernels/peer_sum/peer_sum_backend.h"

namespace dflash::backend {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kUsualThreads = 640;      // up to 5,120 columns: more registers a thread
constexpr int64_t kWarpColumns = 1024;  // up to here AddRmsNorm sums in one warp

struct PeerSumTask {
  PeerAreas areas;
  PeerWait wait;
  Bf16Rows product, residual, y;
  Parameters weight;
  int64_t cols;
  float offset, eps;
  bool in_two_steps;
};

// As in AddRmsNorm: the same order in every thread. A barrier of the block.
__device__ __forceinline__ float BlockSum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  __shared__ float of_warp[kMaxThreads / 32];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  if (blockDim.x == 32) return value;
  value = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) value += of_warp[warp];
  return value;
}

// A NaN of all ones becomes another one: it means that nothing has come.
__device__ __forceinline__ uint32_t WithoutNothing(uint32_t two) {
  return two & ~(__vcmpeq2(two, kNothing) & 0x80008000u);
}
__device__ __forceinline__ bool HasCome(uint32_t two) { return __vcmpeq2(two, kNothing) == 0; }
__device__ __forceinline__ bool HasCome(const uint4& v) {
  return HasCome(v.x) && HasCome(v.y) && HasCome(v.z) && HasCome(v.w);
}

__device__ __forceinline__ uint4 Joined(const uint16_t (&parts)[kChunk]) {
  const auto pair = [&](int i) { return uint32_t{parts[i]} | uint32_t{parts[i + 1]} << 16; };
  return make_uint4(pair(0), pair(2), pair(4), pair(6));
}
// Eight elements of a row as they travel; `count` of them exist.
template <bool kVectorized>
__device__ __forceinline__ uint4 LoadChunk(const __nv_bfloat16* from, int count) {
  if constexpr (kVectorized) {
    return *reinterpret_cast<const uint4*>(from);
  } else {
    uint16_t parts[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) parts[i] = i < count ? __bfloat16_as_ushort(from[i]) : uint16_t{0};
    return Joined(parts);
  }
}
template <bool kVectorized>
__device__ __forceinline__ void SendChunk(__nv_bfloat16* to, int count, const uint4& chunk) {
  if constexpr (kVectorized) {
    StoreSystem(reinterpret_cast<uint4*>(to), chunk);
  } else {
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i < count) {
        StoreSystem(reinterpret_cast<uint16_t*>(to) + i,
                    static_cast<uint16_t>(i % 2 == 0 ? words[i / 2] & 0xffffu : words[i / 2] >> 16));
      }
    }
  }
}
// What lies there now: kNothing where an element has not come.
template <bool kVectorized>
__device__ __forceinline__ uint4 PeekChunk(const __nv_bfloat16* from, int count) {
  if constexpr (kVectorized) {
    return LoadSystem(reinterpret_cast<const uint4*>(from));
  } else {
    uint16_t parts[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      parts[i] = i < count ? LoadSystem(reinterpret_cast<const uint16_t*>(from) + i) : uint16_t{0};
    return Joined(parts);
  }
}
__device__ __forceinline__ uint4 Packed(const float (&values)[kChunk]) {
  return make_uint4(PackBf16(values[0], values[1]), PackBf16(values[2], values[3]),
                    PackBf16(values[4], values[5]), PackBf16(values[6], values[7]));
}

// Grid (rows). kPeers, kThreads: most of them.
template <bool kVectorized, bool kNorm, int kPeers, int kThreads>
__global__ void __launch_bounds__(kThreads, kPeers == 2 ? 2 : 1)
    PeerSumKernel(const __grid_constant__ PeerSumTask task) {
  const PeerAreas& areas = task.areas;
  const int rank = areas.rank, size = areas.size;
  const int64_t row = blockIdx.x;
  const int64_t first_col = static_cast<int64_t>(threadIdx.x) * kChunk, step = int64_t{blockDim.x} * kChunk;
  const auto count_at = [&](int64_t col) {
    return static_cast<int>(max(min(task.cols - col, int64_t{kChunk}), int64_t{0}));
  };
  // Weights are constants: the first chunk's are here before the rows are.
  float first_weights[kChunk];
  if constexpr (kNorm) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      first_weights[i] = first_col + i < task.cols ? task.weight.At(0, first_col + i) : 0.0f;
  }
  // The next kernel fetches weights while rows travel. Not where a rank that is waited for runs on this
  // device: blocks of the next kernel could take the place of its blocks.
  if (!areas.shares_device) LetNextKernelStart();
  WaitForPreviousKernel();
  uint32_t* counter = At<uint32_t>(areas, rank, kRowCountersOffset) + row;
  const uint32_t count = *counter;
  // In the area of rank `at`, what rank `from` sends.
  const auto place = [&](int at, int from, int64_t col) {
    return At<__nv_bfloat16>(areas, at, PeerRowsOffset(size)) +
           (((count & 1) * size + from) * areas.max_rows + row) * task.cols + col;
  };
  const int owner = static_cast<int>(row % size);
  const bool sums_here = !task.in_two_steps || owner == rank;
  const auto own_chunk = [&](int64_t col) {
    uint4 chunk = LoadChunk<kVectorized>(task.product.Row(row) + col, count_at(col));
    return make_uint4(WithoutNothing(chunk.x), WithoutNothing(chunk.y), WithoutNothing(chunk.z),
                      WithoutNothing(chunk.w));
  };
  const auto send = [&](int64_t col, const uint4& chunk) {
    if (task.in_two_steps) {
      if (!sums_here) SendChunk<kVectorized>(place(owner, rank, col), count_at(col), chunk);
      return;
    }
#pragma unroll
    for (int peer = 0; peer < kPeers; ++peer) {
      if (peer < size && peer != rank) SendChunk<kVectorized>(place(peer, rank, col), count_at(col), chunk);
    }
  };
  const auto send_sum = [&](int64_t col, const uint4& chunk) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) SendChunk<kVectorized>(place(peer, rank, col), count_at(col), chunk);
    }
  };

  uint4 first_chunk = make_uint4(0, 0, 0, 0);
  if (count_at(first_col) > 0) {
    first_chunk = own_chunk(first_col);
    send(first_col, first_chunk);
  }
  for (int64_t col = first_col + step; col < task.cols; col += step) send(col, own_chunk(col));

  // Waits for what rank `peer` sends and makes the place free again; `chunk` is what was there at first
  // sight.
  const auto receive = [&](int64_t col, int peer, uint4 chunk) {
    const __nv_bfloat16* at = place(rank, peer, col);
    AwaitPeer(task.wait, peer, [&] {
      if (HasCome(chunk)) return true;
      chunk = PeekChunk<kVectorized>(at, count_at(col));
      return HasCome(chunk);
    });
    SendChunk<kVectorized>(place(rank, peer, col), count_at(col),
                           make_uint4(kNothing, kNothing, kNothing, kNothing));
    return chunk;
  };
  // The rounded sum over the ranks.
  const auto sum_at = [&](int64_t col, const uint4& own, float(&sum)[kChunk]) {
    if (!sums_here) {
      Unpack(receive(col, owner, PeekChunk<kVectorized>(place(rank, owner, col), count_at(col))), sum);
      return;
    }
    uint4 chunks[kPeers];
#pragma unroll
    for (int peer = 0; peer < kPeers; ++peer) {
      if (peer < size)
        chunks[peer] = peer == rank ? own : PeekChunk<kVectorized>(place(rank, peer, col), count_at(col));
    }
#pragma unroll
    for (int peer = 0; peer < kPeers; ++peer) {
      if (peer >= size) continue;
      if (peer != rank) chunks[peer] = receive(col, peer, chunks[peer]);
      float term[kChunk];
      Unpack(chunks[peer], term);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) sum[i] = peer == 0 ? term[i] : sum[i] + term[i];
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum[i] = Rounded(sum[i]);
    if (task.in_two_steps) {
      const uint4 packed = Packed(sum);
      send_sum(col, make_uint4(WithoutNothing(packed.x), WithoutNothing(packed.y), WithoutNothing(packed.z),
                               WithoutNothing(packed.w)));
    }
  };

  __nv_bfloat16* y = task.y.Row(row);
  if constexpr (!kNorm) {
    for (int64_t col = first_col; col < task.cols; col += step) {
      float sum[kChunk];
      sum_at(col, col == first_col ? first_chunk : own_chunk(col), sum);
      Store<kVectorized>(y + col, count_at(col), sum);
    }
    __syncthreads();  // every thread has read the counter
    if (threadIdx.x == 0) *counter = count + 1;
    if (areas.shares_device) LetNextKernelStart();
  } else {
    __nv_bfloat16* residual = task.residual.Row(row);
    const auto load = [&](int64_t col, const uint4& own, float(&values)[kChunk]) {
      Load<kVectorized>(residual + col, count_at(col), values);
      float sum[kChunk];
      sum_at(col, own, sum);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) values[i] = Rounded(values[i] + sum[i]);
      Store<kVectorized>(residual + col, count_at(col), values);
    };
    float first[kChunk] = {};
    if (count_at(first_col) > 0) load(first_col, first_chunk, first);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) squares = fmaf(first[i], first[i], squares);
    for (int64_t col = first_col + step; col < task.cols; col += step) {
      float values[kChunk];
      load(col, own_chunk(col), values);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) squares = fmaf(values[i], values[i], squares);
    }
    const float total = BlockSum(squares);
    if (threadIdx.x == 0) *counter = count + 1;  // every thread has read it
    if (areas.shares_device) LetNextKernelStart();
    const float scale = 1.0f / sqrtf(total / static_cast<float>(task.cols) + task.eps);
    const auto finish = [&](int64_t col, float(&values)[kChunk], const float(&weights)[kChunk]) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) values[i] = values[i] * scale * (task.offset + weights[i]);
      Store<kVectorized>(y + col, count_at(col), values);
    };
    if (count_at(first_col) > 0) finish(first_col, first, first_weights);
    for (int64_t col = first_col + step; col < task.cols; col += step) {
      float values[kChunk], weights[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) weights[i] = col + i < task.cols ? task.weight.At(0, col + i) : 0.0f;
      Load<kVectorized>(residual + col, count_at(col), values);
      finish(col, values, weights);
    }
  }
}

// A second way costs some two microseconds; what it saves in bytes is worth that from so many rows on (rows
// of 5,120 columns at 375 GB/s; docs/performance.md, "Two H200s").
int64_t RowsOfTwoSteps(int size) {
  if (size <= 2) return PeerAreas::kMaxRows + 1;  // nothing is saved
  return size <= 4 ? 48 : 16;
}

template <bool kNorm, int kPeers>
auto KernelOf(bool vectorized, int64_t threads) {
  if (threads > kUsualThreads) {
    return vectorized ? PeerSumKernel<true, kNorm, kPeers, kMaxThreads>
                      : PeerSumKernel<false, kNorm, kPeers, kMaxThreads>;
  }
  return vectorized ? PeerSumKernel<true, kNorm, kPeers, kUsualThreads>
                    : PeerSumKernel<false, kNorm, kPeers, kUsualThreads>;
}
template <int kPeers>
auto KernelOf(bool vectorized, bool norm, int64_t threads) {
  return norm ? KernelOf<true, kPeers>(vectorized, threads) : KernelOf<false, kPeers>(vectorized, threads);
}

}  // namespace

int64_t PeerAreaBytes(int size, int64_t max_rows, int64_t cols) {
  return PeerRowsOffset(size) + 2 * size * max_rows * cols * static_cast<int64_t>(sizeof(__nv_bfloat16));
}

int64_t UsefulPeerSumRows() { return PeerAreas::kMaxRows; }

absl::Status PreparePeerArea(void* area, int64_t bytes, int size, const Stream& stream) {
  const int64_t rows = PeerRowsOffset(size);
  if (bytes <= rows) return absl::OkStatus();
  return CudaStatus(cudaMemsetAsync(static_cast<char*>(area) + rows, 0xff, static_cast<size_t>(bytes - rows),
                                    CudaOf(stream).stream),
                    "PreparePeerArea");
}

absl::Status PeerSum(const PeerAreas& areas, ConstMatrixView product, const MatrixView* residual,
                     ConstMatrixView w, NormWeight weight, float eps, MatrixView y,
                     const PeerPatience& patience, const Stream& stream) {
  PeerSumTask task = {};
  task.areas = areas;
  task.wait = WaitOf(areas, patience);
  task.product = Bf16RowsOf(product);
  task.y = Bf16RowsOf(y);
  task.cols = product.cols;
  task.in_two_steps = product.rows >= RowsOfTwoSteps(areas.size);
  bool vectorized = IsVectorized(product) && IsVectorized(y) && product.cols % kChunk == 0;
  if (residual != nullptr) {
    task.residual = Bf16RowsOf(*residual);
    task.weight = ParametersOf(w);
    task.offset = weight == NormWeight::kOnePlus ? 1.0f : 0.0f;
    task.eps = eps;
    vectorized = vectorized && IsVectorized(*residual);
  }
  const int64_t threads =
      product.cols <= kWarpColumns
          ? 32
          : std::min<int64_t>(CeilDiv(CeilDiv(product.cols, kChunk), 32) * 32, kMaxThreads);
  const LaunchShape shape = {.grid = Grid(product.rows), .block = dim3(static_cast<unsigned>(threads))};
  const bool norm = residual != nullptr;
  const auto kernel = areas.size <= 2 ? KernelOf<2>(vectorized, norm, threads)
                                      : KernelOf<PeerAreas::kMaxRanks>(vectorized, norm, threads);
  return CudaStatus(Launch(CudaOf(stream), shape, kernel, task), "PeerSum");
}

}  // namespace dflash::backend
