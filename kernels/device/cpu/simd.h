// Sixteen float32 lanes with the same arithmetic on every instruction set: one AVX-512 register, two AVX
// registers or an array. Kernel bodies are written once over these types and compiled once per set:
//
//   foo_cpu_body.h     namespace DFLASH_SIMD_NAMESPACE { namespace { ... the kernel over F32x16 ... } }
//                      const FooKernels DFLASH_SIMD_NAME(kFoo) = { ... functions of that namespace ... };
//   foo_cpu_scalar.cc, foo_cpu_avx2.cc, foo_cpu_avx512.cc     include the body
//
// (CMake: simd_sources(foo_cpu) gives each file its flags.) Rules that keep the sets apart and equal:
// - Everything lies in a namespace named by the set, every function here is always inlined, and a body's own
//   functions are local to their file. A body must not call inline functions of other headers (std::
//   algorithms, absl, bf16's conversions): the linker might keep the AVX-512 copy for all callers.
// - No operation rounds differently from another set: no reciprocal estimates, no contraction (a * b + c is
//   two roundings, Fma is one). NaNs are NaN in every set, but their bits may differ.
// - A kernel's lanes mean the same in every set, so a sum over lanes has one order: ReduceAdd.
#pragma once

#include <cstdint>

#include "base/dtype.h"

#if defined(__AVX512F__)
#define DFLASH_SIMD_NAMESPACE simd_avx512
#define DFLASH_SIMD_NAME(prefix) prefix##Avx512
#include <immintrin.h>
#elif defined(__AVX2__)
#define DFLASH_SIMD_NAMESPACE simd_avx2
#define DFLASH_SIMD_NAME(prefix) prefix##Avx2
#include <immintrin.h>
#else
#define DFLASH_SIMD_NAMESPACE simd_scalar
#define DFLASH_SIMD_NAME(prefix) prefix##Scalar
#endif

#define DFLASH_SIMD_INLINE __attribute__((always_inline)) inline

// Operations, for V = F32x16, I = I32x16, M = Mask16:
//   V Load(const float*)             V LoadPartial(const float*, int n)   lanes >= n are 0 and not read
//   V LoadBf16(const bf16*)          V LoadBf16Partial(const bf16*, int n)
//   void Store(float*, V)            void StorePartial(float*, V, int n)  lanes >= n are not written
//   V V::Broadcast(float)   I I::Broadcast(int32_t)   V + V   V - V   V * V   V / V   V Sqrt(V)
//   V Fma(a, b, c) = a b + c in one rounding
//   V Max(a, b) = a > b ? a : b   V Min(a, b) = a < b ? a : b   (so a NaN in either gives b)   V Abs(V)
//   M a < b   M a <= b   M a > b   M a >= b   M IsNan(V)   V Select(M, if_true, if_false)
//   bool Any(M)
//   I BitsOf(V)   V FromBits(I)   V ToFloat(I)   I + I   I - I   I & I   I | I   I ^ I   I << n   I >> n (arithmetic)
//   I MulWide(I a, uint32_t b, I* high): low and high words of the unsigned 64-bit products
//   float ReduceAdd(V): lanes i and i + 8, then i + 4, i + 2, i + 1.   float ReduceMax(V), without NaNs
// kLanes = 16.
#if defined(__AVX512F__)
#include "kernels/device/cpu/simd_avx512.h"  // IWYU pragma: export
#elif defined(__AVX2__)
#include "kernels/device/cpu/simd_avx2.h"  // IWYU pragma: export
#else
#include "kernels/device/cpu/simd_scalar.h"  // IWYU pragma: export
#endif
