// What lies where in an exchange area on the GPU, and how kernels write to the others' and wait in their own.
//
// Everything is pushed: a rank writes into the others' areas and reads its own, so nobody waits for a read
// across the link. Payload says by itself that it has come, word by word, so no fence and no flag behind it
// is needed and nothing depends on the order of writes:
//   rows      an element of all ones, a NaN that the kernels never make, is a place that nothing has come to
//   yet;
//             who has read it puts that back. Twice as many places as a call needs are used in turn.
//   messages  every word of four bytes travels beside the number of its call.
// Counters of calls are a rank's own, one per block, so blocks never wait for each other.
//
// An area: uint32 stop word; counters of messages [kMessageBlocks]; which message of a block each rank has
// read [kMessageBlocks, kMaxRanks]; counters of rows [kMaxRows]; messages [2, size, units] of 16 bytes; rows
// [2, size, max_rows, cols] bf16.
#pragma once

#include <cstdint>

#include "kernels/device/cuda/vector.cuh"
#include "kernels/peer_sum/peer_sum.h"

namespace dflash {

inline constexpr int kMessageThreads = 256;  // a unit each
inline constexpr int kUnitBytes = 8;         // of payload, beside two words of flags
inline constexpr int64_t kMessageBlocks = PeerAreas::kMaxMessageBytes / kUnitBytes / kMessageThreads;
inline constexpr int64_t kMessageUnits = kMessageBlocks * kMessageThreads;
inline constexpr int64_t kMessageCountersOffset = 256;
inline constexpr int64_t kMessagesReadOffset = kMessageCountersOffset + kMessageBlocks * 4;
inline constexpr int64_t kRowCountersOffset = kMessagesReadOffset + kMessageBlocks * PeerAreas::kMaxRanks * 4;
inline constexpr int64_t kMessagesOffset = kRowCountersOffset + PeerAreas::kMaxRows * 4;
static_assert(kMessagesOffset % 256 == 0);
__host__ __device__ constexpr int64_t PeerRowsOffset(int size) {
  return kMessagesOffset + 2 * size * kMessageUnits * 16;
}
inline constexpr uint32_t kNothing = 0xffffffffu;  // two elements that have not come

// Who waits, and for how long.
struct PeerWait {
  uint32_t* stop;  // own area
  int32_t* late;
  uint64_t timeout_ns;
};

__device__ __forceinline__ uint32_t LoadSystem(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void StoreSystem(uint32_t* to, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint4 LoadSystem(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ void StoreSystem(uint4* to, const uint4& v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint16_t LoadSystem(const uint16_t* from) {
  uint16_t value;
  asm volatile("ld.relaxed.sys.global.u16 %0, [%1];" : "=h"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void StoreSystem(uint16_t* to, uint16_t value) {
  asm volatile("st.relaxed.sys.global.u16 [%0], %1;" ::"l"(to), "h"(value) : "memory");
}
__device__ __forceinline__ uint64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Looks until `has_come()`. False when the rank does not come or the group was stopped: *late says which, the
// first cause stays, and this rank does not wait again.
template <typename HasCome>
__device__ __forceinline__ bool AwaitPeer(const PeerWait& wait, int peer, const HasCome& has_come) {
  constexpr uint32_t kLooks = 64;  // before the clock and the stop word get one
  uint64_t start = 0;
  for (uint32_t looks = 1; !has_come(); ++looks) {
    if (looks % kLooks != 0) continue;
    // Why this rank stopped: 1: the group was stopped; 2 + r: rank r did not come.
    uint32_t stopped = LoadSystem(wait.stop);
    const uint64_t now = Nanoseconds();
    if (start == 0) start = now;
    if (stopped == 0 && now - start > wait.timeout_ns) {
      stopped = 2 + static_cast<uint32_t>(peer);
      StoreSystem(wait.stop, stopped);
    }
    if (stopped == 0) continue;
    *static_cast<volatile int32_t*>(wait.late) =
        stopped == 1 ? kPeerSumStopped : static_cast<int32_t>(stopped) - 1;
    return false;
  }
  return true;
}

template <typename T>
__device__ __forceinline__ T* At(const PeerAreas& areas, int rank, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(areas.area[rank]) + offset);
}
inline PeerWait WaitOf(const PeerAreas& areas, const PeerPatience& patience) {
  const int64_t timeout = absl::ToInt64Nanoseconds(patience.timeout);
  return {.stop = static_cast<uint32_t*>(areas.area[areas.rank]),
          .late = patience.late,
          .timeout_ns = static_cast<uint64_t>(timeout > 0 ? timeout : 0)};
}

}  // namespace dflash
