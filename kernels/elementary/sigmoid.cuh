// Sigmoid and Silu of elementary.h for kernels that compute several at a time.
#pragma once

#include "kernels/elementary/elementary.h"

namespace dflash {

// The same bits without the division's branch for extreme operands, which keeps the compiler from computing
// several at a time: e < 2^-24 is divided by 1, which is exact, and what is left is far from the extremes;
// there the quotient is refined twice, as IEEE division does it.
__device__ __forceinline__ float SigmoidBranchless(float x) {
  const float e = ExpF32(0.0f - fabsf(x)), above = x < 0.0f ? e : 1.0f, below = 1.0f + e;
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(below));
  inverse = fmaf(inverse, fmaf(-below, inverse, 1.0f), inverse);
  float quotient = above * inverse;
#pragma unroll
  for (int i = 0; i < 2; ++i) quotient = fmaf(inverse, fmaf(-below, quotient, above), quotient);
  return quotient;
}
__device__ __forceinline__ float SiluBranchless(float x) { return x * SigmoidBranchless(x); }

}  // namespace dflash
