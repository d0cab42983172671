// Small messages: every thread moves eight bytes, each word beside the number of the call. A rank writes
// again to a place when all ranks have said that they have read it, which they did two calls ago.
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/peer_sum/peer_area_cuda.cuh"
#include "kernels/peer_sum/peer_sum_backend.h"

namespace dflash::backend {
namespace {

struct PeerExchangeTask {
  PeerAreas areas;
  PeerWait wait;
  const uint32_t* send;
  uint32_t* receive;
  int64_t words;
  int root;  // -1: all ranks send
};

// Grid (kMessageThreads units each).
__global__ void __launch_bounds__(kMessageThreads)
    PeerExchangeKernel(const __grid_constant__ PeerExchangeTask task) {
  const PeerAreas& areas = task.areas;
  if (!areas.shares_device) LetNextKernelStart();  // as in the sums
  WaitForPreviousKernel();
  const int rank = areas.rank, size = areas.size, thread = static_cast<int>(threadIdx.x);
  const int64_t unit = int64_t{blockIdx.x} * kMessageThreads + thread, word = 2 * unit;
  const bool has_first = word < task.words, has_second = word + 1 < task.words;
  uint32_t* counter = At<uint32_t>(areas, rank, kMessageCountersOffset) + blockIdx.x;
  const uint32_t count = *counter + 1;
  const bool sends = task.root < 0 || task.root == rank;
  const auto place = [&](int at, int from) {
    return At<uint4>(areas, at, kMessagesOffset) + ((count & 1) * size + from) * kMessageUnits + unit;
  };
  // In the area of rank `at`: the last message of this block that rank `by` has read.
  const auto read = [&](int at, int by) {
    return At<uint32_t>(areas, at, kMessagesReadOffset) + int64_t{blockIdx.x} * PeerAreas::kMaxRanks + by;
  };
  uint32_t first = 0, second = 0;
  if (sends && has_first) first = task.send[word];
  if (sends && has_second) second = task.send[word + 1];
  if (sends && thread < size && thread != rank) {
    AwaitPeer(task.wait, thread,
              [&] { return static_cast<int32_t>(LoadSystem(read(rank, thread)) - (count - 2)) >= 0; });
  }
  __syncthreads();  // also: all have read the counter
  if (sends && has_first) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) StoreSystem(place(peer, rank), make_uint4(first, count, second, count));
    }
  }
  for (int peer = 0; peer < size; ++peer) {
    if (!has_first || (task.root >= 0 && peer != task.root)) continue;
    uint32_t* to = task.receive + (task.root < 0 ? peer * task.words : 0) + word;
    if (peer == rank) {
      if (to == task.send + word) continue;
      to[0] = first;
      if (has_second) to[1] = second;
      continue;
    }
    uint4 unit_there = {};
    AwaitPeer(task.wait, peer, [&] {
      unit_there = LoadSystem(place(rank, peer));
      return unit_there.y == count && unit_there.w == count;
    });
    to[0] = unit_there.x;
    if (has_second) to[1] = unit_there.z;
  }
  __syncthreads();  // every thread has what it waited for
  if (areas.shares_device) LetNextKernelStart();
  if (thread == 0) *counter = count;
  if (thread < size && thread != rank) StoreSystem(read(thread, rank), count);
}

}  // namespace

absl::Status PeerExchange(const PeerAreas& areas, const void* send, void* receive, int64_t bytes, int root,
                          const PeerPatience& patience, const Stream& stream) {
  const PeerExchangeTask task = {.areas = areas,
                                 .wait = WaitOf(areas, patience),
                                 .send = static_cast<const uint32_t*>(send),
                                 .receive = static_cast<uint32_t*>(receive),
                                 .words = bytes / 4,
                                 .root = root};
  const LaunchShape shape = {.grid = Grid(CeilDiv(CeilDiv(bytes, kUnitBytes), kMessageThreads)),
                             .block = dim3(kMessageThreads)};
  return CudaStatus(Launch(CudaOf(stream), shape, PeerExchangeKernel, task), "PeerExchange");
}

}  // namespace dflash::backend
