// The instructions that CUDA C++ has no name for: barriers in shared memory, asynchronous copies, matrix
// products. Shared addresses are 32-bit. Source: NVIDIA, "PTX ISA" 9.0.
#pragma once

#include <cstdint>

namespace dflash::ptx {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier: a phase completes when all arrivals and all announced bytes have come.

__device__ __forceinline__ void BarrierInit(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to the copy engine; then synchronize the block.
__device__ __forceinline__ void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void BarrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void BarrierArriveExpecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Spins of a wait before the kernel is declared dead: many seconds, far beyond any legal wait. A bug ends in
// an error instead of a hung machine.
inline constexpr uint32_t kSpinLimit = 1u << 26;

// Waits until the phase of the given parity has completed.
__device__ __forceinline__ void BarrierWait(uint32_t barrier, uint32_t parity) {
  for (uint32_t spins = 0;; ++spins) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (done != 0) return;
    if (spins > kSpinLimit) __trap();
  }
}

// The same without an end: for threads between asynchronous products, which nvcc 13.0 runs one by one where a
// wait can leave the kernel (ptxas C7512). Whoever they wait for gives up with an error.
__device__ __forceinline__ void BarrierWaitEndless(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0);
}

// Synchronizes `threads` threads of the block at one of its named barriers 1..15.
__device__ __forceinline__ void NamedBarrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Asynchronous copies from global to shared memory, reported to a barrier as bytes.

// How long a line is worth keeping in L2: weights are read once, activations by every block.
inline constexpr uint64_t kEvictNormal = 0x1000000000000000ull;
inline constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
inline constexpr uint64_t kEvictLast = 0x14F0000000000000ull;

// `bytes` consecutive bytes, a multiple of 16, both addresses multiples of 16.
__device__ __forceinline__ void CopyBulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// The box of a two-dimensional tensor map at (column, row); what lies outside the tensor reads as zero.
__device__ __forceinline__ void CopyTile(uint32_t to, const void* map, int32_t column, int32_t row,
                                         uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
      "{%2, "
      "%3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void PrefetchTensorMap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- Clusters: blocks that run together and reach each other's shared memory. Compute capability 9.0.

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// The two halves of a barrier of all threads of the cluster; what was written before the one is seen after
// the other.
__device__ __forceinline__ void ClusterArrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void ClusterWait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Where `address` lies in the shared memory of the block of that rank.
__device__ __forceinline__ uint32_t OfRank(uint32_t address, uint32_t rank) {
  uint32_t remote = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
#endif
  return remote;
}

// Writes to the shared memory of the block of that rank; its barrier gets the bytes.
__device__ __forceinline__ void StoreToRank(uint32_t to, uint32_t rank, float value, uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                   OfRank(to, rank)),
               "f"(value), "r"(OfRank(barrier, rank))
               : "memory");
#endif
}

// Starts copying shared memory to the same place in the block of that rank; its barrier gets the bytes.
__device__ __forceinline__ void CopyToRank(uint32_t address, uint32_t bytes, uint32_t rank,
                                           uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          OfRank(address, rank)),
      "r"(address), "r"(bytes), "r"(OfRank(barrier, rank))
      : "memory");
#endif
}

// What the block has written to its shared memory is seen by copies that it starts from now on.
__device__ __forceinline__ void FenceForCopies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Has `bytes` consecutive bytes of global memory, a multiple of 16, brought to the L2 cache.
__device__ __forceinline__ void PrefetchBulk(const void* from, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// The first half for those who only say that they have come this far: it does not wait for what was written.
__device__ __forceinline__ void ClusterArriveRelaxed() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// ---- Flags in global memory between blocks.

__device__ __forceinline__ void StoreRelease(int32_t* flag, int32_t value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ int32_t LoadAcquire(const int32_t* flag) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// ---- Warp-level matrix product.

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l mod 8 of matrix l / 8.
__device__ __forceinline__ void LoadMatrix4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// d[16, 8] += a[16, 16] b[8, 16]', bf16 with float32 sums.
__device__ __forceinline__ void Mma16x8x16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace dflash::ptx
