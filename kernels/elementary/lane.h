// One float32 lane with the arithmetic of kernels/device/cpu/simd.h, so that a formula written once over
// lanes gives a scalar the same bits as a vector. Host and CUDA device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define DFLASH_LANE_INLINE __host__ __device__ __forceinline__
#else
#define DFLASH_LANE_INLINE __attribute__((always_inline)) inline
#endif

namespace dflash {

struct IntLane {
  uint32_t v;  // unsigned, so that the sums of a NaN's bits may wrap
  static DFLASH_LANE_INLINE IntLane Broadcast(int32_t x) { return {static_cast<uint32_t>(x)}; }
};
struct Lane {
  float v;
  using Int = IntLane;
  static DFLASH_LANE_INLINE Lane Broadcast(float x) { return {x}; }
};
struct BoolLane {
  bool v;
};

// nvcc contracts a * b + c; its _rn intrinsics are never contracted.
#if defined(__CUDA_ARCH__)
#define DFLASH_LANE_BINARY(op, intrinsic) \
  DFLASH_LANE_INLINE Lane operator op(Lane a, Lane b) { return {intrinsic(a.v, b.v)}; }
#else
#define DFLASH_LANE_BINARY(op, intrinsic) \
  DFLASH_LANE_INLINE Lane operator op(Lane a, Lane b) { return {a.v op b.v}; }
#endif
DFLASH_LANE_BINARY(+, __fadd_rn)
DFLASH_LANE_BINARY(-, __fsub_rn)
DFLASH_LANE_BINARY(*, __fmul_rn)
DFLASH_LANE_BINARY(/, __fdiv_rn)
#undef DFLASH_LANE_BINARY

DFLASH_LANE_INLINE Lane Fma(Lane a, Lane b, Lane c) { return {__builtin_fmaf(a.v, b.v, c.v)}; }
DFLASH_LANE_INLINE Lane Max(Lane a, Lane b) { return {a.v > b.v ? a.v : b.v}; }
DFLASH_LANE_INLINE Lane Min(Lane a, Lane b) { return {a.v < b.v ? a.v : b.v}; }
DFLASH_LANE_INLINE Lane Abs(Lane a) { return {__builtin_fabsf(a.v)}; }

DFLASH_LANE_INLINE BoolLane operator<(Lane a, Lane b) { return {a.v < b.v}; }
DFLASH_LANE_INLINE BoolLane operator<=(Lane a, Lane b) { return {a.v <= b.v}; }
DFLASH_LANE_INLINE BoolLane operator>(Lane a, Lane b) { return {a.v > b.v}; }
DFLASH_LANE_INLINE BoolLane operator>=(Lane a, Lane b) { return {a.v >= b.v}; }
DFLASH_LANE_INLINE BoolLane IsNan(Lane a) { return {a.v != a.v}; }
DFLASH_LANE_INLINE Lane Select(BoolLane m, Lane if_true, Lane if_false) { return m.v ? if_true : if_false; }

DFLASH_LANE_INLINE IntLane BitsOf(Lane a) {
  uint32_t bits;
  __builtin_memcpy(&bits, &a.v, sizeof(bits));
  return {bits};
}
DFLASH_LANE_INLINE Lane FromBits(IntLane a) {
  float value;
  __builtin_memcpy(&value, &a.v, sizeof(value));
  return {value};
}
DFLASH_LANE_INLINE Lane ToFloat(IntLane a) { return {static_cast<float>(static_cast<int32_t>(a.v))}; }
DFLASH_LANE_INLINE IntLane operator+(IntLane a, IntLane b) { return {a.v + b.v}; }
DFLASH_LANE_INLINE IntLane operator-(IntLane a, IntLane b) { return {a.v - b.v}; }
DFLASH_LANE_INLINE IntLane operator&(IntLane a, IntLane b) { return {a.v & b.v}; }
DFLASH_LANE_INLINE IntLane operator|(IntLane a, IntLane b) { return {a.v | b.v}; }
DFLASH_LANE_INLINE IntLane operator<<(IntLane a, int n) { return {a.v << n}; }
DFLASH_LANE_INLINE IntLane operator>>(IntLane a, int n) {
  return {static_cast<uint32_t>(static_cast<int32_t>(a.v) >> n)};
}

}  // namespace dflash
