// Elementary functions in float32, the same bits on every backend: polynomials in explicit fma, no libm.
//
// Each formula is written once, over lanes V: F32x16 of any instruction set (kernels/device/cpu/simd.h) or
// Lane (one float, host or CUDA device), and gives the same bits in all of them. The functions at the end
// take a plain float.
//
// Accuracy against the exact value (denormal results included): Exp, Log and Log1p within 2 ulp, Sigmoid and
// Softplus within 4 ulp, Silu within 4 ulp or 1e-37. NaN gives NaN. Exp overflows to infinity above 88.7228
// and is 0 below -103.98; Log(0) = Log1p(-1) = -infinity, below that NaN; Silu(-infinity) is NaN
// (-infinity * 0).
#pragma once

#include "kernels/elementary/lane.h"

namespace dflash {
namespace elementary_internal {

// Coefficients of the polynomials of Exp and Log: S. L. Moshier, Cephes mathematical library, expf.c, logf.c.
inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kLn2High = 0.693359375f;  // few bits: exponent * kLn2High is exact
inline constexpr float kLn2Low = -2.12194440e-4f;
inline constexpr int32_t kSqrtHalfBits = 0x3f3504f3;
inline constexpr float kInfinity = __builtin_inff();

// Horner's rule, highest power first.
template <typename V, typename... Floats>
DFLASH_LANE_INLINE V Polynomial(V x, float highest, Floats... others) {
  V y = V::Broadcast(highest);
  ((y = Fma(y, x, V::Broadcast(others))), ...);
  return y;
}

// Splits a normal x > 0 into mantissa in [sqrt(1/2), sqrt(2)) and the exponent.
template <typename V>
DFLASH_LANE_INLINE V Mantissa(V x, typename V::Int* exponent) {
  *exponent = (BitsOf(x) - V::Int::Broadcast(kSqrtHalfBits)) >> 23;
  return FromBits(BitsOf(x) - (*exponent << 23));
}

// log(1 + f) + exponent * log(2), f in [sqrt(1/2) - 1, sqrt(2) - 1].
template <typename V>
DFLASH_LANE_INLINE V LogOfOnePlus(V f, V exponent) {
  const V square = f * f;
  V tail =
      Polynomial(f, 7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f,
                 1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f);
  tail = tail * f * square;
  tail = Fma(exponent, V::Broadcast(kLn2Low), tail);
  tail = Fma(square, V::Broadcast(-0.5f), tail);
  return Fma(exponent, V::Broadcast(kLn2High), f + tail);
}

}  // namespace elementary_internal

template <typename V>
DFLASH_LANE_INLINE V Exp(V x) {
  namespace in = elementary_internal;
  const V limited = Max(V::Broadcast(-105.0f), Min(V::Broadcast(89.0f), x));  // a NaN stays
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  const V shifter = V::Broadcast(12582912.0f);
  const V shifted = Fma(limited, V::Broadcast(in::kLog2E), shifter);
  const V n = shifted - shifter;
  V r = Fma(n, V::Broadcast(-in::kLn2High), limited);
  r = Fma(n, V::Broadcast(-in::kLn2Low), r);
  const V tail = in::Polynomial(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                                1.6666665459e-1f, 5.0000001201e-1f);
  const V y = Fma(tail, r * r, r) + V::Broadcast(1.0f);
  // Two powers of two, each of them normal, so that denormal results are rounded once and 2^128 overflows.
  const auto exponent = BitsOf(shifted) - BitsOf(shifter);
  const auto half = exponent >> 1;
  const auto bias = V::Int::Broadcast(127);
  return y * FromBits((half + bias) << 23) * FromBits((exponent - half + bias) << 23);
}

template <typename V>
DFLASH_LANE_INLINE V Log(V x) {
  namespace in = elementary_internal;
  const V zero = V::Broadcast(0.0f);
  const auto denormal = x < V::Broadcast(1.17549435e-38f);
  const V normal = Select(denormal, x * V::Broadcast(8388608.0f), x);
  typename V::Int exponent;
  const V f = in::Mantissa(normal, &exponent) - V::Broadcast(1.0f);
  const V result = in::LogOfOnePlus(f, ToFloat(exponent) - Select(denormal, V::Broadcast(23.0f), zero));
  const V infinity = V::Broadcast(in::kInfinity);
  const V not_positive = Select(x >= zero, zero - infinity, V::Broadcast(__builtin_nanf("")));
  return Select(x > zero, Select(x < infinity, result, infinity), not_positive);
}

// log(1 + x) for x in [-1, 2^100].
template <typename V>
DFLASH_LANE_INLINE V Log1p(V x) {
  namespace in = elementary_internal;
  const V zero = V::Broadcast(0.0f), one = V::Broadcast(1.0f);
  const V sum = one + x;
  // What the sum lost: exact, since the larger operand comes first.
  const V lost = Select(x < one, x - (sum - one), one - (sum - x));
  typename V::Int exponent;
  const V mantissa = in::Mantissa(sum, &exponent);
  const V scale = FromBits((V::Int::Broadcast(127) - exponent) << 23);
  const V result = in::LogOfOnePlus(Fma(lost, scale, mantissa - one), ToFloat(exponent));
  const V not_positive = Select(sum >= zero, V::Broadcast(-in::kInfinity), V::Broadcast(__builtin_nanf("")));
  return Select(sum > zero, result, not_positive);
}

// 1 / (1 + e^-x), without overflow on either side.
template <typename V>
DFLASH_LANE_INLINE V Sigmoid(V x) {
  const V zero = V::Broadcast(0.0f), one = V::Broadcast(1.0f);
  const V e = Exp(zero - Abs(x));
  return Select(x < zero, e, one) / (one + e);
}

// x sigmoid(x)
template <typename V>
DFLASH_LANE_INLINE V Silu(V x) {
  return x * Sigmoid(x);
}

// log(1 + e^x). From 20 on the result is x, as in the models' definition.
template <typename V>
DFLASH_LANE_INLINE V Softplus(V x) {
  const V zero = V::Broadcast(0.0f);
  return Max(zero, x) + Log1p(Exp(zero - Abs(x)));
}

DFLASH_LANE_INLINE float ExpF32(float x) { return Exp(Lane{x}).v; }
DFLASH_LANE_INLINE float LogF32(float x) { return Log(Lane{x}).v; }
DFLASH_LANE_INLINE float Log1pF32(float x) { return Log1p(Lane{x}).v; }
DFLASH_LANE_INLINE float SigmoidF32(float x) { return Sigmoid(Lane{x}).v; }
DFLASH_LANE_INLINE float SiluF32(float x) { return Silu(Lane{x}).v; }
DFLASH_LANE_INLINE float SoftplusF32(float x) { return Softplus(Lane{x}).v; }

}  // namespace dflash
