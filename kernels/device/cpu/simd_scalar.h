// Included by simd.h alone.
#pragma once

namespace dflash::simd_scalar {

inline constexpr int kLanes = 16;

struct I32x16 {
  uint32_t v[kLanes];  // unsigned, so that sums may wrap
  static DFLASH_SIMD_INLINE I32x16 Broadcast(int32_t x) {
    I32x16 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<uint32_t>(x);
    return r;
  }
};
struct F32x16 {
  float v[kLanes];
  using Int = I32x16;
  static DFLASH_SIMD_INLINE F32x16 Broadcast(float x) {
    F32x16 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = x;
    return r;
  }
};
struct Mask16 {
  bool v[kLanes];
};

DFLASH_SIMD_INLINE uint32_t Bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}
DFLASH_SIMD_INLINE float Value(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

DFLASH_SIMD_INLINE F32x16 LoadPartial(const float* p, int n) {
  F32x16 r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = i < n ? p[i] : 0.0f;
  return r;
}
DFLASH_SIMD_INLINE F32x16 Load(const float* p) { return LoadPartial(p, kLanes); }
DFLASH_SIMD_INLINE F32x16 LoadBf16Partial(const bf16* p, int n) {
  F32x16 r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = i < n ? Value(static_cast<uint32_t>(p[i].bits) << 16) : 0.0f;
  return r;
}
DFLASH_SIMD_INLINE F32x16 LoadBf16(const bf16* p) { return LoadBf16Partial(p, kLanes); }
DFLASH_SIMD_INLINE void StorePartial(float* p, F32x16 a, int n) {
  for (int i = 0; i < n; ++i) p[i] = a.v[i];
}
DFLASH_SIMD_INLINE void Store(float* p, F32x16 a) { StorePartial(p, a, kLanes); }

// expression: one lane i of the result.
#define DFLASH_SIMD_LANES(Result, expression)             \
  Result r;                                               \
  for (int i = 0; i < kLanes; ++i) r.v[i] = (expression); \
  return r

DFLASH_SIMD_INLINE F32x16 operator+(F32x16 a, F32x16 b) { DFLASH_SIMD_LANES(F32x16, a.v[i] + b.v[i]); }
DFLASH_SIMD_INLINE F32x16 operator-(F32x16 a, F32x16 b) { DFLASH_SIMD_LANES(F32x16, a.v[i] - b.v[i]); }
DFLASH_SIMD_INLINE F32x16 operator*(F32x16 a, F32x16 b) { DFLASH_SIMD_LANES(F32x16, a.v[i] * b.v[i]); }
DFLASH_SIMD_INLINE F32x16 operator/(F32x16 a, F32x16 b) { DFLASH_SIMD_LANES(F32x16, a.v[i] / b.v[i]); }
DFLASH_SIMD_INLINE F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) {
  DFLASH_SIMD_LANES(F32x16, __builtin_fmaf(a.v[i], b.v[i], c.v[i]));
}
DFLASH_SIMD_INLINE F32x16 Sqrt(F32x16 a) { DFLASH_SIMD_LANES(F32x16, __builtin_sqrtf(a.v[i])); }
DFLASH_SIMD_INLINE F32x16 Max(F32x16 a, F32x16 b) {
  DFLASH_SIMD_LANES(F32x16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]);
}
DFLASH_SIMD_INLINE F32x16 Min(F32x16 a, F32x16 b) {
  DFLASH_SIMD_LANES(F32x16, a.v[i] < b.v[i] ? a.v[i] : b.v[i]);
}
DFLASH_SIMD_INLINE F32x16 Abs(F32x16 a) { DFLASH_SIMD_LANES(F32x16, __builtin_fabsf(a.v[i])); }

DFLASH_SIMD_INLINE Mask16 operator<(F32x16 a, F32x16 b) { DFLASH_SIMD_LANES(Mask16, a.v[i] < b.v[i]); }
DFLASH_SIMD_INLINE Mask16 operator<=(F32x16 a, F32x16 b) { DFLASH_SIMD_LANES(Mask16, a.v[i] <= b.v[i]); }
DFLASH_SIMD_INLINE Mask16 operator>(F32x16 a, F32x16 b) { return b < a; }
DFLASH_SIMD_INLINE Mask16 operator>=(F32x16 a, F32x16 b) { return b <= a; }
DFLASH_SIMD_INLINE Mask16 IsNan(F32x16 a) { DFLASH_SIMD_LANES(Mask16, a.v[i] != a.v[i]); }
DFLASH_SIMD_INLINE F32x16 Select(Mask16 m, F32x16 if_true, F32x16 if_false) {
  DFLASH_SIMD_LANES(F32x16, m.v[i] ? if_true.v[i] : if_false.v[i]);
}
DFLASH_SIMD_INLINE bool Any(Mask16 m) {
  bool any = false;
  for (int i = 0; i < kLanes; ++i) any = any || m.v[i];
  return any;
}

DFLASH_SIMD_INLINE I32x16 BitsOf(F32x16 a) { DFLASH_SIMD_LANES(I32x16, Bits(a.v[i])); }
DFLASH_SIMD_INLINE F32x16 FromBits(I32x16 a) { DFLASH_SIMD_LANES(F32x16, Value(a.v[i])); }
DFLASH_SIMD_INLINE F32x16 ToFloat(I32x16 a) {
  DFLASH_SIMD_LANES(F32x16, static_cast<float>(static_cast<int32_t>(a.v[i])));
}
DFLASH_SIMD_INLINE I32x16 operator+(I32x16 a, I32x16 b) { DFLASH_SIMD_LANES(I32x16, a.v[i] + b.v[i]); }
DFLASH_SIMD_INLINE I32x16 operator-(I32x16 a, I32x16 b) { DFLASH_SIMD_LANES(I32x16, a.v[i] - b.v[i]); }
DFLASH_SIMD_INLINE I32x16 operator&(I32x16 a, I32x16 b) { DFLASH_SIMD_LANES(I32x16, a.v[i] & b.v[i]); }
DFLASH_SIMD_INLINE I32x16 operator|(I32x16 a, I32x16 b) { DFLASH_SIMD_LANES(I32x16, a.v[i] | b.v[i]); }
DFLASH_SIMD_INLINE I32x16 operator^(I32x16 a, I32x16 b) { DFLASH_SIMD_LANES(I32x16, a.v[i] ^ b.v[i]); }
DFLASH_SIMD_INLINE I32x16 MulWide(I32x16 a, uint32_t b, I32x16* high) {
  I32x16 low;
  for (int i = 0; i < kLanes; ++i) {
    const uint64_t product = static_cast<uint64_t>(a.v[i]) * b;
    low.v[i] = static_cast<uint32_t>(product);
    high->v[i] = static_cast<uint32_t>(product >> 32);
  }
  return low;
}
DFLASH_SIMD_INLINE I32x16 operator<<(I32x16 a, int n) { DFLASH_SIMD_LANES(I32x16, a.v[i] << n); }
DFLASH_SIMD_INLINE I32x16 operator>>(I32x16 a, int n) {
  DFLASH_SIMD_LANES(I32x16, static_cast<uint32_t>(static_cast<int32_t>(a.v[i]) >> n));
}

#undef DFLASH_SIMD_LANES

DFLASH_SIMD_INLINE float ReduceAdd(F32x16 a) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) a.v[i] = a.v[i] + a.v[i + width];
  }
  return a.v[0];
}
DFLASH_SIMD_INLINE float ReduceMax(F32x16 a) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
  }
  return a.v[0];
}

}  // namespace dflash::simd_scalar
