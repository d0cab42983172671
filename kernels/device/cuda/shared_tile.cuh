// Tiles of bf16 in shared memory: how they are filled while other work goes on, and read as operands of
// matrix products without bank conflicts. Compute capability 8.0 and later.
//
// A tile's rows are `pieces` pieces of 16 bytes (a multiple of 8 pieces); piece p of row r lies at piece
// p xor (r mod 8), so that the same piece of eight neighbouring rows falls into different banks.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/device/cuda/vector.cuh"

namespace dflash {

// Byte offset of a piece inside its tile.
__device__ __forceinline__ uint32_t PieceOffset(int row, int piece, int pieces) {
  return static_cast<uint32_t>((row * pieces + (piece ^ (row & 7))) * 16);
}

namespace ptx {

// Copies 16 bytes (both addresses multiples of 16), or writes 16 zeros when `present` is false; `from` must
// be a valid address all the same. Complete after CopyAsyncWait of its group and a barrier.
__device__ __forceinline__ void CopyAsync16(uint32_t to, const void* from, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0)
               : "memory");
}

// Copies one word or two; both addresses multiples of as many bytes.
__device__ __forceinline__ void CopyAsync4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void CopyAsync8(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

// Ends a group: all copies that the thread has issued since the last group.
__device__ __forceinline__ void CopyAsyncCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of the thread's groups are under way.
template <int pending>
__device__ __forceinline__ void CopyAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

__device__ __forceinline__ void StoreShared16(uint32_t to, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

__device__ __forceinline__ void StoreShared4(uint32_t to, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

// Like LoadMatrix4, every 8x8 matrix transposed.
__device__ __forceinline__ void LoadMatrix4Transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// 2^x, denormal results flushed to zero; exact for integers in range.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ptx

// Eight elements from any address, those at and beyond `count` zero.
__device__ __forceinline__ uint4 GatherPiece(const __nv_bfloat16* from, int count) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto* bits = reinterpret_cast<const uint16_t*>(from);
    const uint32_t low = 2 * i < count ? bits[2 * i] : 0, high = 2 * i + 1 < count ? bits[2 * i + 1] : 0;
    words[i] = low | high << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Two floats rounded to bf16, the first in the low half; they become what the rounding lost. So n calls split
// a float into n parts with 8 n bits of mantissa.
__device__ __forceinline__ uint32_t TakeBf16Pair(float& first, float& second) {
  const uint32_t pair = PackBf16(first, second);
  first -= __uint_as_float(pair << 16);
  second -= __uint_as_float(pair & 0xffff0000u);
  return pair;
}

}  // namespace dflash
